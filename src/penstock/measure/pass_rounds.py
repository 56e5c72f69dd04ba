"""Timed passes of several micro-batch sizes, in turn.

The speed of a shared machine changes within seconds (by a factor of 1.2 to 2 on virtual machines).
If one size is timed after the other, a slow spell hits one of them, and the planner prefers the
micro-batch size that was measured in a fast one. In turn, a spell hits all sizes alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from penstock.measure.concurrent import ConcurrentRanks
from penstock.measure.timed_passes import PassSeconds, TimedPasses

#: Called with what is done, the total, and what was done last.
Progress = Callable[[int, int, str], None]

#: Passes shorter than this are repeated three times as often: they are noisy and cheap to repeat.
_SHORT_S = 0.1


@final
@dataclass
class PassSeries:
    """The passes of one micro-batch size through some layers.

    Attributes:
        size: of the micro-batch, in samples.
        passes: through the layers.
        value: input of the first layer.
        prepare: called before every pass; sets what depends on the size, such as targets.
        seconds: of the timed passes, in their order.
        output_bytes: per layer, of its last output.
    """

    size: int
    passes: TimedPasses
    value: Any
    prepare: Callable[[], None] = lambda: None
    seconds: list[PassSeconds] = field(default_factory=list)
    output_bytes: list[int] = field(default_factory=list)

    def warm_up(self) -> float:
        """Run a pass that does not count, and return its seconds."""
        started = time.perf_counter()
        self.keep_busy()
        return time.perf_counter() - started

    def measure(self) -> None:
        """Time a pass."""
        self.prepare()
        self.seconds.append(self.passes.run(self.value))
        self.output_bytes = self.passes.output_bytes

    def keep_busy(self) -> None:
        """Run a pass that does not count."""
        self.prepare()
        self.passes.run(self.value)


def run_in_turn(
    series: Sequence[PassSeries],
    repeats: int,
    concurrent: ConcurrentRanks,
    progress: Progress | None = None,
) -> None:
    """Warm up all series, then time their passes in turn.

    Args:
        series: of ascending sizes.
        repeats: passes of each series; three times as many of short ones.
        concurrent: the ranks that measure at the same time, each with its series.
        progress: called after every pass with the passes done, their total, and their size.
    """
    warm_up_s = [entry.warm_up() for entry in series]
    counts = [repeats if seconds > _SHORT_S else 3 * repeats for seconds in warm_up_s]
    rounds, total = max(counts), sum(counts)
    done = 0
    concurrent.wait_for_all()
    for number in range(rounds):
        for entry, count in zip(series, counts, strict=True):
            # Series of fewer passes than rounds are spread evenly over the rounds.
            is_due = (number + 1) * count // rounds > number * count // rounds
            if not is_due:
                continue
            entry.measure()
            done += 1
            if progress is not None:
                progress(done, total, f"micro-batches of {entry.size}")
    # Keep this rank busy while others still measure. The last passes leave the gradients of the
    # largest size, of which `measure_update` counts the zeros.
    while not concurrent.all_done():
        series[-1].keep_busy()
