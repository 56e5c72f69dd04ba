"""Arguments of `Pipe` that are refused, and how layers and devices are assigned."""

from __future__ import annotations

import pytest
import torch
from tests.pipe.layers import Holder
from torch import nn

from penstock.errors import SettingError
from penstock.pipe.pipe import Pipe


@pytest.mark.parametrize(
    ("module", "settings", "kind", "says"),
    [
        (
            nn.Linear(1, 1),
            {"balance": [1]},
            TypeError,
            "module must be nn.Sequential to be partitioned, not Linear",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {},
            ValueError,
            "balance is required: the number of layers of each partition, 1 in total",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [2]},
            ValueError,
            r"different length \(module: 1, sum of balance: 2\)",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [1, 0]},
            ValueError,
            r"must be positive integer \(balance: \[1, 0\]\)",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [1], "chunks": 0},
            ValueError,
            "number of chunks must be positive integer, not 0",
        ),
        (
            nn.Sequential(nn.Tanh()),
            {"balance": [1], "checkpoint": "sometimes"},
            ValueError,
            "checkpoint is not one of 'always', 'except_last', or 'never'",
        ),
        (
            nn.Sequential(nn.Tanh(), nn.Tanh()),
            {"balance": [1, 1], "devices": ["cpu"]},
            IndexError,
            r"too few devices to hold given partitions \(devices: 1, partitions: 2\)",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_peers_kinds_of_error(module, settings, kind, says):
    """Whoever catches the peers' errors catches these."""
    with pytest.raises(kind, match=says):
        Pipe(module, **{"devices": 4, **settings})


def test_a_layer_in_two_places_is_refused():
    """It would be moved twice, and be in two partitions at the same time."""
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        Pipe(nn.Sequential(layer, layer), [1, 1], devices=2)


def test_a_weight_on_two_devices_is_refused_with_both_its_names():
    """Moved to one device it would be lost to the other, as silently as can be."""
    inner = nn.Linear(2, 2)
    with pytest.raises(
        ValueError,
        match=r"0\.inner\.weight \(partition 0 on cpu\) is 1\.inner\.weight \(partition 1 on meta\)",
    ):
        Pipe(nn.Sequential(Holder(inner), Holder(inner)), [1, 1], devices=["cpu", "meta"])


class Doubled(nn.Sequential):
    """Does more than its layers."""

    def forward(self, x):
        """Run it."""
        return 2 * super().forward(x)


class Owner(nn.Sequential):
    """Has a parameter of its own."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(2))


def test_a_sequential_that_does_or_has_more_than_its_layers_is_refused():
    """Partitions take the layers alone: the rest was dropped without a word."""
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(SettingError, match=r"^Doubled has a forward, .* runs the layers alone"):
        Pipe(Doubled(*layers), [1, 1], devices=["cpu"] * 2)
    hooked = nn.Sequential(*layers)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(
        SettingError, match=r"^Sequential has a forward, an order of its layers or hooks"
    ):
        Pipe(hooked, [1, 1], devices=["cpu"] * 2)
    with pytest.raises(
        SettingError, match=r"^scale is a parameter or buffer of the nn\.Sequential itself"
    ):
        Pipe(Owner(*layers), [1, 1], devices=["cpu"] * 2)
