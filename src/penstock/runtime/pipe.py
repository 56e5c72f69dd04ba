"""`Pipe`: a pipeline that is an `nn.Module`, for training loops that call `loss.backward()`
themselves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, SettingError
from penstock.runtime.pipe_play import Engine
from penstock.runtime.pipe_run import check, cut, run_forward
from penstock.runtime.pipe_stage import Partition, PipeStage
from penstock.tracing import deferred_batch_norm as deferred
from penstock.tracing.sequential import runs_otherwise
from penstock.tracing.skippable import Skip, Skippable, verify_skippables

#: How many micro-batches, of so many, run again before their backward.
_RECOMPUTED: dict[str, Callable[[int], int]] = {
    "always": lambda count: count,
    "except_last": lambda count: count - 1,
    "never": lambda _: 0,
}

Devices = int | Iterable[torch.device | str | int]


class BalanceError(PenstockError, ValueError):
    """A balance that does not fit the layers."""


class Pipe(nn.Module):
    """An `nn.Sequential` cut over devices, or over threads of a CPU, in one process. Called like
    torchgpipe's GPipe and FairScale's Pipe.

        model = ps.Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        loss = criterion(model(x), target.to(model.devices[-1]))
        loss.backward()

    A batch is cut into micro-batches along its first dimension (`torch.chunk`), which follow each
    other through the partitions; in the backward too. Outputs and gradients are those of the plain
    model, but where a layer mixes samples: batch norm has the statistics of micro-batches.
    Gradients of weights come to `.grad`, and to hooks, once per backward, summed over
    micro-batches.

    Args:
        module: the layers. They are moved to their devices and stay the caller's own.
        balance: layers per partition.
        devices: one for each partition, further ones are let go; several may be the CPU, each then
        with a thread of its own. A number: so
            many GPUs, or threads of the CPU if there are not so many. By default all GPUs, or
            without any as many threads as partitions.
        chunks: how many micro-batches; a batch of fewer samples has fewer.
        checkpoint: which micro-batches keep only their inputs in training, and run their forward
        again before their backward: "always" (all
            of them), "except_last" or "never".
        deferred_batch_norm: batch norm's running statistics are updated once per batch, by the
        whole batch's: `tracing.deferred_batch_norm`.

    Attributes:
        partitions: an `nn.ModuleList` of one `nn.Sequential` per device, in which layers have the
        names that they had. balance, devices, chunks, checkpoint: as above, as lists and plain
        values. side_loss: the mean of what layers have said by `ps.side_loss` in the last forward,
        one number with its graph, 0 where there was
            nothing. The caller adds it to the loss; a backward of a loss without it is refused,
            where it has a gradient.

    Raises:
        TypeError: `module` is no `nn.Sequential`; or skips do not match, see `verify_skippables`.
        ValueError: settings that make no sense, or layers or parameters that stand in several
        places. IndexError: there are too few devices.
    """

    balance: list[int]
    devices: list[torch.device]
    partitions: nn.ModuleList
    chunks: int
    checkpoint: str
    side_loss: Tensor

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Devices | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if not isinstance(module, nn.Sequential):
            raise TypeError(
                f"module must be nn.Sequential to be partitioned, not {type(module).__name__}"
            )
        _check_sequential(module)
        lengths = _lengths(module, balance)
        if self.chunks < 1:
            raise ValueError(f"number of chunks must be positive integer, not {self.chunks}")
        self._recomputed(1)
        verify_skippables(module)
        found = _devices(devices, len(lengths))
        if len(found) < len(lengths):
            raise IndexError(
                f"too few devices to hold given partitions (devices: {len(found)}, partitions: {len(lengths)})"
            )
        self.balance, self.devices = lengths, found[: len(lengths)]
        self.deferred_batch_norm = bool(deferred_batch_norm)
        if self.deferred_batch_norm:
            deferred.convert(module, self.chunks)
        self.partitions = nn.ModuleList(_cut(module, lengths))
        _check_shared(self.partitions, self.devices)
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self.train(module.training)
        self._engine: Engine | None = None
        self.side_loss = torch.zeros(())
        self._lock = threading.RLock()

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """The output for a batch.

        Args:
            input: a tensor, or tensors and None in nested tuples, lists and dicts, with the samples
            in their first dimension. On any
                device: micro-batches are moved.

        Returns:
            What the last layer returns, of the whole batch, on `devices[-1]`.

        Raises:
            TypeError, ValueError: the input cannot be cut.
            RuntimeError: the outputs of micro-batches cannot be joined.
            Exception: what a layer raises. The Pipe can go on.
        """
        check(input)
        if not self.partitions:
            return input
        parts = cut(input, self.chunks)
        with self._lock:
            if self._engine is None:
                self._engine = Engine(_stages(self.partitions, self.devices))
            if self.training and self.deferred_batch_norm:
                deferred.begin(self, len(parts))
            recomputed = self._recomputed(len(parts)) if self.training else 0
            output, side = run_forward(self._engine, input, parts, recomputed)
            self.side_loss = torch.zeros((), device=self.devices[-1]) if side is None else side
            return output

    def _recomputed(self, count: int) -> int:
        if self.checkpoint not in _RECOMPUTED:
            raise ValueError(
                f"checkpoint is not one of 'always', 'except_last', or 'never', but {self.checkpoint!r}"
            )
        return _RECOMPUTED[self.checkpoint](count)

    # -- like the nn.Sequential that it was made of
    # ---------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(len(partition) for partition in self._sequentials())

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._sequentials():
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def _sequentials(self) -> Sequence[Partition]:
        found: Sequence[Partition] = list(self.partitions)  # type: ignore[arg-type]
        return found

    def sequential_state_dict(self) -> dict[str, Tensor]:
        """The `state_dict` that the plain `nn.Sequential` has. `load_state_dict` takes it, too."""
        return {key.split(".", 2)[2]: value for key, value in self.state_dict().items()}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take names as they are here, as they were under another balance, or as the plain
        `nn.Sequential` has them.
        """
        home = {
            name: f"{prefix}partitions.{place}.{name}."
            for place, partition in enumerate(self.partitions)
            for name in partition._modules
        }
        for key in [key for key in state_dict if key.startswith(prefix)]:
            words = key.removeprefix(prefix).split(".")
            if words[0] == "partitions" and len(words) > 2 and words[1].isdigit():
                words = words[2:]
            if words[0] in home and len(words) > 1:
                state_dict[home[words[0]] + ".".join(words[1:])] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- moving
    # ---------------------------------------------------------------------------------------------------------

    def cuda(self, device: Any = None) -> Self:
        """Refused.

        Raises:
            TypeError: always.
        """
        raise _moved(device)

    def cpu(self) -> Self:
        """Refused.

        Raises:
            TypeError: always.
        """
        raise _moved("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the type of numbers; the devices stay.

        Raises:
            TypeError: a device is among the arguments, or a tensor, which has one.
        """
        if kwargs.keys() & {"device", "tensor", "other"} or (
            args and isinstance(args[0], (torch.device, str, int, Tensor))
        ):
            raise _moved(kwargs.get("device", args[0] if args else None))
        return super().to(*args, **kwargs)

    # -- copying
    # --------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_lock": None, "side_loss": torch.zeros(())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()


def _moved(where: Any) -> TypeError:
    return TypeError(
        f"denied to move parameters and buffers to {where!r}, because a Pipe has every partition on its own device: give "
        "devices= when it is made"
    )


def _lengths(module: nn.Sequential, balance: Iterable[int] | None) -> list[int]:
    """The balance as a list, once it fits."""
    advice = (
        "Let Penstock find one: ps.plan(ps.profile(module, example), stages=…) measures the layers and balances them; "
        "torchgpipe.balance and fairscale.nn.pipe.balance do it for torchgpipe and FairScale"
    )
    if balance is None:
        raise BalanceError(
            f"balance is required: how many of the {len(module)} layers each partition has. {advice}"
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
            "module with duplicate children is not supported: one layer stands in several places. Give each place a layer of "
            "its own, or use ps.Pipeline, which ties weights"
        )
    return lengths


def _check_sequential(module: nn.Sequential) -> None:
    """Refuse an nn.Sequential that does more than calling its children, which are all that
    partitions take.

    Raises:
        SettingError: it has a forward, hooks, parameters or buffers of its own.
    """
    if runs_otherwise(module):
        raise SettingError(
            f"{type(module).__name__} has a forward, an order of its layers or hooks of its own, and a Pipe runs the layers alone, "
            "one after another: give it nn.Sequential(*layers), with what the forward does besides in a layer; or use "
            "ps.Pipeline with ps.chain(model, example)"
        )
    known = {id(tensor) for layer in module for tensor in (*layer.parameters(), *layer.buffers())}
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and id(tensor) not in known:
            raise SettingError(
                f"{name} is a parameter or buffer of the nn.Sequential itself, and a Pipe takes its layers alone: it would not be "
                "in parameters() or state_dict(). Let the layer that uses it have it"
            )


def _devices(devices: Devices | None, partitions: int) -> list[torch.device]:
    gpus = torch.cuda.device_count()
    if devices is None:
        devices = range(gpus) if gpus else ["cpu"] * partitions
    elif isinstance(devices, int):
        devices = range(devices) if devices <= gpus else ["cpu"] * devices
    found = [torch.device(device) for device in devices]
    here = (
        torch.cuda.current_device()
        if any(device.type == "cuda" and device.index is None for device in found)
        else 0
    )
    return [
        torch.device("cuda", here) if device.type == "cuda" and device.index is None else device
        for device in found
    ]


def _cut(module: nn.Sequential, lengths: Sequence[int]) -> Iterator[Partition]:
    layers = iter(module._modules.items())
    first = 0
    for length in lengths:
        partition = Partition(OrderedDict(islice(layers, length)))
        partition.first_of_layers = first
        partition.training = module.training
        first += length
        yield partition


def _check_shared(partitions: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
    """Refuse a tensor on two devices: moved to one it would be lost to the other."""
    home: dict[int, tuple[int, str]] = {}
    for place, partition in enumerate(partitions):
        for name, tensor in (*partition.named_parameters(), *partition.named_buffers()):
            before, as_name = home.setdefault(id(tensor), (place, name))
            if devices[before] != devices[place]:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not supported: "
                    f"{as_name} (partition {before} on {devices[before]}) is {name} (partition {place} on {devices[place]}) as "
                    "well. Let a balance put both on one device, or use ps.Pipeline, which ties weights"
                )


def _stages(partitions: Iterable[nn.Module], devices: Sequence[torch.device]) -> list[PipeStage]:
    """The partitions as what the engine plays, and which skips go from one to another."""
    found: list[Partition] = list(partitions)  # type: ignore[arg-type]
    stashed: dict[Skip, int] = {}
    takes: list[list[Skip]] = [[] for _ in found]
    gives: list[list[Skip]] = [[] for _ in found]
    for place, partition in enumerate(found):
        for layer in partition:
            if isinstance(layer, Skippable):
                stashed |= dict.fromkeys(layer.stashable(), place)
                for skip in layer.poppable():
                    if stashed[skip] != place:
                        takes[place].append(skip)
                        gives[stashed[skip]].append(skip)
    return [PipeStage(*each) for each in zip(found, devices, takes, gives, strict=True)]
