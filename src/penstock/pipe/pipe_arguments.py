"""The arguments of `Pipe`: check them, and divide the layers into partitions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import nn

from penstock.errors import PenstockError, SettingError
from penstock.modules.skippable import Skip, Skippable
from penstock.pipe.pipe_stage import Partition, PipeStage
from penstock.tracing.sequential import runs_otherwise

Devices = int | Iterable[torch.device | str | int]


class BalanceError(PenstockError, ValueError):
    """Raised when `balance` does not match the layers of the module."""


def check_balance(module: nn.Sequential, balance: Iterable[int] | None) -> list[int]:
    """Return the balance as a list, or raise if it does not match the module."""
    advice = (
        "ps.plan(ps.profile(module, example), stages=…) measures the layers and computes a "
        "balance, as torchgpipe.balance and fairscale.nn.pipe.balance do for torchgpipe and "
        "FairScale"
    )
    if balance is None:
        raise BalanceError(
            f"balance is required: the number of layers of each partition, {len(module)} in total. "
            f"{advice}"
        )
    lengths = [int(length) for length in balance]
    if sum(lengths) != len(module):
        raise BalanceError(
            "module and sum of balance have different length "
            f"(module: {len(module)}, sum of balance: {sum(lengths)}). {advice}"
        )
    if any(length < 1 for length in lengths):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {lengths})")
    if len({id(layer) for layer in module}) != len(module):
        raise ValueError(
            "module with duplicate children is not supported: one layer occurs in several places. "
            "Use a separate layer in each place, or ps.Pipeline, which ties weights"
        )
    return lengths


def check_sequential(module: nn.Sequential) -> None:
    """Reject an nn.Sequential that does more than call its children, the only part that is run.

    Raises:
        SettingError: it overrides forward, or has hooks, parameters or buffers itself.
    """
    if runs_otherwise(module):
        raise SettingError(
            f"{type(module).__name__} has a forward, an order of its layers or hooks of its own, "
            "and a Pipe runs the layers alone, one after another: pass nn.Sequential(*layers), "
            "with any further work of the forward in a layer; or use ps.Pipeline with "
            "ps.chain(model, example)"
        )
    layer_tensors = {
        id(tensor) for layer in module for tensor in (*layer.parameters(), *layer.buffers())
    }
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and id(tensor) not in layer_tensors:
            raise SettingError(
                f"{name} is a parameter or buffer of the nn.Sequential itself, and a Pipe takes "
                "its layers alone: it would not be in parameters() or state_dict(). Register it in "
                "the layer that uses it"
            )


def resolve_devices(devices: Devices | None, partitions: int) -> list[torch.device]:
    """Return the devices of the argument `devices`, with explicit indices for GPUs."""
    gpus = torch.cuda.device_count()
    if devices is None:
        devices = gpus or ["cpu"] * partitions
    if isinstance(devices, int):
        on_gpus = devices <= gpus
        devices = [f"cuda:{index}" if on_gpus else "cpu" for index in range(devices)]
    return [
        torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda" and device.index is None
        else device
        for device in map(torch.device, devices)
    ]


def split_layers(module: nn.Sequential, lengths: Sequence[int]) -> Iterator[Partition]:
    """Yield the layers as partitions of the given lengths; layers keep their names."""
    layers = iter(module._modules.items())
    first = 0
    for length in lengths:
        partition = Partition(OrderedDict(islice(layers, length)))
        partition.first_layer = first
        partition.training = module.training
        first += length
        yield partition


def check_shared(partitions: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
    """Reject a tensor of partitions on two devices: `.to` would separate the two uses."""
    first_use: dict[int, tuple[int, str]] = {}
    for index, partition in enumerate(partitions):
        for name, tensor in (*partition.named_parameters(), *partition.named_buffers()):
            first_index, first_name = first_use.setdefault(id(tensor), (index, name))
            if devices[first_index] != devices[index]:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not supported: "
                    f"{first_name} (partition {first_index} on {devices[first_index]}) is {name} "
                    f"(partition {index} on {devices[index]}) as well. Choose a balance that puts "
                    "both on one device, or use ps.Pipeline, which ties weights"
                )


def build_stages(
    partitions: Iterable[nn.Module], devices: Sequence[torch.device]
) -> list[PipeStage]:
    """Build the stages that the engine runs, with the skip connections between partitions."""
    modules: list[Partition] = list(partitions)  # type: ignore[arg-type]
    source_of: dict[Skip, int] = {}
    incoming: list[list[Skip]] = [[] for _ in modules]
    outgoing: list[list[Skip]] = [[] for _ in modules]
    for index, partition in enumerate(modules):
        for layer in partition:
            if not isinstance(layer, Skippable):
                continue
            source_of |= dict.fromkeys(layer.stashable(), index)
            for skip in layer.poppable():
                # `verify_skippables` has checked that a layer before stashes every skip.
                if source_of[skip] != index:
                    incoming[index].append(skip)
                    outgoing[source_of[skip]].append(skip)
    columns = zip(modules, devices, incoming, outgoing, strict=True)
    return [
        PipeStage(module, device, skips_in, skips_out)
        for module, device, skips_in, skips_out in columns
    ]
