"""The board of ranks that are processes: kept in the store of torch.distributed, watched by a thread in every rank."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from penstock.runtime.board import describe

_PERIOD_S = 0.5


class StoreBoard:
    """One rank's view, see `Board`. `on_failure` is called once, from the watching thread, when any rank has failed."""

    def __init__(self, store: Store, rank: int, size: int, on_failure: Callable[[], None]) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._on_failure = on_failure
        self._current = ("has not begun", time.monotonic())
        self._stop = threading.Event()
        store.set(f"penstock/pid/{rank}", str(os.getpid()))
        self._thread = threading.Thread(target=self._watch, name="penstock-board", daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """See `Board.doing`."""
        self._current = (what, time.monotonic())

    def fail(self, reason: str) -> None:
        """See `Board.fail`."""
        with contextlib.suppress(RuntimeError):  # with the store gone there is nobody to tell
            self._store.compare_set(
                "penstock/failure", "", json.dumps({"rank": self._rank, "reason": reason})
            )

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
                    what, seconds = json.loads(self._store.get(key))
                    lines.append(describe(rank, what, seconds))
        return lines

    def name(self, rank: int) -> str:
        """`rank 1 (pid 4242)`."""
        with contextlib.suppress(RuntimeError):
            return f"rank {rank} (pid {self._store.get(f'penstock/pid/{rank}').decode()})"
        return f"rank {rank}"

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            what, since = self._current
            try:
                self._store.set(
                    f"penstock/doing/{self._rank}",
                    json.dumps([what, round(time.monotonic() - since, 1)]),
                )
                failed = self._store.check(["penstock/failure"])
            except RuntimeError:
                failed = True
            if failed:
                self._on_failure()
                return
