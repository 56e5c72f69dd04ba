"""Threads that play the partitions of a `Pipe` side by side, one for each, and the choice between
them and none.

Where ops are as short as Python's own part in them, threads only stand in each other's way (there
is one interpreter lock): then one thread plays all. Results are the same.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue

import torch

#: Seconds of an op from which on threads pay; see benchmarks/pipe.
PAYS_S = 400e-6

Job = Callable[[], None]
_Jobs = SimpleQueue[Job | None]


class Choice:
    """Whether threads pay, by what an op took of its thread's time on a core in a half step of the
    kind, not long ago.

    Time on a core, not on the clock: waiting for the interpreter, or for a core that others use,
    says nothing about the op. Asking for it is not free (20 µs and more on a virtual machine), so
    it is asked for now and then.
    """

    def __init__(self) -> None:
        self.forced: bool | None = None
        self.seconds_per_op = float("inf")
        self._plays = 0
        self._cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )

    def threads(self) -> bool:
        """What to do now; at first, not knowing anything, use threads: memory that one thread has
        used is little use to others.
        """
        if self.forced is not None:
            return self.forced
        return self._cores > 1 and self.seconds_per_op >= PAYS_S

    def due(self) -> bool:
        """Whether to take the time of this half: of the first few, and of every eighth."""
        self._plays += 1
        return self._plays <= 3 or self._plays % 8 == 0


class Crew:
    """Threads of one `Pipe`, started when they are first needed, gone when the crew is."""

    def __init__(self) -> None:
        self._queues: list[_Jobs] = []

    def play(self, jobs: Sequence[Job], stop: Callable[[BaseException], None]) -> None:
        """Do all jobs at once, each in a thread of its own, and wait for them.

        Args:
            jobs: raise nothing.
            stop: called when the wait is interrupted; jobs then come to their end.
        """
        while len(self._queues) < len(jobs):
            queue = _Jobs()
            # Daemons, so that one that is stuck in a layer does not keep the process from ending.
            threading.Thread(
                target=_serve, args=(queue,), name=f"penstock-pipe-{len(self._queues)}", daemon=True
            ).start()
            # At the end of the process they are left asleep: one that wakes while the interpreter
            # goes is torn out of torch's C++.
            weakref.finalize(self, queue.put, None).atexit = False
            self._queues.append(queue)
        done = SimpleQueue[bool]()
        inference, own = torch.is_inference_mode_enabled(), torch.get_num_threads()
        share = max(1, own // len(jobs))  # of the caller's threads inside an op
        for queue, job in zip(self._queues, jobs, strict=False):
            queue.put(_told(job, done, share, inference=inference))
        changed = False
        for _ in jobs:
            try:
                changed |= done.get()
            except BaseException as error:  # noqa: BLE001 - Ctrl-C; `stop` sees to it that it is raised
                stop(error)
                changed |= done.get()
        if changed:  # what a thread sets for itself is also what threads yet to come begin with
            torch.set_num_threads(own)


def _told(job: Job, done: SimpleQueue[bool], intra_op: int, *, inference: bool) -> Job:
    """The job with what the caller's thread has set for itself."""

    def told() -> None:
        changes = torch.get_num_threads() != intra_op
        try:
            if changes:
                torch.set_num_threads(intra_op)
            with torch.inference_mode() if inference else nullcontext():
                job()
        finally:
            done.put(changes)

    return told


def _serve(queue: _Jobs) -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # it holds tensors


def alone() -> bool:
    """Whether the caller's thread has something set that no other thread can be given: modes, hooks
    on what autograd saves.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return bool(
        torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or hooks
    )
