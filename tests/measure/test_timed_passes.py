"""Layers are timed where they stand, in the order in which a rank runs them. No test looks at a
clock.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import LayerFailed
from penstock.measure import timed_passes as passes
from penstock.measure.concurrent import shares
from penstock.measure.profiler import profile
from penstock.measure.timed_passes import PHASES, TimedPasses, WithLoss
from penstock.measure.update import UpdateSeconds, measure_update

CPU = torch.device("cpu")


class Ticking(nn.Module):
    """A linear map that writes down its forwards and backwards."""

    def __init__(self, label, events):
        super().__init__()
        self.map, self.label, self.seen = nn.Linear(4, 4), label, events

    def forward(self, x):
        """Run it."""
        self.seen.append(f"F{self.label}")
        output = self.map(x)
        output.register_hook(lambda grad: self.seen.append(f"B{self.label}"))
        return output


def passes_of(modules, inner=False):
    """TimedPasses through them, alone."""
    return TimedPasses(modules, inner, CPU, [f"l{i}" for i in range(len(modules))])


def test_a_pass_goes_forward_through_all_layers_and_then_back_through_all():
    """As a rank does; a layer that is repeated by itself finds its input and its weights in the
    cache.
    """
    events = []
    passes = passes_of([Ticking(i, events) for i in range(3)])
    row = passes.run(torch.ones(2, 4))
    once = ["F0", "F1", "F2", "B2", "B1", "B0"]
    assert events[:6] == once
    assert events[6:9] == ["F0", "F1", "F2"], "then the backward in two parts"
    assert events[9:] == ["B2", "B1", "B2", "B1", "B0"], "the input parts, then the weight parts"
    assert [len(row.by_phase[phase]) for phase in PHASES] == [3] * 4


def test_every_backward_makes_the_gradients_of_its_weights_anew():
    """Adding them up is measured by itself: the first micro-batch of a batch has nothing to add to."""
    layer = nn.Linear(4, 4)
    passes_of([layer]).run(torch.ones(2, 4))
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0)), (
        "the sum over 2 samples, not over 2 backwards"
    )


def test_what_arrives_at_a_layer_is_what_the_one_behind_it_made():
    """Gradients as in training, and no memory that training would not have."""
    scale = nn.Linear(1, 1, bias=False)
    nn.init.constant_(scale.weight, 3.0)
    first = nn.Linear(1, 1, bias=False)
    nn.init.constant_(first.weight, 1.0)
    passes_of([first, scale]).run(torch.ones(2, 1))
    assert first.weight.grad is not None
    assert first.weight.grad.item() == 2 * 3.0


def test_the_loss_counts_with_the_last_layer_and_its_output_is_still_the_layers():
    """The last stage runs it; what crosses boundaries is no loss."""
    plain = profile(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), torch.ones(6, 4), sizes=(6,), repeats=1
    )
    with_loss = profile(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)),
        torch.ones(6, 4),
        sizes=(3, 6),
        repeats=1,
        loss=nn.functional.mse_loss,
        targets=torch.zeros(6, 8),
    )
    assert [layer.output_bytes_per_sample for layer in with_loss] == [
        layer.output_bytes_per_sample for layer in plain
    ]
    saved_bytes, saved_bytes_with_loss = (
        sum(layer.activation_bytes_per_sample for layer in layers) for layers in (plain, with_loss)
    )
    assert saved_bytes_with_loss == saved_bytes + 2 * 8 * 4, (
        "mean squared error keeps what it compares"
    )
    assert [layer.name for layer in with_loss] == [layer.name for layer in plain]


def test_a_loss_that_fails_names_the_layer_that_it_stands_behind():
    """It is part of that stage's forward in training, too."""
    network = WithLoss(nn.Linear(4, 2), nn.functional.cross_entropy, None)
    with pytest.raises(LayerFailed, match=r"^layer l0 failed on the example: "):
        passes_of([network]).run(torch.ones(2, 4))


def test_the_call_of_a_backward_is_not_counted_for_every_layer(monkeypatch):
    """A rank makes one for all layers of a stage; 37 of them were 1 % of VGG-11's backward."""
    monkeypatch.setattr(passes, "_backward_call_s", lambda device: 1e9)
    timed = passes_of([nn.Linear(4, 4)])
    assert timed.run(torch.ones(2, 4)).by_phase["backward"] == [0.0]


def test_measuring_updates_leaves_the_values_as_they_are():
    """Copies are measured, but in sequence: a layer that has been moved would be another one for
    what is measured later.
    """
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)]
    before = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]
    update_seconds = measure_update(layers, CPU)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (p for layer in layers for p in layer.parameters()), strict=True)
    )
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
    assert update_seconds.fixed_s > 0
    assert update_seconds.accumulate_s_per_byte > 0


def test_updates_of_nothing_take_nothing_but_the_call():
    """A model may be frozen."""
    update_seconds = measure_update([nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], CPU)
    assert (update_seconds.s_per_byte, update_seconds.accumulate_s_per_byte) == (0.0, 0.0)


def test_the_parts_of_a_model_count_by_their_bytes():
    """A rank with the small tensors of the first layers would else make the large ones of the last
    as dear.
    """
    parts = [
        UpdateSeconds(1.0, 10.0, 1.0, 100),
        UpdateSeconds(2.0, 1.0, 3.0, 900),
        UpdateSeconds(3.0, 0.0, 0.0, 0),
    ]
    assert UpdateSeconds.combine(parts) == UpdateSeconds(2.0, 1.9, 2.8, 1000)
    assert UpdateSeconds.combine(parts[2:]) == parts[2]


@pytest.mark.parametrize(("seconds", "ranks", "expected"), [
    ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
    ([1, 1, 1, 3], 2, [(0, 3), (3, 4)]),
    ([9, 1, 1], 2, [(0, 1), (1, 3)]),
    ([1, 1, 9], 2, [(0, 2), (2, 3)]),
    ([1, 2, 3, 4, 5, 6], 3, [(0, 3), (3, 5), (5, 6)]),
    ([0, 0, 0], 3, [(0, 1), (1, 2), (2, 3)]),
    ([1], 2, [(0, 1), (0, 1)]),
])  # fmt: skip
def test_ranks_that_measure_together_have_about_as_much_to_do(seconds, ranks, expected):
    """Who is done early would leave the others the machine to themselves."""
    assert [(part.start, part.stop) for part in shares(seconds, ranks)] == expected
