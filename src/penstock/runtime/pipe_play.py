"""Half a step of a `Pipe`, forward or backward, micro-batch by micro-batch: GPipe's fill and drain.

    partition 0 | F0 F1 F2 .        .  B2 B1 B0
    partition 1 | .  F0 F1 F2       B2 B1 B0 .

What crosses has a port: one between neighbours, one for every skip from where it is stashed to
where it is popped. On every port one partition puts and one takes, in the same order of
micro-batches; so ports are queues, and nothing else is waited for.

Source: Huang et al. 2019, GPipe, section 2.3; the recompute that does not wait for its gradient:
Kim et al. 2020, torchgpipe, 3.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from penstock.runtime.pipe_stage import PipeStage
from penstock.runtime.pipe_threads import Choice, Crew, alone
from penstock.tracing.skippable import Skip

#: A skip's own, or the number of the partition before it; None is where the whole begins and ends.
Port = Skip | int | None


class _Stopped(Exception):
    """Another partition has failed."""


_STOPPED = object()


@dataclass
class Half:
    """What partitions do in one half of a step.

    Attributes:
        kind: "forward" or "backward".
        order: of micro-batches, the same for all partitions.
        places: partitions, in the order in which a micro-batch comes to them.
        takes: by partition, the ports that it takes from.
        puts: likewise.
        prepare: called for a partition and a micro-batch before anything is waited for.
        op: called then with what was taken; returns what to put.
        given: by micro-batch, what there is at the port None.
        made: by micro-batch, what was put there.
    """

    kind: str
    order: Sequence[int]
    places: Sequence[int]
    takes: Sequence[Sequence[Port]]
    puts: Sequence[Sequence[Port]]
    prepare: Callable[[int, int], None]
    op: Callable[[int, int, list[Any]], list[Any]]
    given: Sequence[Any]
    made: dict[int, Any] = field(default_factory=dict)


class _Playing:
    """A half that is being played. The first exception stops everybody."""

    def __init__(self, half: Half, *, timed: bool) -> None:
        self.half = half
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._timed = timed
        self._queues = {port: SimpleQueue[Any]() for ports in half.puts for port in ports}

    def op(self, place: int, micro_batch: int) -> None:
        half, queues = self.half, self._queues
        half.prepare(place, micro_batch)
        taken = [
            half.given[micro_batch] if port is None else queues[port].get()
            for port in half.takes[place]
        ]
        if _STOPPED in taken:
            raise _Stopped
        made = half.op(place, micro_batch, taken)
        for port, value in zip(half.puts[place], made, strict=True):
            if port is None:
                half.made[micro_batch] = value
            else:
                queues[port].put(value)

    def row(self, place: int) -> None:
        """All that one partition does."""
        start = time.thread_time() if self._timed else 0.0
        try:
            for micro_batch in self.half.order:
                if self.error is not None:
                    return
                self.op(place, micro_batch)
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            self.stop(error)
        if self._timed:
            self.seconds += time.thread_time() - start

    def stop(self, error: BaseException) -> None:
        self.error = self.error or error
        for queue in self._queues.values():
            queue.put(_STOPPED)

    def all_rows(self) -> None:
        """Everything, in one thread, in the order of time."""
        start = time.thread_time() if self._timed else 0.0
        order, places = self.half.order, self.half.places
        for moment in range(len(order) + len(places) - 1):
            for depth in range(max(0, moment + 1 - len(order)), min(moment + 1, len(places))):
                self.op(places[depth], order[moment - depth])
        if self._timed:
            self.seconds = time.thread_time() - start


class Engine:
    """The partitions of a `Pipe`, and what plays them."""

    def __init__(self, stages: Sequence[PipeStage]) -> None:
        self.stages = stages
        self.choices = {"forward": Choice(), "backward": Choice()}
        # Ops on a GPU only start what it is to do: one thread can for all. And autograd runs its
        # nodes on GPUs in threads of its own, one
        # for each; our node's is among them, which could not wait for others that need it.
        self._able = len(stages) > 1 and all(stage.device.type == "cpu" for stage in stages)
        self._crew = Crew()
        last = len(stages) - 1
        self.into: list[list[Port]] = [
            [place - 1 if place else None, *stage.takes] for place, stage in enumerate(stages)
        ]
        self.out_of: list[list[Port]] = [
            [place if place < last else None, *stage.gives] for place, stage in enumerate(stages)
        ]

    def play(self, half: Half, mixed: Mixed) -> None:
        """Play it.

        Raises:
            BaseException: what an op has raised first.
        """
        choice = self.choices[half.kind]
        timed = self._able and choice.due()
        playing = _Playing(half, timed=timed)
        if self._able and choice.threads() and not alone():

            def row(place: int) -> Callable[[], None]:
                def job() -> None:
                    with mixed.entered():
                        playing.row(place)

                return job

            self._crew.play([row(place) for place in range(len(half.places))], playing.stop)
        else:
            with mixed.entered():
                playing.all_rows()
        if playing.error is not None:
            error, playing.error = playing.error, None
            try:
                raise error
            finally:
                del error
        if timed:
            choice.seconds_per_op = playing.seconds / (len(half.order) * len(half.places))


class Mixed:
    """The caller's mixed precision, for threads that know nothing of it and for backwards that come
    when it is over.
    """

    def __init__(self, devices: Sequence[torch.device], *, caching: bool) -> None:
        self._caching = caching
        self._set = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
        }

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Ops are mixed as they were for the caller.

        A weight's copy that was made without a graph must not serve one with a graph: where both
        come, none is kept.
        """
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self._set.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(
                            kind,
                            dtype,
                            enabled,
                            self._caching and torch.is_autocast_cache_enabled(),
                        )
                    )
            yield
