"""All ranks as threads of this process: for tests and debugging, and for a single rank."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import DeadlineExceeded, PeerFailed, RunError
from penstock.ranks.calls import Calls
from penstock.ranks.status_board import SharedBoard, ThreadBoard, reason_of
from penstock.shared_memory.segment import Segment
from penstock.transport.devices.device_collectives import DeviceCollectives
from penstock.transport.devices.device_discovery import set_current_device
from penstock.transport.in_process import Exchange, MemoryTransport
from penstock.transport.payload import TensorForm
from penstock.transport.replica_collectives import ReplicaCollectives

T = TypeVar("T")

#: Seconds for which ranks may go on after another one has failed.
_GRACE_S = 3.0
_JobQueue = SimpleQueue[Callable[[], None] | None]


class ThreadWorld:
    """A `World` whose ranks are threads. A single rank runs in the caller's thread.

    A thread cannot be stopped from outside. If a rank is stuck in an op after the others have
    failed, the world is unusable from then on.

    Args:
        size: number of ranks.
        device: where all ranks compute; with an index, unless it is the CPU.
        deadline_s: seconds for which a rank waits for another.
        enter_device: makes the device the current one of the calling thread.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        deadline_s: float,
        enter_device: Callable[[torch.device], None] = set_current_device,
    ) -> None:
        self.size = size
        self.receives_on_device = False
        self.collectives: DeviceCollectives | None = None
        self._enter_device = enter_device
        self.local_ranks = tuple(range(size))
        self._device = device
        self._deadline_s = deadline_s
        self._board = SharedBoard(size)
        self._exchange = Exchange()
        self._queues: list[_JobQueue] = []
        #: Why the world is unusable, if it is.
        self._unusable: str | None = None
        self.calls = Calls()

    def device(self, rank: int) -> torch.device:
        """See `World.device`."""
        del rank
        return self._device

    def transport(self, rank: int) -> MemoryTransport:
        """See `World.transport`."""
        return MemoryTransport(rank, self._exchange, self._deadline_s)

    def open_segment(self, ranks: Sequence[int]) -> Callable[[int, int], Segment] | None:
        """See `World.open_segment`. Threads exchange the tensors themselves."""
        del ranks
        return None

    def replica_collectives(self, stage: int) -> ReplicaCollectives | None:
        """See `World.replica_collectives`."""
        del stage
        return None

    @property
    def has_replica_collectives(self) -> bool:
        """See `World.has_replica_collectives`."""
        return False

    def board(self, rank: int) -> ThreadBoard:
        """See `World.board`."""
        return self._board.for_rank(rank)

    def to_first_clock(self) -> Callable[[float], float]:
        """See `World.to_first_clock`: threads share a clock."""
        return float

    def buffer_bytes(self, rank: int) -> int:
        """See `World.buffer_bytes`: threads pass on tensors without a buffer."""
        del rank
        return 0

    def run(self, job: Callable[[int], T]) -> dict[int, T]:
        """See `World.run`.

        Raises:
            DeadlineExceeded: no rank has made progress for longer than the deadline.
            RunError: a rank got stuck in an earlier run.
        """
        if self.size == 1:
            return {0: job(0)}
        if self._unusable is not None:
            raise RunError(
                f"this pipeline cannot go on after a batch that failed: {self._unusable}. Make a "
                "new Pipeline"
            )
        self._board.reset()
        errors: list[BaseException] = []
        device_type = self._device.type
        # Autocast is thread-local: pass the caller's on to the ranks.
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)

        def autocast_job(rank: int) -> T:
            with torch.autocast(device_type, enabled=enabled, dtype=dtype):
                return job(rank)

        futures = {rank: self._start(autocast_job, rank, errors) for rank in self.local_ranks}
        try:
            self._watch(list(futures.values()))
        except BaseException as error:  # noqa: BLE001 - Ctrl-C or a deadline; raised below
            self._stop(reason_of(error))
            errors.insert(0, error)
        if errors:
            self._wait_after_failure(futures)
            # PeerFailed only reports that another rank has failed: that rank's error is the cause.
            raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])
        return {rank: future.result() for rank, future in futures.items()}

    def _start(self, job: Callable[[int], T], rank: int, errors: list[BaseException]) -> Future[T]:
        """Run `job` in the thread of a rank. If it fails, all ranks are stopped.

        Args:
            job: the function, which is called with the rank.
            rank: the rank.
            errors: receives exceptions in the order in which they occur.
        """
        if not self._queues:
            self._queues = [SimpleQueue() for _ in self.local_ranks]
            for number, queue in enumerate(self._queues):
                # Daemon threads: one that is stuck must not keep the process from ending.
                threading.Thread(
                    target=_serve, args=(queue,), name=f"penstock-rank-{number}", daemon=True
                ).start()
            weakref.finalize(self, _end_threads, self._queues)
        future: Future[T] = Future()

        def guarded() -> None:
            try:
                # CUDA's current device is thread-local, and 0 in a new thread.
                self._enter_device(self._device)
                future.set_result(job(rank))
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                errors.append(error)
                self._stop(reason_of(error, rank))
                future.set_exception(error)

        self._queues[rank].put(guarded)
        return future

    def _stop(self, reason: str) -> None:
        self._board.fail(reason)
        self._exchange.close(reason)

    def _watch(self, futures: list[Future[T]]) -> None:
        """Wait until all jobs are done or one has failed.

        Transports enforce the deadline for messages. This is for layers that draw random numbers,
        which wait for each other without a message.

        Raises:
            DeadlineExceeded: no rank has made progress for longer than the deadline.
        """
        # Longer than the deadline, so that a transport, which knows more, reports first.
        limit_s = self._deadline_s * 1.1 + 0.5
        remaining_s = limit_s
        while wait(futures, remaining_s, FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in futures):
                return
            rank, status, idle_s = self._board.latest()
            remaining_s = limit_s - idle_s
            if remaining_s <= 0:
                raise DeadlineExceeded(
                    rank, f"an end to where it {status}", idle_s, self.board(rank).describe_others()
                )

    def _wait_after_failure(self, futures: Mapping[int, Future[T]]) -> None:
        """Wait for ranks to stop after a failure; mark the world unusable if one does not."""
        # This stays only if a second interrupt ends the wait below.
        self._unusable = "it was interrupted twice"
        wait(futures.values(), _GRACE_S)
        stuck = [rank for rank, future in futures.items() if not future.done()]
        if stuck:
            self._unusable = "; ".join(self._board.line(rank) for rank in stuck)
        else:
            self._unusable = None
            self._exchange.reopen()

    def broadcast(self, value: Any, source: int, form: TensorForm | None = None) -> Any:
        """See `World.broadcast`: all ranks share the memory of this process."""
        del source, form
        return value

    def gather(
        self, local: Mapping[int, Sequence[Tensor]], forms: Mapping[int, Sequence[TensorForm]]
    ) -> dict[int, list[Tensor]]:
        """See `World.gather`."""
        del forms
        gathered: dict[int, list[Tensor]] = {}
        for rank, tensors in local.items():
            # Copies, as from another process: the ranks go on and change their tensors.
            gathered[rank] = [tensor.detach().cpu().clone() for tensor in tensors]
        return gathered

    def tell(self, numbers: Tensor) -> None:
        """See `World.tell`: there is no other process."""

    def hear(self, source: int, count: int) -> Callable[[], Tensor]:
        """See `World.hear`: there is no other process."""
        raise NotImplementedError

    def barrier(self) -> None:
        """See `World.barrier`: there is no other process."""

    def abandon(self, error: BaseException) -> None:
        """See `World.abandon`: nothing runs outside `run`."""

    def close(self) -> None:
        """See `World.close`."""
        _end_threads(self._queues)
        self._queues = []


def _serve(jobs: _JobQueue) -> None:
    """Run the jobs of a rank, in its thread, until the queue has None."""
    # A new thread adopts torch's number of threads only on this call. Kernels split their sums by
    # that number: without the call, results would differ from the caller's in the last bits.
    torch.get_num_threads()
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the batch


def _end_threads(queues: list[_JobQueue]) -> None:
    """End the threads of all ranks."""
    for queue in queues:
        queue.put(None)
