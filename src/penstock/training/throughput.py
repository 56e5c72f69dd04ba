"""Measure the throughput of a stream of batches, between filling and draining the pipeline."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.event import Timeline
from penstock.schedule.op import Kind
from penstock.simulate.steady_state import Steady

#: Lower bound of a measured duration in seconds, so that no rate divides by 0.
_TICK = 1e-9

#: Parts of the time in which a stream is full, to find a pause in one of them.
_PARTS = 5

#: Ratio of the mean to the median of the parts above which a pause is assumed: one of the parts then
#: takes 3.5 times as long as the others.
_MUCH_LONGER = 1.5


@dataclass
class BatchFeed:
    """An iterable of batches that records what it has yielded.

    Attributes:
        batches: pairs of inputs and targets.
        sizes: samples of the yielded batches whose losses are outstanding; the consumer of the
            losses removes them.
        count: batches yielded.
        last_size: samples of the last one.
        seconds: time that `batches` took to produce them.
        exhausted: whether there are no more.
        pause: called before each batch; if it returns True, the feed ends before that batch.
        paused: whether the feed has ended so; `batches` then has the others.
    """

    batches: Iterator[tuple[Sized, Any]]
    sizes: deque[int] = field(default_factory=deque)
    count: int = 0
    last_size: int = 0
    seconds: float = 0.0
    exhausted: bool = False
    pause: Callable[[], bool] = lambda: False
    paused: bool = False

    def __iter__(self) -> Iterator[tuple[Sized, Any]]:
        while True:
            start = time.perf_counter()
            batch = next(self.batches, None)
            self.seconds += time.perf_counter() - start
            if batch is None:
                self.exhausted = True
                return
            if self.pause():
                self.exhausted = self.paused = True
                self.batches = itertools.chain([batch], self.batches)
                return
            inputs, _ = batch
            self.last_size = len(inputs)
            self.sizes.append(self.last_size)
            self.count += 1
            yield batch


@dataclass
class ThroughputMeter:
    """Times a stream.

    A batch counts while the pipeline is full: after the first loss, until the feed is exhausted.

    Attributes:
        feed: of the stream.
        batch: samples in a full batch; smaller ones do not count.
    """

    feed: BatchFeed
    batch: int
    _total: float = 0.0
    # Batches fed and seconds passed at every loss that counts.
    _counted: list[tuple[int, float]] = field(default_factory=list)

    def losses(self, stream: Iterable[Tensor]) -> Iterator[tuple[Tensor, float]]:
        """Yield each loss with the seconds since the previous one, without those of making batches.

        Losses of the final drain arrive together and share its time equally.
        """
        losses = iter(stream)
        drain_share = 0.0
        for done in itertools.count():
            start, feed_seconds = time.perf_counter(), self.feed.seconds
            loss = next(losses, None)
            seconds = time.perf_counter() - start - (self.feed.seconds - feed_seconds)
            if loss is None:
                return
            self._total += seconds
            if not self.feed.exhausted:
                if self.feed.last_size == self.batch:
                    self._counted.append((self.feed.count, self._total))
            else:
                drain_share = drain_share or seconds / (self.feed.count - done)
                seconds = drain_share
            yield loss, max(seconds, _TICK)

    @property
    def seconds_per_batch(self) -> float:
        """The mean while the pipeline was full, or of all batches if it was not full for long.

        If a pause in a part of this time, as of a suspended machine, makes the mean much longer than
        the median of the parts, it is this median.
        """
        if not self._counted or self._counted[0][0] == self._counted[-1][0]:
            return self._total / max(self.feed.count, 1)
        mean = _seconds_per_batch(self._counted[0], self._counted[-1])
        length = (len(self._counted) - 1) // _PARTS
        if length < 2:
            return mean
        ends = [self._counted[part * length] for part in range(_PARTS + 1)]
        median = statistics.median(itertools.starmap(_seconds_per_batch, itertools.pairwise(ends)))
        return median if mean > _MUCH_LONGER * median else mean


def _seconds_per_batch(start: tuple[int, float], end: tuple[int, float]) -> float:
    """Return the mean between two losses, each with the batches fed and the seconds passed."""
    return (end[1] - start[1]) / max(end[0] - start[0], 1)


def measured_steady_state(
    timeline: Timeline, seconds_per_batch: float, micro_batches: int
) -> Steady:
    """Return the steady state of a measured stream.

    Args:
        timeline: of some full batches of it.
        seconds_per_batch: as measured.
        micro_batches: of one batch.
    """
    last = 0
    for event in timeline.compute:
        if event.op.kind is Kind.F:
            last = max(last, event.op.micro_batch)
    return Steady.of(seconds_per_batch, last // micro_batches + 1, timeline)


def median_recording(recordings: Sequence[tuple[Timeline, float]]) -> tuple[Timeline, float]:
    """Return the recording with the median makespan; of an even number, the shorter of the two.

    Args:
        recordings: timelines, each with the seconds of its step.
    """
    by_makespan = sorted(recordings, key=lambda recording: recording[0].makespan)
    return by_makespan[(len(by_makespan) - 1) // 2]
