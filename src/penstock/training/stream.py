"""How fast a stream of batches is trained: between filling and draining."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from penstock.event import Timeline
from penstock.schedule.op import Kind
from penstock.simulate.steady import Steady

#: Seconds that a clock can tell apart, so that nothing is divided by 0.
_TICK = 1e-9


@dataclass
class Feed:
    """Hands out batches, and keeps an eye on it.

    Attributes:
        batches: pairs of inputs and targets.
        sizes: samples of the batches handed out; whoever gets their losses takes them away.
        count: batches handed out.
        last: samples of the last one.
        seconds: what `batches` took to make them.
        over: whether there are no more.
    """

    batches: Iterator[tuple[Tensor, Tensor]]
    sizes: deque[int] = field(default_factory=deque)
    count: int = 0
    last: int = 0
    seconds: float = 0.0
    over: bool = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            start = time.perf_counter()
            found = next(self.batches, None)
            self.seconds += time.perf_counter() - start
            if found is None:
                self.over = True
                return
            self.last = len(found[0])
            self.sizes.append(self.last)
            self.count += 1
            yield found


@dataclass
class Pace:
    """Times a stream. A batch counts while the pipeline is full: after the first loss has come,
    until there is nothing to feed.

    Attributes:
        feed: what the stream is fed with.
        batch: samples in a whole batch; smaller ones do not count.
    """

    feed: Feed
    batch: int
    _total: float = 0.0
    _first: tuple[int, float] | None = None
    _last: tuple[int, float] | None = None

    def losses(self, stream: Iterable[Tensor]) -> Iterator[tuple[Tensor, float]]:
        """Each loss with the seconds since the one before, those of making batches left out. Those
        that a drain brings together share its time.
        """
        losses, drain = iter(stream), 0.0
        for done in itertools.count():
            start, made = time.perf_counter(), self.feed.seconds
            loss = next(losses, None)
            seconds = time.perf_counter() - start - (self.feed.seconds - made)
            if loss is None:
                return
            self._total += seconds
            if not self.feed.over:
                if self.feed.last == self.batch:
                    self._first = self._first or (self.feed.count, self._total)
                    self._last = self.feed.count, self._total
            else:
                drain = drain or seconds / (self.feed.count - done)
                seconds = drain
            yield loss, max(seconds, _TICK)

    @property
    def seconds_per_batch(self) -> float:
        """The mean while the pipeline was full; of all batches, where it never was for long enough
        to tell.
        """
        if self._first is not None and self._last is not None and self._first[0] < self._last[0]:
            return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return self._total / max(self.feed.count, 1)


def steady_of(timeline: Timeline, seconds_per_batch: float, micro_batches: int) -> Steady:
    """The steady state of a measured stream.

    Args:
        timeline: of some whole batches of it.
        seconds_per_batch: what one takes.
        micro_batches: of one batch.
    """
    last = max(
        (event.op.micro_batch for event in timeline.compute if event.op.kind is Kind.F), default=0
    )
    return Steady.of(seconds_per_batch, last // micro_batches + 1, timeline)
