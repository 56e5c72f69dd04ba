"""Comparison of what rank processes are about to run, through the store of torch.distributed.

It comes before any rank waits for another's tensors: ranks with different settings would block.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.errors import DeadlineExceeded, RanksDiffer, RunError
from penstock.ranks.foreign_text import foreign_text
from penstock.ranks.settings.setting_differences import (
    Description,
    differences,
    message_of,
)
from penstock.transport.process_group import lost_ranks, naming_lost_ranks
from penstock.units import format_ranks

_Init = TypeVar("_Init", bound=Callable[..., None])

#: Numbers the comparisons. They match between processes, since all construct their pipelines in the
#: same order; a pipeline whose ranks are threads has no comparison and takes no number.
_EXCHANGES = itertools.count()

#: Seconds between two looks into the store: at first, and at most.
_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class SettingsExchange:
    """One rank's part in the comparison of one `Pipeline`'s settings.

    Args:
        store: a store with keys of this comparison alone.
        rank: this rank.
        size: the number of ranks.
        deadline_s: seconds to wait for the other ranks.
        job: the comparison of all processes of the job, if there are several pipelines in it; a
            failure here is reported there, too.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        deadline_s: float,
        job: SettingsExchange | None = None,
    ) -> None:
        self.store, self.rank, self.size, self.deadline_s = store, rank, size, deadline_s
        self.job = job
        #: Whether all processes of the job have the same settings.
        self.spans_job = False
        #: Its number among those of the job, by which stores are named.
        self.number = 0
        self._round = 0
        self.closed = False
        #: The name of every rank's host, once the ranks have exchanged them.
        self.hosts: list[str] = []

    @classmethod
    def next(cls, deadline_s: float) -> SettingsExchange:
        """Return the next comparison of the ranks of torch.distributed, which is initialised."""
        number = next(_EXCHANGES)
        store = PrefixStore(
            f"penstock/meeting/{number}", dist.distributed_c10d._get_default_store()
        )
        exchange = cls(store, dist.get_rank(), dist.get_world_size(), deadline_s)
        exchange.number = number
        return exchange

    def compare(self, description: Description) -> None:
        """Compare this rank's description with those of all other ranks.

        Raises:
            RanksDiffer: they differ; the message is the same on every rank.
            RunError: another rank failed to construct its pipeline, or did not answer in time.
        """
        if self.spans_job and self.job is not None:
            self.job.compare(description)
            return
        # First digests of the long lists; the lists themselves only where the digests differ.
        digests = {topic: _digest(rows) for topic, rows in description.lists.items()}
        brief = {**asdict(description), "lists": {}, "digests": digests}
        answers = self.exchange(brief)
        # Of all ranks, which may be of versions with other lists: all take the same steps.
        topics = dict.fromkeys(topic for answer in answers for topic in answer["digests"])
        differing = []
        for topic in topics:
            if len({answer["digests"].get(topic) for answer in answers}) > 1:
                differing.append(topic)
        if differing:
            rows = self.exchange({topic: description.lists.get(topic, []) for topic in differing})
            for answer, lists in zip(answers, rows, strict=True):
                answer["lists"] = lists
        lines = differences([Description.of_json(answer) for answer in answers])
        if lines:
            self.closed = True
            raise RanksDiffer(message_of(lines), lines)

    def exchange(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a value to all ranks and return the values of all, by rank.

        Args:
            value: a JSON-serialisable mapping.

        Raises:
            RunError: as `compare`.
        """
        with naming_lost_ranks("could not compare its settings with the other ranks'"):
            return self._exchange(value)

    def _exchange(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `exchange`."""
        number, self._round = self._round, self._round + 1
        self.store.set(f"{number}/{self.rank}", json.dumps(value))
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            missing = missing_keys(self.store, keys, self._check, self.deadline_s)
        except RunError:
            self.closed = True  # the other ranks have the same error already
            raise
        if missing:
            awaited = f"{format_ranks(missing)} to make the same Pipeline"
            raise DeadlineExceeded(self.rank, awaited, self.deadline_s, [])
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank to the ranks that wait for it."""
        if self.job is not None:
            self.job.fail(error)
        self.closed = True
        reason = f"{type(error).__name__}: {error}"
        failure = json.dumps({"rank": self.rank, "reason": reason})
        with suppress(RuntimeError):  # the store is gone, and the run with it
            self.store.compare_set("failure", "", failure)

    def _check(self) -> None:
        """Check that no rank has failed.

        Raises:
            RunError: a rank has.
        """
        lost = lost_ranks()
        if lost is not None:
            raise RunError(lost)
        if not self.store.check(["failure"]):
            return
        failure = json.loads(self.store.get("failure"))
        reason = foreign_text(str(failure["reason"]))
        raise RunError(
            f"rank {failure['rank']} could not make its Pipeline: {reason}. Every rank "
            "must make the same pipelines in the same order"
        )


def missing_keys(
    store: Store, keys: Sequence[str], check: Callable[[], None], deadline_s: float
) -> list[int]:
    """Wait until a store has all keys.

    Args:
        store: the store.
        keys: one key for each rank.
        check: called while waiting; raises RunError if waiting is pointless.
        deadline_s: seconds to wait.

    Returns:
        The ranks whose keys are missing at the deadline; empty if all keys are present.

    Raises:
        RunError: `check` raised it and a key is still missing.
    """
    begun_s = time.monotonic()
    pause_s = _PAUSE_S
    while not store.check(list(keys)):
        try:
            check()
        except RunError:
            # A rank that sent its key and failed afterwards failed at a later point, which this rank
            # still has to reach: its own error says more than the other rank's.
            if store.check(list(keys)):
                return []
            raise
        if time.monotonic() - begun_s >= deadline_s:
            return [number for number, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return []


def report_failures(init: _Init) -> _Init:
    """Decorate a constructor so that its failure is reported to the other ranks.

    Without the report they would wait for this rank until their deadline.
    """

    @wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        """Construct, and report any error before it is raised again."""
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            exchange: SettingsExchange | None = getattr(self, "_settings_exchange", None)
            has_peers = dist.is_available() and dist.is_initialized()
            has_peers = has_peers and kwargs.get("executor") != "threads"
            if exchange is None and has_peers:
                # With a mesh this is the comparison of all processes of the job, which comes first.
                exchange = SettingsExchange.next(0.0)
            if exchange is not None and not exchange.closed:
                exchange.fail(error)
            world = getattr(self, "_world", None)
            if world is not None and has_peers:
                world.abandon(error)
                world.close()
            raise

    return construct  # type: ignore[return-value]  # it has the constructor's own signature


def _digest(rows: Sequence[tuple[str, str]]) -> str:
    """Return a short digest of some rows."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
