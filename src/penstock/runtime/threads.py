"""All ranks in this process: threads and a dictionary. For tests and debugging in milliseconds, and
for one rank alone.
"""

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
from penstock.runtime.board import SharedBoard, ThreadBoard, reason_of
from penstock.runtime.calls import Calls
from penstock.transport.card_facts import set_current_device
from penstock.transport.memory import Exchange, MemoryTransport
from penstock.transport.payload import TensorForm

T = TypeVar("T")

_GRACE_S = 3.0
_Jobs = SimpleQueue[Callable[[], None] | None]


class ThreadWorld:
    """See `World`. One rank runs in the caller's own thread.

    A thread cannot be stopped from outside: a rank that is stuck in an op when the others have
    failed is given up, and the world with it.

    Args:
        size: number of ranks.
        device: where all ranks compute; not the CPU only with its index.
        deadline_s: seconds for which a rank waits for another.
        enter_device: makes the device the current one of the thread that calls it.
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
        self._enter_device = enter_device
        self.local_ranks = tuple(range(size))
        self._device = device
        self._deadline_s = deadline_s
        self._board = SharedBoard(size)
        self._exchange = Exchange()
        self._queues: list[_Jobs] = []
        self._given_up: str | None = None
        self.calls = Calls()

    def device(self, rank: int) -> torch.device:
        """See `World.device`."""
        del rank
        return self._device

    def transport(self, rank: int) -> MemoryTransport:
        """See `World.transport`."""
        return MemoryTransport(rank, self._exchange, self._deadline_s)

    def board(self, rank: int) -> ThreadBoard:
        """See `World.board`."""
        return self._board.for_rank(rank)

    def run(self, job: Callable[[int], T]) -> dict[int, T]:
        """See `World.run`.

        Raises:
            DeadlineExceeded: no rank has moved for longer than the deadline.
            RunError: a rank was given up in an earlier run.
        """
        if self.size == 1:
            return {0: job(0)}
        if self._given_up is not None:
            raise RunError(
                f"this pipeline cannot go on after a batch that failed: {self._given_up}. Make a new Pipeline"
            )
        self._board.reset()
        errors: list[BaseException] = []
        kind = self._device.type
        mixed = (
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
        )  # the caller's, who sees no threads

        def mixed_job(rank: int) -> T:
            with torch.autocast(kind, enabled=mixed[0], dtype=mixed[1]):
                return job(rank)

        futures = {rank: self._start(mixed_job, rank, errors) for rank in self.local_ranks}
        try:
            self._watch(list(futures.values()))
        except BaseException as error:  # noqa: BLE001 - Ctrl-C, or nobody moves any more; raised below
            self._stop(reason_of(error))
            errors.insert(0, error)
        if errors:
            self._let_go(futures)
            raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])
        return {rank: future.result() for rank, future in futures.items()}

    def _start(self, job: Callable[[int], T], rank: int, errors: list[BaseException]) -> Future[T]:
        """Let the rank's thread do `job`; if it fails, all stop. Errors are noted in the order in
        which they come.
        """
        if not self._queues:
            self._queues = [SimpleQueue() for _ in self.local_ranks]
            for number, queue in enumerate(self._queues):
                # Daemons, so that one that is stuck does not keep the process from ending.
                threading.Thread(
                    target=_serve, args=(queue,), name=f"penstock-rank-{number}", daemon=True
                ).start()
            weakref.finalize(self, _end, self._queues)
        future: Future[T] = Future()

        def guarded() -> None:
            try:
                # CUDA's current device is of a thread, and 0 in a fresh one, whatever the caller's
                # is.
                self._enter_device(self._device)
                future.set_result(job(rank))
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                errors.append(error)
                self._stop(reason_of(error, rank))
                future.set_exception(error)

        self._queues[rank].put(guarded)
        return future

    def _stop(self, reason: str) -> None:
        self._board.fail(reason)
        self._exchange.close(reason)

    def _watch(self, futures: list[Future[T]]) -> None:
        """Until all are done or one has failed.

        Transports keep the deadline themselves; but layers that draw random numbers also wait for
        each other, unseen.
        """
        patience_s = self._deadline_s * 1.1 + 0.5
        left_s = patience_s
        while wait(futures, left_s, FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in futures):
                return
            rank, what, idle_s = self._board.latest()
            left_s = patience_s - idle_s
            if left_s <= 0:
                raise DeadlineExceeded(
                    rank, f"an end to where it {what}", idle_s, self.board(rank).elsewhere()
                )

    def _let_go(self, futures: Mapping[int, Future[T]]) -> None:
        """Wait a little for those who have not heard of the failure yet."""
        # if this is not the last word, an interrupt has come in between
        self._given_up = "it was interrupted twice"
        wait(futures.values(), _GRACE_S)
        stuck = [rank for rank, future in futures.items() if not future.done()]
        if stuck:
            self._given_up = "; ".join(self._board.line(rank) for rank in stuck)
        else:
            self._given_up = None
            self._exchange.reopen()

    def broadcast(self, value: Any, source: int, form: TensorForm | None = None) -> Any:
        """See `World.broadcast`: it is here already."""
        del source, form
        return value

    def gather(
        self, local: Mapping[int, Sequence[Tensor]], forms: Mapping[int, Sequence[TensorForm]]
    ) -> dict[int, list[Tensor]]:
        """See `World.gather`."""
        del forms
        return {
            rank: [tensor.detach().cpu().clone() for tensor in tensors]
            for rank, tensors in local.items()
        }

    def tell(self, numbers: Tensor) -> None:
        """See `World.tell`: there is no other process."""

    def hear(self, source: int, count: int) -> Callable[[], Tensor]:
        """See `World.hear`: there is no other process."""
        raise NotImplementedError

    def barrier(self) -> None:
        """See `World.barrier`: one process is always together."""

    def abandon(self, error: BaseException) -> None:
        """See `World.abandon`: nothing runs outside `run`."""

    def close(self) -> None:
        """See `World.close`."""
        _end(self._queues)
        self._queues = []


def _serve(jobs: _Jobs) -> None:
    """A rank's thread."""
    # A fresh thread takes up torch's number of threads only when it asks, and kernels split their
    # sums by that number:
    # without this, ranks would differ in the last bits from the caller's own thread.
    torch.get_num_threads()
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the batch


def _end(queues: list[_Jobs]) -> None:
    for queue in queues:
        queue.put(None)
