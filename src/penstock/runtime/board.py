"""The board that ranks write on: what each is doing, and what went wrong first."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Board(Protocol):
    """One rank's view of the board."""

    def doing(self, what: str) -> None:
        """Note what this rank is at, since now. Cheap: it is called for every op."""
        ...

    def fail(self, reason: str) -> None:
        """Say that the run is over. The first reason stays."""
        ...

    def failure(self, patience_s: float = 0.0) -> str | None:
        """The first reason, waiting a while for one if there is none yet."""
        ...

    def elsewhere(self) -> list[str]:
        """What the other ranks are at, one line each."""
        ...


class SharedBoard:
    """The board of ranks that are threads of one process."""

    def __init__(self, ranks: int) -> None:
        self.current: list[tuple[str, float]] = [("nothing yet", time.monotonic())] * ranks
        self.reason: str | None = None
        self._lock = threading.Lock()

    def for_rank(self, rank: int) -> ThreadBoard:
        """One rank's view."""
        return ThreadBoard(self, rank)

    def fail(self, reason: str) -> None:
        """See `Board.fail`."""
        with self._lock:
            self.reason = self.reason or reason


class ThreadBoard:
    """One rank's view of a `SharedBoard`."""

    def __init__(self, shared: SharedBoard, rank: int) -> None:
        self._shared, self._rank = shared, rank

    def doing(self, what: str) -> None:
        """See `Board.doing`."""
        self._shared.current[self._rank] = (what, time.monotonic())

    def fail(self, reason: str) -> None:
        """See `Board.fail`."""
        self._shared.fail(reason)

    def failure(self, patience_s: float = 0.0) -> str | None:
        """See `Board.failure`; a thread that is let go always finds the reason there."""
        del patience_s
        return self._shared.reason

    def elsewhere(self) -> list[str]:
        """See `Board.elsewhere`."""
        now = time.monotonic()
        return [
            describe(rank, what, now - since) for rank, (what, since) in enumerate(self._shared.current) if rank != self._rank
        ]


def describe(rank: int, what: str, seconds: float) -> str:
    """`rank 1 is at 1F5 since 42 s`."""
    return f"rank {rank} {what} since {seconds:.0f} s"
