"""Where ranks that are processes compare what they are about to run, through the store, before they
wait for each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.errors import DeadlineExceeded, RanksDiffer, RunError
from penstock.runtime.differences import Description, differences, message_of, ranks_in_words

_Init = TypeVar("_Init", bound=Callable[..., None])

#: All processes make their pipelines in the same order, and meet once for each. A pipeline of
#: threads has no meeting.
_MEETINGS = itertools.count()

#: Seconds between two looks into the store: the first, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class Meeting:
    """One rank's part in the comparison of one `Pipeline`.

    Args:
        store: the meeting's own corner.
        rank: this rank.
        size: how many there are.
        deadline_s: seconds to wait for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, deadline_s: float) -> None:
        self.store, self.rank, self.size, self.deadline_s = store, rank, size, deadline_s
        self._round = 0
        self.closed = False

    @classmethod
    def next(cls, deadline_s: float) -> Meeting:
        """The next one of the ranks of torch.distributed, which have been joined."""
        store = PrefixStore(
            f"penstock/meeting/{next(_MEETINGS)}", dist.distributed_c10d._get_default_store()
        )
        return cls(store, dist.get_rank(), dist.get_world_size(), deadline_s)

    def compare(self, description: Description) -> None:
        """Compare with all other ranks.

        Raises:
            RanksDiffer: they differ; the message is the same on every rank.
            RunError: another rank could not make its pipeline, or did not come.
        """
        digests = {name: _digest(rows) for name, rows in description.lists.items()}
        brief = {**asdict(description), "lists": {}, "digests": digests}
        answers = self.exchange(brief)
        unlike = [
            name for name in digests if len({answer["digests"].get(name) for answer in answers}) > 1
        ]
        if unlike:
            rows = self.exchange({name: description.lists[name] for name in unlike})
            for answer, lists in zip(answers, rows, strict=True):
                answer["lists"] = lists
        found = differences([Description.of_json(answer) for answer in answers])
        if found:
            self.closed = True
            raise RanksDiffer(message_of(found), found)

    def exchange(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The values of all ranks, by rank. Raises as `compare`."""
        number, self._round = self._round, self._round + 1
        self.store.set(f"{number}/{self.rank}", json.dumps(value))
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        missing = missing_keys(self.store, keys, self._check, self.deadline_s)
        if missing:
            what = f"{ranks_in_words(missing)} to make the same Pipeline"
            raise DeadlineExceeded(self.rank, what, self.deadline_s, [])
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def fail(self, error: BaseException) -> None:
        """Let those who wait for this rank know why it does not come."""
        self.closed = True
        reason = f"{type(error).__name__}: {error}"
        self.store.compare_set("failure", "", json.dumps({"rank": self.rank, "reason": reason}))

    def _check(self) -> None:
        if not self.store.check(["failure"]):
            return
        self.closed = True
        failure = json.loads(self.store.get("failure"))
        raise RunError(
            f"rank {failure['rank']} could not make its Pipeline: {failure['reason']}. Every rank must make the same pipelines "
            "in the same order"
        )


def missing_keys(
    store: Store, keys: Sequence[str], check: Callable[[], None], deadline_s: float
) -> list[int]:
    """Wait until all keys are in a store; which are not when the time is over.

    Args:
        store: where they come.
        keys: one for each rank.
        check: raises when there is no use in waiting any longer.
        deadline_s: how long.
    """
    since = time.monotonic()
    pause_s = _PAUSE_S
    while not store.check(list(keys)):
        check()
        if time.monotonic() - since >= deadline_s:
            return [number for number, key in enumerate(keys) if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return []


def announced(init: _Init) -> _Init:
    """A constructor that lets the other ranks know when it has failed on this one, so that they do
    not wait for it.
    """

    @wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except BaseException as error:
            meeting: Meeting | None = getattr(self, "_meeting", None)
            alone = kwargs.get("executor") == "threads" or not (
                dist.is_available() and dist.is_initialized()
            )
            if meeting is None and not alone:
                meeting = Meeting.next(0.0)
            if meeting is not None and not meeting.closed:
                meeting.fail(error)
            world = getattr(self, "_world", None)
            if world is not None and not alone:
                world.abandon(error)
                world.close()
            raise

    return construct  # type: ignore[return-value]  # it has the constructor's own signature


def _digest(rows: Sequence[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
