"""Arguments of `Pipe` that are refused, and how layers and devices are assigned."""

from __future__ import annotations

import pytest
import torch
from tests.pipe.layers import Holder
from torch import nn

from penstock.errors import SettingError
from penstock.modules.skippable import pop, skippable, stash
from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_arguments import (
    build_stages,
    check_sequential,
    resolve_devices,
    split_layers,
)


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


def test_a_buffer_on_two_devices_is_refused_and_one_on_a_common_device_is_not():
    """Such as a table of positions that two layers read."""

    def layers():
        table = torch.zeros(2)
        pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
        for layer in pair:
            layer.register_buffer("table", table)
        return nn.Sequential(*pair)

    with pytest.raises(
        ValueError, match=r"0\.table \(partition 0 on cpu\) is 1\.table \(partition 1"
    ):
        Pipe(layers(), [1, 1], devices=["cpu", "meta"])
    pipe = Pipe(layers(), [1, 1], devices=["cpu", "cpu"])
    assert pipe[0].table is pipe[1].table


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


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"),
    [
        (0, None, ["cpu"] * 3),
        (2, None, ["cuda:0", "cuda:1"]),
        (0, 2, ["cpu"] * 2),
        (2, 2, ["cuda:0", "cuda:1"]),
        (4, 2, ["cuda:0", "cuda:1"]),
        (2, 3, ["cpu"] * 3),
        (2, ["cuda", "cuda:0", "cpu"], ["cuda:1", "cuda:0", "cpu"]),
        (0, [torch.device("cpu"), "meta"], ["cpu", "meta"]),
    ],
)
def test_devices_are_gpus_as_far_as_there_are_enough(gpus, devices, expected, monkeypatch):
    """A number means GPUs, or threads of the CPU if there are fewer; a GPU has its index."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_devices(devices, 3) == list(map(torch.device, expected))


def test_partitions_know_the_place_of_their_first_layer_and_the_mode():
    """The random streams of layers go by their place in the whole model."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(6))).eval()
    model[3].train()
    partitions = list(split_layers(model, [1, 3, 2]))
    assert [partition.first_layer for partition in partitions] == [0, 1, 4]
    assert [list(partition._modules) for partition in partitions] == [
        ["0"],
        list("123"),
        list("45"),
    ]
    assert not any(partition.training for partition in partitions)
    assert [layer.training for layer in model] == [False, False, False, True, False, False]


@skippable(stash=["a"])
class StashA(nn.Module):
    """Stashes one skip."""

    def forward(self, x):
        """Stash."""
        yield stash("a", x)
        return x


@skippable(stash=["b"], pop=["a"])
class PopAStashB(nn.Module):
    """Pops one skip, and stashes another."""

    def forward(self, x):
        """Pop and stash."""
        value = yield pop("a")
        yield stash("b", x)
        return x + value


@skippable(pop=["b"])
class PopB(nn.Module):
    """Pops a skip."""

    def forward(self, x):
        """Pop."""
        value = yield pop("b")
        return x + value


@pytest.mark.parametrize(
    ("lengths", "incoming", "outgoing"),
    [
        ([1, 1, 1], [[], ["a"], ["b"]], [["a"], ["b"], []]),
        ([2, 1], [[], ["b"]], [["b"], []]),
        ([1, 2], [[], ["a"]], [["a"], []]),
        ([3], [[]], [[]]),
    ],
)
def test_only_skips_between_partitions_pass_through_ports(lengths, incoming, outgoing):
    """A skip within a partition stays in it."""
    layers = nn.Sequential(StashA(), PopAStashB(), PopB())
    stages = build_stages(split_layers(layers, lengths), [torch.device("cpu")] * len(lengths))
    assert [[name for _, name in stage.incoming] for stage in stages] == incoming
    assert [[name for _, name in stage.outgoing] for stage in stages] == outgoing
    assert [len(stage.module) for stage in stages] == lengths


def test_a_tensor_of_a_layer_may_be_registered_in_the_container_too():
    """It is in the state already, so that nothing is lost."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.weight = model[0].weight
    model.register_buffer("mean", model[1].running_mean)
    model.register_buffer("missing", None)
    check_sequential(model)
    model.register_buffer("scale", torch.ones(2))
    with pytest.raises(SettingError, match=r"^scale is a parameter or buffer"):
        check_sequential(model)
