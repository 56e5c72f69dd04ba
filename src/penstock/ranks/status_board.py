"""Status board of the ranks: what each rank is doing, and the first failure of the run."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from penstock.errors import RunError

_NOT_STARTED = "has not begun"


class Board(Protocol):
    """One rank's view of the board."""

    def doing(self, status: str) -> float:
        """Set this rank's status and the time of its beginning, and return this time, of
        `time.monotonic`. Called for every op, so cheap.
        """
        ...

    def fail(self, reason: str) -> None:
        """Record that the run has failed. If several ranks fail, the first reason stays."""
        ...

    def failure(self, patience_s: float = 0.0) -> str | None:
        """Return the first reason of failure, waiting up to `patience_s` seconds for one."""
        ...

    def describe_others(self) -> list[str]:
        """Describe the status of every other rank, one line each."""
        ...


class SharedBoard:
    """The board of ranks that are threads of one process."""

    def __init__(self, ranks: int) -> None:
        self.current: list[tuple[str, float]] = [(_NOT_STARTED, time.monotonic())] * ranks
        self.reason: str | None = None
        self._lock = threading.Lock()

    def for_rank(self, rank: int) -> ThreadBoard:
        """Return one rank's view of the board."""
        return ThreadBoard(self, rank)

    def fail(self, reason: str) -> None:
        """See `Board.fail`."""
        with self._lock:
            self.reason = self.reason or reason

    def reset(self) -> None:
        """Clear the failure and all statuses for a new run."""
        self.reason = None
        self.current[:] = [(_NOT_STARTED, time.monotonic())] * len(self.current)

    def latest(self) -> tuple[int, str, float]:
        """Return the rank whose status changed last, that status, and its age in seconds."""
        rank = max(range(len(self.current)), key=lambda rank: self.current[rank][1])
        status, begun_s = self.current[rank]
        return rank, status, time.monotonic() - begun_s

    def line(self, rank: int) -> str:
        """Describe one rank's status, see `describe`."""
        status, begun_s = self.current[rank]
        return describe(rank, status, time.monotonic() - begun_s)


class ThreadBoard:
    """One rank's view of a `SharedBoard`."""

    def __init__(self, shared: SharedBoard, rank: int) -> None:
        self._shared, self._rank = shared, rank

    def doing(self, status: str) -> float:
        """See `Board.doing`."""
        begun_s = time.monotonic()
        self._shared.current[self._rank] = (status, begun_s)
        return begun_s

    def fail(self, reason: str) -> None:
        """See `Board.fail`."""
        self._shared.fail(reason)

    def failure(self, patience_s: float = 0.0) -> str | None:
        """See `Board.failure`.

        Never waits: a blocked thread is woken only after the reason has been recorded.
        """
        del patience_s
        return self._shared.reason

    def describe_others(self) -> list[str]:
        """See `Board.describe_others`."""
        ranks = range(len(self._shared.current))
        return [self._shared.line(rank) for rank in ranks if rank != self._rank]


def describe(rank: int, status: str, seconds: float) -> str:
    """Describe a rank's status: `rank 1 is at 1F5 since 42 s`."""
    return f"rank {rank} {status} since {seconds:.0f} s"


def reason_of(error: BaseException, rank: int | None = None) -> str:
    """Describe an error to the other ranks.

    Args:
        error: the error. A `RunError` names its rank in its own message.
        rank: the rank that raised it, to be named for errors of other classes.
    """
    if isinstance(error, RunError):
        return str(error)
    prefix = "" if rank is None else f"rank {rank}: "
    # An error without a message is its class name alone.
    return prefix + f"{type(error).__name__}: {error}".removesuffix(": ")
