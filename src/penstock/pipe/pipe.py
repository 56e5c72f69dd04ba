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
from penstock.modules import deferred_batch_norm as deferred
from penstock.modules.skippable import Skip, Skippable, verify_skippables
from penstock.pipe.pipe_batch import check_input, split_input
from penstock.pipe.pipe_engine import Engine
from penstock.pipe.pipe_run import run_forward
from penstock.pipe.pipe_stage import Partition, PipeStage
from penstock.tracing.sequential import runs_otherwise

#: By checkpoint mode: the number of recomputed micro-batches, from the number of micro-batches.
_RECOMPUTE_COUNTS: dict[str, Callable[[int], int]] = {
    "always": lambda count: count,
    "except_last": lambda count: count - 1,
    "never": lambda _: 0,
}

Devices = int | Iterable[torch.device | str | int]


class BalanceError(PenstockError, ValueError):
    """Raised when `balance` does not match the layers of the module."""


class Pipe(nn.Module):
    """An `nn.Sequential` partitioned over devices, or over CPU threads, in one process.

    The interface is that of torchgpipe's GPipe and FairScale's Pipe.

        model = ps.Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        loss = criterion(model(x), target.to(model.devices[-1]))
        loss.backward()

    A batch is split into micro-batches along its first dimension (`torch.chunk`). The micro-batches
    are pipelined through the partitions, in the forward and in the backward. Outputs and gradients
    equal those of the plain model, except where a layer mixes samples: batch norm uses the
    statistics of each micro-batch. Weight gradients, summed over micro-batches, reach `.grad` and
    hooks once per backward.

    Args:
        module: the layers. They are moved to their devices in place, not copied.
        balance: number of layers per partition.
        devices: one device per partition; surplus devices are ignored. Several may be the CPU,
            each with its own thread. An integer n means the first n GPUs, or n CPU threads if
            there are fewer GPUs. Default: all GPUs, or one CPU thread per partition if there are
            no GPUs.
        chunks: number of micro-batches; a batch with fewer samples has fewer.
        checkpoint: which micro-batches save only their inputs in training and recompute their
            forward before their backward: "always" (all of them), "except_last" or "never".
        deferred_batch_norm: update the running statistics of batch norm once per batch, from the
            whole batch (see `tracing.deferred_batch_norm`).

    Attributes:
        partitions: an `nn.ModuleList` with one `nn.Sequential` per device; layers keep their names.
        balance, devices, chunks, checkpoint: the arguments, as lists and plain values.
        side_loss: mean over the batch of the terms that layers passed to `ps.side_loss` in the last
            forward: a scalar with its graph, 0 without such terms. Add it to the loss; if it
            requires a gradient, the backward of a loss without it raises.

    Raises:
        TypeError: `module` is not an `nn.Sequential`, or its skip connections do not match (see
            `verify_skippables`).
        ValueError: an invalid setting, or a layer or parameter that occurs in several places.
        IndexError: fewer devices than partitions.
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
        lengths = _check_balance(module, balance)
        if self.chunks < 1:
            raise ValueError(f"number of chunks must be positive integer, not {self.chunks}")
        self._recompute_count(1)  # raises if the checkpoint mode is unknown
        verify_skippables(module)
        available = _resolve_devices(devices, len(lengths))
        if len(available) < len(lengths):
            raise IndexError(
                "too few devices to hold given partitions "
                f"(devices: {len(available)}, partitions: {len(lengths)})"
            )
        self.balance, self.devices = lengths, available[: len(lengths)]
        self.deferred_batch_norm = bool(deferred_batch_norm)
        if self.deferred_batch_norm:
            deferred.convert(module, self.chunks)
        self.partitions = nn.ModuleList(_split_layers(module, lengths))
        _check_shared(self.partitions, self.devices)
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self.train(module.training)
        self._engine: Engine | None = None
        self.side_loss = torch.zeros(())
        self._lock = threading.RLock()

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """Return the output for a batch.

        Args:
            input: a tensor, or tensors and None in nested tuples, lists and dicts; the first
                dimension of each tensor indexes the samples. On any device: micro-batches are
                moved to the first partition.

        Returns:
            The output of the last layer for the whole batch, on `devices[-1]`.

        Raises:
            TypeError, ValueError: the input cannot be split into micro-batches.
            RuntimeError: the outputs of the micro-batches cannot be concatenated.
            Exception: any exception of a layer. The Pipe stays usable.
        """
        check_input(input)
        if not self.partitions:
            return input
        micro_batches = split_input(input, self.chunks)
        with self._lock:
            if self._engine is None:
                self._engine = Engine(build_stages(self.partitions, self.devices))
            if self.training and self.deferred_batch_norm:
                deferred.begin(self, len(micro_batches))
            recompute_count = self._recompute_count(len(micro_batches)) if self.training else 0
            output, side_loss = run_forward(self._engine, input, micro_batches, recompute_count)
            if side_loss is None:
                side_loss = torch.zeros((), device=self.devices[-1])
            self.side_loss = side_loss
            return output

    def _recompute_count(self, micro_batches: int) -> int:
        if self.checkpoint not in _RECOMPUTE_COUNTS:
            raise ValueError(
                "checkpoint is not one of 'always', 'except_last', or 'never', "
                f"but {self.checkpoint!r}"
            )
        return _RECOMPUTE_COUNTS[self.checkpoint](micro_batches)

    # -- the interface of the nn.Sequential that was partitioned

    def __len__(self) -> int:
        return sum(len(partition) for partition in self._sequentials())

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._sequentials():
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def _sequentials(self) -> Sequence[Partition]:
        partitions: Sequence[Partition] = list(self.partitions)  # type: ignore[arg-type]
        return partitions

    def sequential_state_dict(self) -> dict[str, Tensor]:
        """Return the `state_dict` of the plain `nn.Sequential`; `load_state_dict` accepts it."""
        return {key.split(".", 2)[2]: value for key, value in self.state_dict().items()}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept keys of this Pipe, of a Pipe with another balance, or of the `nn.Sequential`."""
        prefix_of_layer = {
            layer_name: f"{prefix}partitions.{index}.{layer_name}."
            for index, partition in enumerate(self.partitions)
            for layer_name in partition._modules
        }
        for key in [key for key in state_dict if key.startswith(prefix)]:
            path = key.removeprefix(prefix).split(".")
            if path[0] == "partitions" and len(path) > 2 and path[1].isdigit():
                path = path[2:]
            if path[0] in prefix_of_layer and len(path) > 1:
                renamed_key = prefix_of_layer[path[0]] + ".".join(path[1:])
                state_dict[renamed_key] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- moving between devices, which a Pipe does not support

    def cuda(self, device: Any = None) -> Self:
        """Raise: every partition stays on its device.

        Raises:
            TypeError: always.
        """
        raise _move_error(device)

    def cpu(self) -> Self:
        """Raise: every partition stays on its device.

        Raises:
            TypeError: always.
        """
        raise _move_error("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype of the parameters; the devices stay.

        Raises:
            TypeError: an argument is a device, or a tensor, which implies one.
        """
        if kwargs.keys() & {"device", "tensor", "other"} or (
            args and isinstance(args[0], (torch.device, str, int, Tensor))
        ):
            raise _move_error(kwargs.get("device", args[0] if args else None))
        return super().to(*args, **kwargs)

    # -- copying and pickling, without the engine and the lock

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None, "_lock": None, "side_loss": torch.zeros(())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()


def _move_error(target: Any) -> TypeError:
    return TypeError(
        f"denied to move parameters and buffers to {target!r}, because a Pipe keeps every "
        "partition on its own device: choose devices by the argument devices= of Pipe"
    )


def _check_balance(module: nn.Sequential, balance: Iterable[int] | None) -> list[int]:
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


def _check_sequential(module: nn.Sequential) -> None:
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


def _resolve_devices(devices: Devices | None, partitions: int) -> list[torch.device]:
    """Return the devices of the argument `devices`, with explicit indices for GPUs."""
    gpus = torch.cuda.device_count()
    if devices is None:
        devices = range(gpus) if gpus else ["cpu"] * partitions
    elif isinstance(devices, int):
        devices = range(devices) if devices <= gpus else ["cpu"] * devices
    return [
        torch.device("cuda", torch.cuda.current_device())
        if device.type == "cuda" and device.index is None
        else device
        for device in map(torch.device, devices)
    ]


def _split_layers(module: nn.Sequential, lengths: Sequence[int]) -> Iterator[Partition]:
    layers = iter(module._modules.items())
    first = 0
    for length in lengths:
        partition = Partition(OrderedDict(islice(layers, length)))
        partition.first_layer = first
        partition.training = module.training
        first += length
        yield partition


def _check_shared(partitions: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
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
                if source_of[skip] != index:
                    incoming[index].append(skip)
                    outgoing[source_of[skip]].append(skip)
    columns = zip(modules, devices, incoming, outgoing, strict=True)
    return [
        PipeStage(module, device, skips_in, skips_out)
        for module, device, skips_in, skips_out in columns
    ]
