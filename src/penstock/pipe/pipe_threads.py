"""Threads that run the partitions of a `Pipe` concurrently, and the choice between them and one.

Where ops take no longer than Python's own share of them, threads only contend for the interpreter
lock; one thread then runs all partitions. Results are the same in both cases.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue

import torch

from penstock.cluster.local import available_cores

#: Seconds per op above which several threads are faster than one; measured by benchmarks/pipe.
MIN_THREADED_OP_S = 400e-6

Job = Callable[[], None]
_JobQueue = SimpleQueue[Job | None]


class ThreadChoice:
    """Choose between one thread and one per partition, from the CPU time of recent ops.

    The CPU time of the thread is used, not wall-clock time: waiting for the interpreter lock, or
    for a core that other processes use, says nothing about the op. Reading it costs 20 µs and more
    on a virtual machine, so it is read only for some half steps.

    Attributes:
        forced: True or False overrides the choice.
        seconds_per_op: CPU time per op in the last half step that was timed.
    """

    def __init__(self) -> None:
        self.forced: bool | None = None
        self.seconds_per_op = float("inf")
        self._half_steps = 0
        self._cores = available_cores()

    def use_threads(self) -> bool:
        """Return whether to use one thread per partition.

        Before the first measurement the answer is yes (`seconds_per_op` is infinite), because
        memory that one thread has used is of little use to other threads later.
        """
        if self.forced is not None:
            return self.forced
        return self._cores > 1 and self.seconds_per_op >= MIN_THREADED_OP_S

    def is_due(self) -> bool:
        """Return whether to time this half step: the first three, then every eighth."""
        self._half_steps += 1
        return self._half_steps <= 3 or self._half_steps % 8 == 0


class PartitionThreads:
    """The threads of one `Pipe`: started on first use, ended when this object is collected."""

    def __init__(self) -> None:
        self._queues: list[_JobQueue] = []

    def run(
        self,
        jobs: Sequence[Job],
        stop: Callable[[BaseException], None],
        *,
        in_turn: bool = False,
    ) -> None:
        """Run all jobs concurrently, each in its own thread, and wait for them.

        Args:
            jobs: functions that do not raise.
            stop: called if the wait is interrupted, such as by Ctrl-C; it must make the jobs end.
            in_turn: whether the jobs mostly compute one after the other, because they hold the same
                lock: each then has all threads of the caller inside its ops, not a share of them.
        """
        while len(self._queues) < len(jobs):
            queue = _JobQueue()
            # Daemon threads: one that is stuck in a layer must not keep the process from ending.
            threading.Thread(
                target=_serve, args=(queue,), name=f"penstock-pipe-{len(self._queues)}", daemon=True
            ).start()
            # Not at the exit of the process: a thread that wakes while the interpreter shuts down
            # is torn out of torch's C++ code.
            weakref.finalize(self, queue.put, None).atexit = False
            self._queues.append(queue)
        done = SimpleQueue[bool]()
        inference, caller_threads = torch.is_inference_mode_enabled(), torch.get_num_threads()
        intra_op_threads = caller_threads if in_turn else max(1, caller_threads // len(jobs))
        for queue, job in zip(self._queues, jobs, strict=False):
            queue.put(_with_settings(job, done, intra_op_threads, inference=inference))
        changed = False
        for _ in jobs:
            try:
                changed |= done.get()
            except BaseException as error:  # noqa: BLE001 - Ctrl-C; raised after `stop`
                stop(error)
                changed |= done.get()
        if changed:
            # torch.set_num_threads in a thread also sets the default of threads started later.
            torch.set_num_threads(caller_threads)


def _with_settings(
    job: Job, done: SimpleQueue[bool], intra_op_threads: int, *, inference: bool
) -> Job:
    """Wrap a job so that it runs with the caller's inference mode and a share of its threads.

    Args:
        job: the job.
        done: receives whether the number of threads had to be changed, when the job has ended.
        intra_op_threads: number of threads inside an op.
        inference: whether the caller is in inference mode.
    """

    def configured_job() -> None:
        changes = torch.get_num_threads() != intra_op_threads
        try:
            if changes:
                torch.set_num_threads(intra_op_threads)
            with torch.inference_mode() if inference else nullcontext():
                job()
        finally:
            done.put(changes)

    return configured_job


def _serve(queue: _JobQueue) -> None:
    """Run the jobs of a queue, in a thread, until the queue has None."""
    while (job := queue.get()) is not None:
        job()
        del job  # it refers to tensors


def has_thread_local_state() -> bool:
    """Return whether the calling thread has state that other threads cannot be given.

    Such state are torch function and dispatch modes, and hooks on saved tensors.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return bool(
        torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack() or hooks
    )
