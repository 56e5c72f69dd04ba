"""The wall-clock limit of a search.

Searches end by work, counted in what they evaluate, so that the same question has the same answer
on a busy machine. The clock is only a hard stop behind that.
"""

from __future__ import annotations

import math
import time

from penstock.compiled import preparation_s


class Deadline:
    """A limit on the seconds that a search takes.

    Time in which Numba is imported or compiles kernels does not count: it is spent once on a
    machine, and would otherwise end the first search before it has looked at anything.

    Attributes:
        budget_s: the limit in seconds; infinite for none.
        reached: whether something was cut short because of it.
    """

    def __init__(self, budget_s: float = math.inf) -> None:
        self.budget_s = budget_s
        self.reached = False
        self._start_s = time.monotonic()
        self._prepared_s = preparation_s()

    @property
    def spent_s(self) -> float:
        """Seconds since the start, without those in which kernels were compiled."""
        preparing_s = preparation_s() - self._prepared_s
        return max(0.0, time.monotonic() - self._start_s - preparing_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until the limit; 0 after it."""
        return max(0.0, self.budget_s - self.spent_s)

    def is_over(self) -> bool:
        """Return whether the limit is reached, and record that the caller stops because of it."""
        if self.spent_s < self.budget_s:
            return False
        self.reached = True
        return True

    def part(self, budget_s: float) -> Deadline:
        """Return a limit of `budget_s` seconds from now, or of what remains if that is less."""
        return Deadline(min(budget_s, self.remaining_s))
