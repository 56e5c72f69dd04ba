"""Which layers are seeded: those whose code may draw, as it is at the beginning of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.modules import randomness


def transform(value: torch.Tensor) -> torch.Tensor:
    """Draw nothing."""
    return torch.relu(value)


def noisy(value: torch.Tensor) -> torch.Tensor:
    """Draw."""
    return value + torch.randn_like(value)


class Calling(nn.Module):
    """A layer that calls the function above."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Call the function that the name has now."""
        return transform(self.linear(value))


def losses_of(balance: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the losses of three batches; the function draws from the third on."""
    torch.manual_seed(0)
    pipe = ps.Pipeline(
        nn.Sequential(Calling(), Calling()),
        balance=balance,
        schedule="gpipe",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    x = torch.randn(4, 4)
    losses = [pipe.train_batch(x, x) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "transform", noisy)
        # Random numbers come from the pipeline's seed, not from the state of torch's generator.
        torch.manual_seed(len(balance))
        losses.append(pipe.train_batch(x, x))
    return losses


def test_a_layer_is_seeded_from_the_batch_on_in_which_its_code_may_draw(monkeypatch):
    """Batch 3 is not observed: only the proof of the layer's code shows that it draws now."""
    whole, cut = losses_of((2,), monkeypatch), losses_of((1, 1), monkeypatch)
    assert whole[1] != whole[2]
    assert whole == cut


class DrawingOnDevice(nn.Module):
    """A layer that draws from the device's generator, in evaluation too."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = lambda value: torch.randn(value.shape, generator=generator)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Add noise."""
        return self.linear(value) + self.draw(value)


def test_draws_from_a_device_s_generator_are_seeded_in_evaluation(monkeypatch):
    """Batch 3 is not observed: that the layers draw was seen on the generator in batches 1 and 2."""
    generator = torch.Generator()
    generators = [torch.default_generator, generator]
    monkeypatch.setattr(randomness, "_generators", lambda device: generators)
    results = []
    for balance in ((2,), (1, 1)):
        torch.manual_seed(0)
        pipe = ps.Pipeline(
            nn.Sequential(DrawingOnDevice(generator), DrawingOnDevice(generator)),
            balance=balance,
            schedule="gpipe",
            micro_batches=2,
            loss=nn.functional.mse_loss,
            executor="threads",
            device="cpu",
        )
        x = torch.randn(4, 4)
        generator.manual_seed(len(balance))
        results.append([pipe.eval_batch(x, x) for _ in range(3)])
    assert results[0] == results[1]
