"""Which ranks have not joined a run yet, said while the others wait for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from penstock.files.text import shorten

#: Seconds of waiting after which the first message comes. Starting an interpreter and importing
#: torch takes less on most machines.
_FIRST_S = 10.0

#: Characters of the list of ranks in a message.
_LONGEST_LIST = 60

_LOG = logging.getLogger("penstock")


class JoinProgress:
    """Names the missing ranks after 10 s, and again whenever the time of waiting has doubled.

    A rank that has not joined has no heartbeats, so only the time limit ends the wait for it.

    Args:
        limit_s: seconds after which the wait ends.
        say: receives the messages; by default they are warnings of the logger `penstock`.
        clock: returns seconds.
    """

    def __init__(
        self,
        limit_s: float,
        say: Callable[[str], None] = _LOG.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._say, self._clock = limit_s, say, clock
        self._started_s = clock()
        self._next_s = _FIRST_S

    def look(self, missing: Collection[int]) -> None:
        """Name the missing ranks if it is time to.

        Args:
            missing: the ranks that have not joined, at least one.
        """
        waited_s = self._clock() - self._started_s
        if waited_s < self._next_s:
            return
        while self._next_s <= waited_s:
            self._next_s *= 2
        word = "ranks" if len(missing) > 1 else "rank"
        numbers = shorten(", ".join(map(str, sorted(missing))), _LONGEST_LIST)
        self._say(
            f"waiting for {word} {numbers} to join the run, for {waited_s:.0f} s of at most "
            f"{self._limit_s:.0f} s"
        )
