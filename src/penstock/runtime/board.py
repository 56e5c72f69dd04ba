"""The board that ranks write on: what each is doing, and what went wrong first."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from penstock.errors import RunError


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
        self.current: list[tuple[str, float]] = [("has not begun", time.monotonic())] * ranks
        self.reason: str | None = None
        self._lock = threading.Lock()

    def for_rank(self, rank: int) -> ThreadBoard:
        """One rank's view."""
        return ThreadBoard(self, rank)

    def fail(self, reason: str) -> None:
        """See `Board.fail`."""
        with self._lock:
            self.reason = self.reason or reason

    def reset(self) -> None:
        """Begin a run in which nothing has failed yet."""
        self.reason = None
        self.current[:] = [("has not begun", time.monotonic())] * len(self.current)

    def latest(self) -> tuple[int, str, float]:
        """The rank that has moved last, what it does, and for how many seconds."""
        rank = max(range(len(self.current)), key=lambda rank: self.current[rank][1])
        what, since = self.current[rank]
        return rank, what, time.monotonic() - since

    def line(self, rank: int) -> str:
        """See `describe`."""
        what, since = self.current[rank]
        return describe(rank, what, time.monotonic() - since)


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
        return [
            self._shared.line(rank)
            for rank in range(len(self._shared.current))
            if rank != self._rank
        ]


def describe(rank: int, what: str, seconds: float) -> str:
    """`rank 1 is at 1F5 since 42 s`."""
    return f"rank {rank} {what} since {seconds:.0f} s"


def reason_of(error: BaseException, rank: int | None = None) -> str:
    """An error in words for the other ranks. Penstock's own name the rank themselves."""
    if isinstance(error, RunError):
        return str(error)
    return (
        "" if rank is None else f"rank {rank}: "
    ) + f"{type(error).__name__}: {error}".removesuffix(": ")
