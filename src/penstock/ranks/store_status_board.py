"""Status board of ranks that are processes, in the store of torch.distributed.

A thread in every rank publishes its status and watches for failures.
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
from penstock.ranks.foreign_text import foreign_text
from penstock.ranks.status_board import describe
from penstock.transport.process_group import heartbeats, lost_ranks

#: Seconds between two looks of the watching thread.
_PERIOD_S = 0.5

#: Seconds after which a rank with an unchanged status compares its calls with the other ranks'.
_LONG_S = 1.0

#: Seconds between two looks into the store while a caller waits.
_PAUSE_S = 0.05

#: Seconds for which a rank that has lost the store waits for the heartbeats to say why.
_STORE_LOSS_S = 2.0


class CallLog(Protocol):
    """The last calls of a rank, see `calls.ComparedCalls`."""

    def rows(self) -> list[list[Any]]:
        """Return the calls as JSON-serialisable rows, for the other ranks."""
        ...

    def difference(self, others: Mapping[int, Sequence[Sequence[Any]]]) -> str | None:
        """Describe how the calls of other ranks differ; None if they agree so far."""
        ...

    def followed(self, others: Mapping[int, Sequence[Sequence[Any]]]) -> bool:
        """Whether all other ranks have published the call that is the last one here."""
        ...


class StoreBoard:
    """One rank's view, see `Board`.

    Args:
        store: the store that all ranks share.
        rank: this rank.
        size: the number of ranks.
        on_failure: called once, from the watching thread, when any rank has failed.
        late: called twice a second from the watching thread; returns why the run fails on this
            rank, or None.
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
        self._publish()
        store.set(f"penstock/pid/{rank}", str(os.getpid()))
        self._thread = threading.Thread(target=self._watch, name="penstock-board", daemon=True)
        self._thread.start()
        self._heartbeats = heartbeats()
        if self._heartbeats is not None:
            self._heartbeats.on_loss(on_failure)

    def doing(self, status: str) -> float:
        """See `Board.doing`."""
        begun_s = time.monotonic()
        self._current = (status, begun_s)
        return begun_s

    def fail(self, reason: str, *, differs: bool = False) -> None:
        """Record that the run has failed, see `Board.fail`.

        Args:
            reason: why.
            differs: whether it is because the ranks make different calls; every rank then raises
                `RanksDiffer`.
        """
        failure = {"rank": self._rank, "reason": reason, "differs": differs}
        with contextlib.suppress(RuntimeError):  # the store is gone, and the run with it
            self._store.compare_set("penstock/failure", "", json.dumps(failure))

    def check(self) -> None:
        """Raise the error that has ended the run, if it has ended.

        Raises:
            RanksDiffer: the ranks make different calls.
            PeerFailed: a rank has failed.
        """
        self.check_difference()
        reason = self.failure()
        if reason is not None:
            raise PeerFailed(self._rank, "the other ranks", reason)

    def check_difference(self) -> None:
        """Check that the run has not ended because the ranks make different calls.

        Raises:
            RanksDiffer: it has.
        """
        failure = {}
        # The store has ended with its host: then there is no failure to be read.
        with contextlib.suppress(RuntimeError):
            if self._store.check(["penstock/failure"]):
                failure = json.loads(self._store.get("penstock/failure"))
        if failure.get("differs"):
            raise RanksDiffer(foreign_text(failure["reason"]))

    def failure(self, patience_s: float = 0.0) -> str | None:
        """See `Board.failure`."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                if self._store.check(["penstock/failure"]):
                    reason = str(json.loads(self._store.get("penstock/failure"))["reason"])
                    return foreign_text(reason)
            except RuntimeError:
                return lost_ranks(_STORE_LOSS_S) or "the rank that hosts the store is gone"
            reason_of_loss = lost_ranks()
            if reason_of_loss is not None or time.monotonic() >= deadline_s:
                return reason_of_loss
            self._stop.wait(_PAUSE_S)

    def describe_others(self) -> list[str]:
        """See `Board.describe_others`."""
        lines = []
        for rank in range(self._size):
            key = f"penstock/doing/{rank}"
            # As in `failure`: what cannot be read is left out of the message.
            with contextlib.suppress(RuntimeError):
                if rank != self._rank and self._store.check([key]):
                    status, seconds, _ = json.loads(self._store.get(key))
                    lines.append(describe(rank, foreign_text(str(status)), seconds))
        return lines

    def other_calls(self) -> dict[int, list[list[Any]]]:
        """Return the calls that the other ranks have published last; empty if the store is gone."""
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        keys = [f"penstock/doing/{rank}" for rank in ranks]
        with contextlib.suppress(RuntimeError):
            if self._store.check(keys):
                texts = self._store.multi_get(keys)
                return {rank: json.loads(text)[2] for rank, text in zip(ranks, texts, strict=True)}
        return {}

    def compare_calls(self, patience_s: float = 0.0) -> None:
        """End the run if another rank makes other calls than this one.

        Args:
            patience_s: seconds to wait for the other ranks to publish the current call of this one.
        """
        if self.calls is None:
            return
        deadline_s = time.monotonic() + patience_s
        while True:
            others = self.other_calls()
            difference = self.calls.difference(others)
            if difference is not None:
                self.fail(difference, differs=True)
                return
            if self.calls.followed(others) or time.monotonic() >= deadline_s:
                return
            self._stop.wait(_PAUSE_S)

    def name(self, rank: int) -> str:
        """Name a rank and its process: `rank 1 (pid 4242)`."""
        with contextlib.suppress(RuntimeError):
            return f"rank {rank} (pid {self._store.get(f'penstock/pid/{rank}').decode()})"
        return f"rank {rank}"

    def close(self) -> None:
        """Stop the watching thread."""
        if self._heartbeats is not None:
            self._heartbeats.remove(self._on_failure)
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):
            self._publish()  # the last call, which other ranks may be waiting for

    def _publish(self) -> None:
        """Write this rank's status, its age and the last calls to the store."""
        status, begun_s = self._current
        calls = [] if self.calls is None else self.calls.rows()
        row = [status, round(time.monotonic() - begun_s, 1), calls]
        self._store.set(f"penstock/doing/{self._rank}", json.dumps(row))

    def _watch(self) -> None:
        """Publish and watch until the board is closed or a rank has failed."""
        while not self._stop.wait(_PERIOD_S):
            try:
                self._publish()
                if time.monotonic() - self._current[1] > _LONG_S:
                    self.compare_calls()
                reason = None if self._late is None else self._late()
                if reason is not None:
                    self.fail(reason)
                failed = self._store.check(["penstock/failure"])
            except RuntimeError:
                # The store has ended with its host, so that this rank must stop as well.
                failed = True
            if failed:
                self._on_failure()
                return
