"""Dataclasses and named tuples on their way over a boundary."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import RunError
from penstock.transport.records import from_plain, to_plain


@dataclasses.dataclass(frozen=True)
class Hidden:
    """What layers here pass on."""

    states: torch.Tensor
    mask: torch.Tensor | None = None
    depth: int = 0

    def __post_init__(self):
        if self.depth > 100:
            raise ValueError("made on the way")


class Pair(NamedTuple):
    """A named tuple."""

    left: torch.Tensor
    right: Hidden


class Deeper(nn.Module):
    """A layer that takes and returns a dataclass."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, hidden):
        """Masked, one deeper."""
        return Hidden(
            torch.tanh(self.map(hidden.states)) * hidden.mask, hidden.mask, hidden.depth + 1
        )


class First(nn.Module):
    """From the model's inputs."""

    def forward(self, x):
        """A mask of what is above 0."""
        return Hidden(x.states * 2, x.states > 0, 1)


class Last(nn.Module):
    """To one tensor; it sees that the depth has come along."""

    def forward(self, hidden):
        """As deep as it says."""
        return hidden.states * hidden.depth


@pytest.mark.parametrize("value", [
    torch.ones(2), None, 3, [1, (2, {"a": torch.ones(1)})], Hidden(torch.ones(2), None, 7),
    Pair(torch.ones(1), Hidden(torch.zeros(1))), {"deep": [Hidden(torch.ones(1), depth=2)]},
])  # fmt: skip
def test_values_come_back_as_they_were(value):
    """The nesting, the types and the very tensors."""
    there = from_plain(to_plain(value))
    assert type(there) is type(value)
    assert str(there) == str(value)


def test_a_class_that_the_receiver_has_not_loaded_is_named():
    """A rank cannot make what it does not know, and imports nothing because a message says so."""
    with pytest.raises(
        RunError,
        match="a Unknown of antigravity crosses a stage boundary, and this rank does not find that class",
    ):
        from_plain({"penstock.type": "antigravity:Unknown", "fields": {}})
    with pytest.raises(RunError, match="does not find that class"):
        from_plain({"penstock.type": "os:system", "fields": {}})


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_layers_pass_dataclasses_from_stage_to_stage(recompute):
    """Inputs too; gradients are those of one device."""
    torch.manual_seed(0)
    net = nn.Sequential(First(), Deeper(), Deeper(), Last())
    x, y = Hidden(torch.randn(6, 4)), torch.randn(6, 4)
    pipe = ps.Pipeline(net, balance=[1, 2, 1], schedule="1f1b", micro_batches=3, loss=nn.functional.mse_loss, executor="threads",
                       recompute=recompute)  # fmt: skip
    loss = pipe.train_batch(x, y)
    found = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    expected = nn.functional.mse_loss(net(x), y)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected))
    for grad, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    torch.testing.assert_close(pipe.forward(x), net(x))


def test_a_model_may_return_a_dataclass():
    """Outputs of micro-batches are joined field by field."""
    net = nn.Sequential(First(), Deeper())
    pipe = ps.Pipeline(net, balance=[1, 1], schedule="gpipe", micro_batches=2, executor="threads",
                       loss=lambda hidden, y: (hidden.states - y).square().mean())  # fmt: skip
    x = Hidden(torch.randn(4, 4))
    made = pipe.forward(x)
    assert isinstance(made, Hidden)
    assert made.depth == 2
    torch.testing.assert_close(made.states, net(x).states)
    assert float(pipe.train_batch(x, torch.zeros(4, 4))) == pytest.approx(
        float(net(x).states.square().mean())
    )
