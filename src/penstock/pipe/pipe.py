"""`Pipe`: a pipeline that is an `nn.Module`, for training loops that call `loss.backward()`
themselves.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.losses.call import LossCall, one_number
from penstock.modules import deferred_batch_norm as deferred
from penstock.modules.skippable import verify_skippables
from penstock.pipe.pipe_arguments import (
    Devices,
    build_stages,
    check_balance,
    check_sequential,
    check_shared,
    resolve_devices,
    split_layers,
)
from penstock.pipe.pipe_batch import check_input, split_input
from penstock.pipe.pipe_compile import without_compilation
from penstock.pipe.pipe_engine import Engine
from penstock.pipe.pipe_module import PipeModule
from penstock.pipe.pipe_run import run_forward
from penstock.pipe.pipe_traced import (
    check_traced_inputs,
    follow_modes,
    layers_to_divide,
    prepare_graphs,
    take_names,
)
from penstock.pipe.scheduled_loss import scheduled_loss
from penstock.pipe.scheduled_run import ModelParts, ScheduledRun, check_schedule
from penstock.schedule.catalogue import schedule as make_schedule
from penstock.schedule.op import Schedule
from penstock.stage.stage import Loss
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.payload import Payload
from penstock.values.structure import map_tensors

#: By checkpoint mode: the number of recomputed micro-batches, from the number of micro-batches.
_RECOMPUTE_COUNTS: dict[str, Callable[[int], int]] = {
    "always": lambda count: count,
    "except_last": lambda count: count - 1,
    "never": lambda _: 0,
}


class Pipe(PipeModule):
    """An `nn.Sequential` partitioned over devices, or over CPU threads, in one process.

    The interface is that of torchgpipe's GPipe and FairScale's Pipe.

        model = ps.Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        loss = criterion(model(x), target.to(model.devices[-1]))
        loss.backward()

    With `loss=` the Pipe computes the loss itself, and can run any synchronous schedule:

        model = ps.Pipe(layers, balance=[2, 2], chunks=8, schedule="1f1b", loss=criterion)
        loss = model(x, target)
        loss.backward()

    A batch is split into micro-batches along its first dimension (`torch.chunk`). The micro-batches
    are pipelined through the partitions, in the forward and in the backward. Outputs and gradients
    equal those of the plain model, except where a layer mixes samples: batch norm uses the
    statistics of each micro-batch. Weight gradients, summed over micro-batches, reach `.grad` and
    hooks once per backward.

    Args:
        module: the layers; a chain, `ps.chain(model, x)`; or any module, with an example. They are
            moved to their devices in place, not copied. A traced model is called as the model
            itself, with positional or keyword inputs (see docs/pipe.md).
        balance: number of layers per partition.
        devices: one device per partition; surplus devices are ignored. Several may be the CPU,
            each with its own thread. An integer n means the first n GPUs, or n CPU threads if
            there are fewer GPUs. Default: all GPUs, or one CPU thread per partition if there are
            no GPUs.
        chunks: number of micro-batches; a batch with fewer samples has fewer.
        checkpoint: which micro-batches save only their inputs in training and recompute their
            forward before their backward: "always" (all of them), "except_last" or "never".
        deferred_batch_norm: update the running statistics of batch norm once per batch, from the
            whole batch (see `modules.deferred_batch_norm`).
        schedule: name of a synchronous schedule, or a `Schedule` with one stage per partition and
            `chunks` micro-batches. Any but "gpipe" runs backwards before the last forward, and
            needs `loss`.
        loss: `loss(output, target)`, as for `ps.Pipeline`. The model is then called with inputs
            and targets, and returns the loss of the batch.
        example: inputs on which a module that is no nn.Sequential is traced, as for `ps.chain`.

    Attributes:
        partitions: an `nn.ModuleList` with one `nn.Sequential` per device; layers keep their names.
        balance, devices, chunks, checkpoint, schedule, loss: the arguments, as lists and plain
            values.
        side_loss: mean over the batch of the terms that layers passed to `ps.side_loss` in the last
            forward: a scalar with its graph, 0 without such terms. Add it to the loss; if it
            requires a gradient, the backward of a loss without it raises.

    Raises:
        TypeError: `module` is not an `nn.Sequential`, or its skip connections do not match (see
            `verify_skippables`).
        ValueError: an invalid setting, or a layer or parameter that occurs in several places.
        IndexError: fewer devices than partitions.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = Pipe(model, balance=[2, 1], chunks=2)
        >>> output = pipe(torch.ones(8, 4))
        >>> output.sum().backward()
        >>> output.shape
        torch.Size([8, 2])
    """

    balance: list[int]
    chunks: int
    checkpoint: str
    schedule: str | Schedule
    loss: Loss | None
    side_loss: Tensor

    def __init__(
        self,
        module: nn.Module | TracedChain,
        balance: Iterable[int] | None = None,
        *,
        devices: Devices | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        schedule: str | Schedule = "gpipe",
        loss: Loss | None = None,
        example: Any = None,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        module, traced = layers_to_divide(module, example)
        # In `__dict__`: its modules are in the partitions.
        self.__dict__["_traced"] = traced
        check_sequential(module)
        lengths = check_balance(module, balance)
        if self.chunks < 1:
            raise ValueError(f"number of chunks must be positive integer, not {self.chunks}")
        self._recompute_count(1)  # raises if the checkpoint mode is unknown
        verify_skippables(module)
        available = resolve_devices(devices, len(lengths))
        if len(available) < len(lengths):
            raise IndexError(
                "too few devices to hold given partitions "
                f"(devices: {len(available)}, partitions: {len(lengths)})"
            )
        self.balance, self.devices = lengths, available[: len(lengths)]
        self.deferred_batch_norm = bool(deferred_batch_norm)
        if self.deferred_batch_norm:
            if traced is not None:
                deferred.check_not_traced(traced.roots[0])
            deferred.convert(module, self.chunks)
        self.partitions = nn.ModuleList(split_layers(module, lengths))
        check_shared(self.partitions, self.devices)
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        # Not by `train`, which would change the modes of single layers, such as a frozen batch norm.
        self.training = self.partitions.training = module.training
        self.schedule = schedule
        # In `__dict__`, because a loss that is a module is not a part of the model: not of its
        # parameters, its state_dict or its training mode.
        self.__dict__["loss"] = loss
        if loss is not None or self._needs_loss:
            self._check_schedule()
        self._engine: Engine | None = None
        # With the settings of which it was built.
        self._scheduled: tuple[tuple[object, ...], ScheduledRun] | None = None
        self.side_loss = torch.zeros(())
        self._lock = threading.RLock()
        if traced is not None:
            take_names(self, traced.roots[0])

    def forward(self, input: Any = None, target: Any = None, **inputs: Any) -> Any:  # noqa: A002 - torch's own name
        """Return the output for a batch, or with targets its loss.

        Args:
            input: a tensor, or tensors and None in nested tuples, lists and dicts; the first
                dimension of each tensor indexes the samples. On any device: micro-batches are
                moved to the first partition.
            target: the targets of the batch, likewise; for a Pipe with `loss=` only.
            inputs: inputs of a traced model by keyword, instead of `input`.

        Returns:
            The output of the last layer for the whole batch, on `devices[-1]`; or the loss of the
            batch with the side losses of the layers. If gradients are enabled, all backwards have
            then been run, and the backward of the loss hands on their gradients.

        Raises:
            TypeError, ValueError: the input cannot be split into micro-batches.
            SettingError: targets without `loss=`; or no targets in training, under a schedule that
                needs the loss.
            RuntimeError: the outputs of the micro-batches cannot be concatenated.
            Exception: any exception of a layer. The Pipe stays usable.
        """
        return without_compilation(self._forward, input, target, inputs)

    def _forward(self, value: Any, target: Any, inputs: dict[str, Any]) -> Any:
        """Do what `forward` says, never compiled by torch.compile."""
        if self._traced is not None:
            follow_modes(self, self._traced)
        if self.accepts_loss_kwargs:
            inputs = self._place_loss_count(inputs)
        if inputs:
            if self._traced is None or value is not None:
                raise SettingError(
                    f"{', '.join(inputs)}: inputs by keyword are for a Pipe of a traced model, "
                    "without other inputs"
                )
            value = inputs
        if target is not None:
            return self._loss_of(value, target)
        if self.training and torch.is_grad_enabled() and self._needs_loss:
            raise SettingError(
                f"this Pipe trains under the schedule {self._schedule_name}, which runs backwards "
                "before the last forward: call model(input, target), which returns the loss. For "
                "outputs alone call it in eval mode or under torch.no_grad()"
            )
        return self._output_of(value)

    def _output_of(self, value: Any) -> Any:
        """Return the output for a batch, with all forwards before all backwards."""
        check_input(value)
        if not self.partitions:
            return value
        micro_batches = split_input(value, self.chunks)
        with self._lock:
            self._prepare_graphs(micro_batches, value)
            if self._engine is None:
                self._engine = Engine(build_stages(self.partitions, self.devices))
            if self.deferred_batch_norm:
                deferred.begin(self, len(micro_batches))
            recompute_count = self._recompute_count(len(micro_batches)) if self.training else 0
            output, side_loss = run_forward(self._engine, value, micro_batches, recompute_count)
            if side_loss is None:
                side_loss = torch.zeros((), device=self.devices[-1])
            self.side_loss = side_loss
            return output

    def _prepare_graphs(self, micro_batches: Sequence[Payload], value: Any) -> None:
        """Trace the graphs that a batch needs, if the model is a traced one."""
        if self._traced is None or self._traced.variants is None:
            return
        check_traced_inputs(Payload.of(value))
        if prepare_graphs(self._traced.variants, micro_batches, training=self.training):
            self._engine = self._scheduled = None

    def _loss_of(self, value: Any, target: Any) -> Tensor:
        """Return the loss of a batch, with its gradients behind it if there will be any."""
        if self.loss is None:
            raise SettingError(
                "a Pipe is called with targets only if it has the loss: pass loss= when it is "
                "made, or compute the loss outside, criterion(model(x), y)"
            )
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        if not (weights and torch.is_grad_enabled()):
            device = self.devices[-1]
            call = LossCall(self.loss, device)
            loss = call.loss(
                self._output_of(value), map_tensors(lambda leaf: leaf.to(device), target)
            )
            if type(loss) is tuple and len(loss) == 2:
                loss = loss[0] / loss[1]
            return one_number(loss) + self.side_loss
        with self._lock:
            self._prepare_graphs(split_input(value, self.chunks), value)
            self.side_loss = torch.zeros((), device=self.devices[-1])
            return scheduled_loss(self._scheduled_run(self.loss), value, target, weights)

    def _scheduled_run(self, loss: Loss) -> ScheduledRun:
        """Return the model on the ranks of its schedule; build it if anything has changed."""
        settings = self.schedule, self.chunks, self.checkpoint
        if self._scheduled is not None:
            earlier, run = self._scheduled
            if earlier == settings and run.is_current():
                return run
        schedule = self._check_schedule()
        parts = ModelParts(self._sequentials(), self._traced, self.balance)
        run = ScheduledRun(parts, self.devices[0], schedule, self.checkpoint, loss)
        self._scheduled = settings, run
        return run

    @property
    def _schedule_name(self) -> str:
        return self.schedule.name if isinstance(self.schedule, Schedule) else str(self.schedule)

    @property
    def _needs_loss(self) -> bool:
        """Whether the schedule runs backwards before the last forward."""
        return self._schedule_name != "gpipe"

    def _check_schedule(self) -> Schedule:
        """Return the schedule for the present number of chunks.

        Raises:
            ScheduleError, SettingError: it does not exist, does not fit the Pipe, or needs a loss.
        """
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            schedule = make_schedule(schedule, len(self.balance), self.chunks)
        check_schedule(schedule)
        if (schedule.stages, schedule.micro_batches) != (len(self.balance), self.chunks):
            raise SettingError(
                f"the schedule {schedule.name} has {schedule.stages} stages and "
                f"{schedule.micro_batches} micro-batches, the Pipe {len(self.balance)} partitions "
                f"and {self.chunks} chunks: these must be equal"
            )
        if self.loss is None and self._needs_loss:
            raise SettingError(
                f"the schedule {schedule.name} runs backwards before the last forward, and a loss "
                "that the caller computes from all outputs exists only after it: pass the loss, "
                "ps.Pipe(…, loss=criterion), and call loss = model(x, y); or use schedule='gpipe'"
            )
        if self.loss is not None and len(set(self.devices)) > 1:
            raise SettingError(
                "with loss= all partitions of a Pipe are on one device, and these are on "
                f"{', '.join(map(str, dict.fromkeys(self.devices)))}: use ps.Pipeline with a "
                "process for each device, or compute the loss outside, with schedule='gpipe'"
            )
        return schedule

    def _recompute_count(self, micro_batches: int) -> int:
        if self.checkpoint not in _RECOMPUTE_COUNTS:
            raise ValueError(
                "checkpoint is not one of 'always', 'except_last', or 'never', "
                f"but {self.checkpoint!r}"
            )
        return _RECOMPUTE_COUNTS[self.checkpoint](micro_batches)

    # -- copying and pickling, without the engine and the lock

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a copy with weights, modules and graphs of its own."""
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        if self._traced is not None and self._traced.variants is not None:
            self._traced.variants.copy_with_model(memo)
        duplicate.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_engine": None,
            "_scheduled": None,
            "_lock": None,
            "side_loss": torch.zeros(()),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
