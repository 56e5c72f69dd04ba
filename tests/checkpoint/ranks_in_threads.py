"""Worlds of several processes, each of which is a thread here: fast, and with folders of their own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class RankWorld:
    """The part of `World` that checkpoints use, for one rank of its own process.

    Attributes:
        rank: the rank.
        size: number of ranks.
        local_ranks: the rank alone.
        calls: names of the calls so far.
    """

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict) -> None:
        self.rank, self.size, self.local_ranks = rank, size, (rank,)
        self.calls: list[str] = []
        self._barrier, self._board = barrier, board

    def _all(self, call: str, value: Any) -> dict[int, Any]:
        """Return what all ranks have passed to the same call."""
        self.calls.append(call)
        self._board[self.rank] = call, value
        self._barrier.wait()
        rows = dict(sorted(self._board.items()))
        self._barrier.wait()
        assert {name for name, _ in rows.values()} == {call}
        return {rank: row for rank, (_, row) in rows.items()}

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the value of one rank."""
        return self._all("broadcast", value)[source]

    def gather(self, local: dict, forms: dict) -> dict:
        """Return all tensors on rank 0."""
        rows = self._all("gather", local[self.rank])
        if self.rank:
            return {}
        assert forms.keys() == rows.keys()
        return rows

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._all("barrier", None)

    def run(self, job: Callable[[int], Any]) -> dict[int, Any]:
        """Run a job on the local rank."""
        return {self.rank: job(self.rank)}


#: The host of the current thread.
_HOST = threading.local()


class _HostThread(threading.Thread):
    """A thread that is on the host of the thread that makes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._host = getattr(_HOST, "name", "host")

    def run(self) -> None:
        """Run the target of the thread."""
        _HOST.name = self._host
        super().run()


def in_ranks(size: int, job: Callable[[RankWorld], Any], monkeypatch: Any) -> list[Any]:
    """Run a job on every rank, whose host is `host<rank>`; return results or errors by rank."""
    barrier, board = threading.Barrier(size, timeout=30), {}

    def run(rank: int) -> Any:
        _HOST.name = f"host{rank}"
        try:
            return job(RankWorld(rank, size, barrier, board))
        except Exception as error:
            return error

    with monkeypatch.context() as patch, ThreadPoolExecutor(size) as pool:
        patch.setattr(socket, "gethostname", lambda: _HOST.name)
        patch.setattr(threading, "Thread", _HostThread)
        return list(pool.map(run, range(size)))
