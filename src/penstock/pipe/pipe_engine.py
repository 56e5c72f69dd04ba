"""Run one forward or backward of a `Pipe`, micro-batch by micro-batch: GPipe's fill and drain.

    partition 0 | F0 F1 F2 .        .  B2 B1 B0
    partition 1 | .  F0 F1 F2       B2 B1 B0 .

Partitions exchange values through ports: one port between neighbours, and one for every skip
connection, from the partition that stashes it to the one that pops it. Every port has one writer
and one reader, which handle the micro-batches in the same order. A port is therefore a queue, and
no other synchronisation is needed.

Source: Huang et al. 2019, GPipe, section 2.3; recompute that starts before its gradient arrives:
Kim et al. 2020, torchgpipe, 3.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from penstock.modules.skippable import Skip
from penstock.pipe.pipe_stage import PipeStage
from penstock.pipe.pipe_threads import (
    PartitionThreads,
    ThreadChoice,
    has_thread_local_state,
)

#: The skip, or the index of the partition before the port. None is the port of the whole model: its
#: input in the first partition, its output in the last.
Port = Skip | int | None


class _Stopped(Exception):
    """Raised in a partition when another partition has failed."""


#: Queue item that wakes the readers of all ports after a failure.
_STOPPED = object()


@dataclass
class HalfStep:
    """The work of all partitions in one forward or backward.

    Attributes:
        kind: "forward" or "backward".
        order: micro-batches in the order in which every partition runs them.
        partitions: partitions in the order in which a micro-batch passes through them.
        in_ports: by partition, the ports that it reads.
        out_ports: by partition, the ports that it writes.
        prepare: called with partition and micro-batch before any port is read.
        op: called with partition, micro-batch and the values read; returns the values to write.
        inputs: by micro-batch, the values read from port None.
        outputs: by micro-batch, the values written to port None.
    """

    kind: str
    order: Sequence[int]
    partitions: Sequence[int]
    in_ports: Sequence[Sequence[Port]]
    out_ports: Sequence[Sequence[Port]]
    prepare: Callable[[int, int], None]
    op: Callable[[int, int, list[Any]], list[Any]]
    inputs: Sequence[Any]
    outputs: dict[int, Any] = field(default_factory=dict)


class _Execution:
    """One half step in progress. The first exception stops all partitions.

    Attributes:
        error: the first exception, if any.
        seconds: CPU time of all ops, if `timed`.
    """

    def __init__(self, half_step: HalfStep, *, timed: bool) -> None:
        self.half_step = half_step
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._timed = timed
        self._queues = {port: SimpleQueue[Any]() for ports in half_step.out_ports for port in ports}

    def run_op(self, partition: int, micro_batch: int) -> None:
        """Run one op: read its ports, compute, write its ports."""
        half_step, queues = self.half_step, self._queues
        half_step.prepare(partition, micro_batch)
        values = [
            half_step.inputs[micro_batch] if port is None else queues[port].get()
            for port in half_step.in_ports[partition]
        ]
        if _STOPPED in values:
            raise _Stopped
        results = half_step.op(partition, micro_batch, values)
        for port, value in zip(half_step.out_ports[partition], results, strict=True):
            if port is None:
                half_step.outputs[micro_batch] = value
            else:
                queues[port].put(value)

    def run_partition(self, partition: int) -> None:
        """Run all micro-batches of one partition, in the calling thread."""
        start = time.thread_time() if self._timed else 0.0
        try:
            for micro_batch in self.half_step.order:
                if self.error is not None:
                    return
                self.run_op(partition, micro_batch)
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            self.stop(error)
        if self._timed:
            self.seconds += time.thread_time() - start

    def stop(self, error: BaseException) -> None:
        """Record an error, unless there is one already, and wake all waiting partitions."""
        self.error = self.error or error
        for queue in self._queues.values():
            queue.put(_STOPPED)

    def run_all(self) -> None:
        """Run all partitions in the calling thread, in the order of the pipeline's clock ticks."""
        start = time.thread_time() if self._timed else 0.0
        order, partitions = self.half_step.order, self.half_step.partitions
        # In clock tick t, the partition at depth d runs micro-batch t - d.
        for tick in range(len(order) + len(partitions) - 1):
            for depth in range(max(0, tick + 1 - len(order)), min(tick + 1, len(partitions))):
                self.run_op(partitions[depth], order[tick - depth])
        if self._timed:
            self.seconds = time.thread_time() - start


class Engine:
    """The partitions of a `Pipe` and the threads that run them.

    Attributes:
        stages: the partitions.
        choices: for "forward" and "backward", the choice between one thread and several.
        forward_in: by partition, the ports that a forward reads and a backward writes.
        forward_out: by partition, the ports that a forward writes and a backward reads.
    """

    def __init__(self, stages: Sequence[PipeStage]) -> None:
        self.stages = stages
        self.choices = {"forward": ThreadChoice(), "backward": ThreadChoice()}
        # Threads are used on CPUs only. Ops on GPUs are asynchronous, so that one thread can launch
        # those of all partitions. And autograd runs the nodes of each GPU in a thread of its own;
        # the node of the Pipe runs in one of them, and would wait there for others that need it.
        self._threads_allowed = len(stages) > 1 and all(
            stage.device.type == "cpu" for stage in stages
        )
        self._threads = PartitionThreads()
        last = len(stages) - 1
        self.forward_in: list[list[Port]] = [
            [index - 1 if index else None, *stage.incoming] for index, stage in enumerate(stages)
        ]
        self.forward_out: list[list[Port]] = [
            [index if index < last else None, *stage.outgoing] for index, stage in enumerate(stages)
        ]

    def run(self, half_step: HalfStep, autocast: AutocastState) -> None:
        """Run a forward or backward of all partitions, with the caller's mixed precision.

        Raises:
            BaseException: the first exception of an op.
        """
        choice = self.choices[half_step.kind]
        timed = self._threads_allowed and choice.is_due()
        execution = _Execution(half_step, timed=timed)
        if self._threads_allowed and choice.use_threads() and not has_thread_local_state():

            def job(partition: int) -> None:
                with autocast.restored():
                    execution.run_partition(partition)

            jobs = [partial(job, partition) for partition in range(len(half_step.partitions))]
            in_turn = any(stage.randomness.observes_layers for stage in self.stages)
            self._threads.run(jobs, execution.stop, in_turn=in_turn)
        else:
            with autocast.restored():
                execution.run_all()
        if execution.error is not None:
            # Break the cycle error -> traceback -> this frame -> execution -> error.
            error, execution.error = execution.error, None
            try:
                raise error
            finally:
                del error
        if timed:
            op_count = len(half_step.order) * len(half_step.partitions)
            choice.seconds_per_op = execution.seconds / op_count


class AutocastState:
    """The caller's autocast settings, captured when a forward begins.

    Autocast is thread-local, so the threads of partitions have to enter it themselves; and a
    backward may come after the caller has left it.

    Args:
        devices: the devices of all partitions.
        caching: whether autocast may cache the converted copies of weights.
    """

    def __init__(self, devices: Sequence[torch.device], *, caching: bool) -> None:
        self._caching = caching
        self._settings: dict[str, tuple[bool, torch.dtype]] = {}
        for device_type in sorted({"cpu", *(device.type for device in devices)}):
            enabled = torch.is_autocast_enabled(device_type)
            self._settings[device_type] = enabled, torch.get_autocast_dtype(device_type)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Enter the captured autocast settings.

        A converted copy of a weight that was made without a graph must not be used by an op that
        records a graph. Where both kinds of ops occur (recompute), `caching` is False.
        """
        with ExitStack() as stack:
            for device_type, (enabled, dtype) in self._settings.items():
                if enabled or torch.is_autocast_enabled(device_type):
                    cache = self._caching and torch.is_autocast_cache_enabled()
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, cache))
            yield
