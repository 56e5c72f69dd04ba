"""All ranks in this process: threads and a dictionary. For tests and debugging in milliseconds, and for one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import PeerFailed
from penstock.runtime.board import SharedBoard, ThreadBoard
from penstock.transport.memory import Exchange, MemoryTransport
from penstock.transport.payload import TensorForm

T = TypeVar("T")


class ThreadWorld:
    """See `World`. One rank runs in the caller's own thread."""

    def __init__(self, size: int, device: torch.device, deadline_s: float) -> None:
        self.size = size
        self.local_ranks = tuple(range(size))
        self._device = device
        self._deadline_s = deadline_s
        self._board = SharedBoard(size)
        self._exchange = Exchange()
        self._pool: ThreadPoolExecutor | None = None

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
        """See `World.run`."""
        if self.size == 1:
            return {0: job(0)}
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.size, "penstock-rank")
        self._board.reason = None
        futures: dict[int, Future[T]] = {rank: self._pool.submit(self._guarded, job, rank) for rank in self.local_ranks}
        wait(futures.values())
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        if errors:
            self._exchange.reopen()
            raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])
        return {rank: future.result() for rank, future in futures.items()}

    def _guarded(self, job: Callable[[int], T], rank: int) -> T:
        try:
            return job(rank)
        except BaseException as error:
            self._board.fail(str(error))
            self._exchange.close(str(error))
            raise

    def broadcast(self, value: Any, source: int, form: TensorForm | None = None) -> Any:
        """See `World.broadcast`: it is here already."""
        del source, form
        return value

    def gather(self, local: Mapping[int, Sequence[Tensor]],
               forms: Mapping[int, Sequence[TensorForm]]) -> dict[int, list[Tensor]]:  # fmt: skip
        """See `World.gather`."""
        del forms
        return {rank: [tensor.detach().cpu().clone() for tensor in tensors] for rank, tensors in local.items()}

    def barrier(self) -> None:
        """See `World.barrier`: one process is always together."""

    def close(self) -> None:
        """See `World.close`."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
