"""The board of ranks that are processes: kept in the store of torch.distributed, watched by a
thread in every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from penstock.errors import PeerFailed, RanksDiffer
from penstock.runtime.board import describe

_PERIOD_S = 0.5

#: Seconds at one thing after which a rank looks whether the others are at the same call.
_LONG_S = 1.0


class CallLog(Protocol):
    """The last calls of a rank, see `calls.ComparedCalls`."""

    def rows(self) -> list[list[Any]]:
        """What other ranks are told."""
        ...

    def difference(self, others: Mapping[int, Sequence[Sequence[Any]]]) -> str | None:
        """What others do otherwise."""
        ...

    def followed(self, others: Mapping[int, Sequence[Sequence[Any]]]) -> bool:
        """Whether all others have told of the last call here."""
        ...


class StoreBoard:
    """One rank's view, see `Board`.

    Args:
        store: where the ranks write.
        rank: this one.
        size: how many there are.
        on_failure: called once, from the watching thread, when any rank has failed.
        late: asked from the watching thread twice a second; what it returns, if not None, is why
        the run fails here.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        on_failure: Callable[[], None],
        late: Callable[[], str | None] | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._on_failure, self._late = on_failure, late
        self._current = ("has not begun", time.monotonic())
        self._stop = threading.Event()
        self.calls: CallLog | None = None
        self._tell()
        store.set(f"penstock/pid/{rank}", str(os.getpid()))
        self._thread = threading.Thread(target=self._watch, name="penstock-board", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """See `Board.doing`."""
        self._current = (what, time.monotonic())

    def fail(self, reason: str, *, differs: bool = False) -> None:
        """See `Board.fail`. `differs`: because ranks do not do the same, which is then every rank's
        error.
        """
        failure = {"rank": self._rank, "reason": reason, "differs": differs}
        with contextlib.suppress(RuntimeError):  # with the store gone there is nobody to tell
            self._store.compare_set("penstock/failure", "", json.dumps(failure))

    def check(self) -> None:
        """Raise what has ended the run, if something has.

        Raises:
            RanksDiffer, PeerFailed: it is over.
        """
        self.check_difference()
        reason = self.failure()
        if reason is not None:
            raise PeerFailed(self._rank, "the other ranks", reason)

    def check_difference(self) -> None:
        """Raise if the run has ended because ranks do not do the same.

        Raises:
            RanksDiffer: they do not.
        """
        failure = {}
        with contextlib.suppress(RuntimeError):
            if self._store.check(["penstock/failure"]):
                failure = json.loads(self._store.get("penstock/failure"))
        if failure.get("differs"):
            raise RanksDiffer(failure["reason"])

    def failure(self, patience_s: float = 0.0) -> str | None:
        """See `Board.failure`."""
        until = time.monotonic() + patience_s
        while True:
            try:
                if self._store.check(["penstock/failure"]):
                    return str(json.loads(self._store.get("penstock/failure"))["reason"])
            except RuntimeError:
                return "the rank that hosts the store is gone"
            if time.monotonic() >= until:
                return None
            self._stop.wait(0.05)

    def elsewhere(self) -> list[str]:
        """See `Board.elsewhere`."""
        lines = []
        for rank in range(self._size):
            key = f"penstock/doing/{rank}"
            with contextlib.suppress(RuntimeError):
                if rank != self._rank and self._store.check([key]):
                    what, seconds, _ = json.loads(self._store.get(key))
                    lines.append(describe(rank, what, seconds))
        return lines

    def other_calls(self) -> dict[int, list[list[Any]]]:
        """The last calls of the other ranks, as they have told them."""
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        keys = [f"penstock/doing/{rank}" for rank in ranks]
        with contextlib.suppress(RuntimeError):
            if keys and self._store.check(keys):
                found = self._store.multi_get(keys)
                return {rank: json.loads(text)[2] for rank, text in zip(ranks, found, strict=True)}
        return {}

    def compare_calls(self, patience_s: float = 0.0) -> None:
        """End the run if another rank does something else than this one.

        Args:
            patience_s: how long to wait for others to tell of the call that this one is at.
        """
        if self.calls is None:
            return
        until = time.monotonic() + patience_s
        while True:
            others = self.other_calls()
            found = self.calls.difference(others)
            if found is not None:
                self.fail(found, differs=True)
            if found is not None or self.calls.followed(others) or time.monotonic() >= until:
                return
            self._stop.wait(0.05)

    def name(self, rank: int) -> str:
        """`rank 1 (pid 4242)`."""
        with contextlib.suppress(RuntimeError):
            return f"rank {rank} (pid {self._store.get(f'penstock/pid/{rank}').decode()})"
        return f"rank {rank}"

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):
            self._tell()  # the last call, for those who wait for another

    def _tell(self) -> None:
        what, since = self._current
        calls = [] if self.calls is None else self.calls.rows()
        doing = [what, round(time.monotonic() - since, 1), calls]
        self._store.set(f"penstock/doing/{self._rank}", json.dumps(doing))

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                self._tell()
                if time.monotonic() - self._current[1] > _LONG_S:
                    self.compare_calls()
                reason = None if self._late is None else self._late()
                if reason is not None:
                    self.fail(reason)
                failed = self._store.check(["penstock/failure"])
            except RuntimeError:
                failed = True
            if failed:
                self._on_failure()
                return
