"""One partition of a `Pipe` whose layers change values in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import RunError
from penstock.modules.skippable import pop, skippable, stash
from penstock.pipe.pipe import Pipe


@skippable(stash=["input"])
class Stashing(nn.Module):
    """Stashes its input, and returns it."""

    def forward(self, x):
        """Return it."""
        yield stash("input", x)
        return x


@skippable(pop=["input"])
class Doubling(nn.Module):
    """Doubles its input in place, and adds what was stashed."""

    def forward(self, x):
        """Return the sum."""
        x.mul_(2)
        return x + (yield pop("input"))


def test_a_change_in_place_of_a_value_that_a_skip_shares_is_refused():
    """In the plain model the stashed tensor changes too; behind the ports each is by itself."""
    pipe = Pipe(nn.Sequential(Stashing(), Doubling()), [1, 1], devices=2, chunks=2)
    with pytest.raises(RunError, match=r"share memory cross .* changes one of them in place"):
        pipe(torch.ones(4, 2))


def test_a_layer_that_begins_to_change_its_input_in_place_is_refused_once():
    """Without copies, which it did not need before, the partition before would see the change."""

    class Changing(nn.Module):
        in_place = False

        def forward(self, x):
            return x.mul_(2) if self.in_place else x * 2

    layers = nn.Sequential(nn.Linear(2, 2), Changing())
    pipe, x = Pipe(layers, [1, 1], devices=2, chunks=1).eval(), torch.ones(4, 2)
    expected = pipe(x).detach()
    layers[1].in_place = True
    with torch.no_grad():
        with pytest.raises(RunError, match=r"in place .* had not done so in its first forward"):
            pipe(x)
        torch.testing.assert_close(pipe(x), expected)


def test_changes_in_place_are_known_for_training_and_evaluation_apart():
    """A layer that makes them in training alone gets a copy there, whatever evaluations have shown."""

    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul_(2) if self.training else x * 2

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Doubling()), [1, 1], devices=2, chunks=2)
    x = torch.ones(4, 2)
    expected = pipe.eval()(x)
    for _ in range(2):
        torch.testing.assert_close(pipe.train()(x), expected)
