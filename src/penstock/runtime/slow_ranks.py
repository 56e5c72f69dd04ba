"""Notice ranks that become slower, or that are slower than planned, while a run goes on.

Every rank adds up the time in which it computes, without its waits, and publishes the median of
some steps in the store; rank 0 compares. A thread talks to the store, so that no step waits for it,
and no device is waited for: ops that it has not finished yet are left out.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from torch._C._distributed_c10d import Store

from penstock.ranks.clock import Clock, HostClock, Mark
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.settings.settings_exchange import SettingsExchange
from penstock.runtime.interpreter import Interpreter
from penstock.schedule.op import Kind, Op

_LOG = logging.getLogger("penstock")

#: Steps of which the median is published, and seconds that they take at least. Fewer would show
#: every disturbance by another program.
WINDOW, WINDOW_S = 20, 5.0

#: Steps per window that are sampled at most, spread over its seconds: to add up the times of a step
#: takes 13 µs, which is much of a step of 3 ms.
_MAX_SAMPLES = 100

#: A rank is slow if it is in this many of the last windows. On a machine with other programs single
#: windows are slow by turns, and a line for each told nothing.
_SLOW_WINDOWS, _RECENT_WINDOWS = 2, 3

#: Ratio of a rank's time to its smallest so far, above which it has become slower.
_SLOWER_THAN_BEFORE = 1.3
#: Ratio of a rank's time to the planned one, over that of the rank with the smallest ratio, above
#: which it is slower than planned. Plans predict the time of a rank within about 10 %.
_SLOWER_THAN_PLANNED = 1.5
#: Differences in seconds that are noise, whatever the ratio.
_NOISE_S = 1e-3
#: Windows after which a rank that stays slow is named again.
_REPEAT_AFTER = 10

#: Without U, E and L, which wait for other ranks: the times of these would name the wrong rank.
_COMPUTING = (Kind.F, Kind.B, Kind.I, Kind.W)

_Marks = Mapping[Op, tuple[Mark, Mark]]


@dataclass
class SlowRanks:
    """Compares the computing times of all ranks with earlier ones and with the plan.

    Attributes:
        planned_s: by rank, the planned seconds per step, 0 if they are not known.
        hosts: by rank, the name of its host.
    """

    planned_s: Sequence[float]
    hosts: Sequence[str]
    _least_s: dict[int, float] = field(default_factory=dict)
    _recent: deque[dict[int, str]] = field(default_factory=lambda: deque(maxlen=_RECENT_WINDOWS))
    _texts: dict[tuple[int, str], str] = field(default_factory=dict)
    _named: tuple[tuple[int, str], ...] = ()
    _windows_since: int = 0

    def compare(self, seconds: Mapping[int, float]) -> str | None:
        """Return a line that names the slow ranks; None if there are none, or no others than
        before.

        Args:
            seconds: by rank, the computing time per step; ranks that do not compute are left out.
        """
        slow = {**self._slower_than_planned(seconds), **self._slower_than_before(seconds)}
        for rank, rank_s in seconds.items():
            self._least_s[rank] = min(rank_s, self._least_s.get(rank, rank_s))
        for rank, (reason, ratio) in slow.items():
            self._texts[rank, reason] = (
                f"rank {rank} ({self.hosts[rank]}) computes {ratio:.1f} times as long as {reason}, "
                f"{seconds[rank] * 1e3:.4g} ms a step"
            )
        self._recent.append({rank: reason for rank, (reason, _) in slow.items()})
        windows = Counter(entry for window in self._recent for entry in window.items())
        named = tuple(sorted(entry for entry, count in windows.items() if count >= _SLOW_WINDOWS))
        self._windows_since += 1
        is_reminder = bool(named) and self._windows_since >= _REPEAT_AFTER
        if named == self._named and not is_reminder:
            return None
        self._named, self._windows_since = named, 0
        if not named:
            return "no rank is slow any more"
        return "slow: " + "; ".join(self._texts[entry] for entry in named)

    def _slower_than_before(self, seconds: Mapping[int, float]) -> dict[int, tuple[str, float]]:
        """Return reason and ratio of the ranks that have been faster."""
        slow = {}
        for rank, rank_s in seconds.items():
            least_s = self._least_s.get(rank, 0.0)
            noise = rank_s - least_s < _NOISE_S
            if least_s and not noise and rank_s > _SLOWER_THAN_BEFORE * least_s:
                slow[rank] = "before", rank_s / least_s
        return slow

    def _slower_than_planned(self, seconds: Mapping[int, float]) -> dict[int, tuple[str, float]]:
        """Return reason and ratio of the ranks that are slower than planned, relative to the
        others.

        Relative, since a profile that is wrong by the same factor everywhere does not make a plan
        worse.
        """
        ratios = {
            rank: rank_s / self.planned_s[rank]
            for rank, rank_s in seconds.items()
            if self.planned_s[rank]
        }
        least = min(ratios.values(), default=0.0)
        return {
            rank: ("planned, relative to the other ranks", ratio / least)
            for rank, ratio in ratios.items()
            if least
            and ratio > _SLOWER_THAN_PLANNED * least
            and (ratio - least) * self.planned_s[rank] > _NOISE_S
        }


class BusyTimes:
    """Publishes the computing times of this rank; on rank 0, logs which ranks are slow.

    Args:
        exchange: of the pipeline, whose store is used; None if all ranks are threads of this
            process, which are not compared.
        setting: what is run.
    """

    def __init__(
        self,
        exchange: SettingsExchange | None,
        setting: RunConfig,
    ) -> None:
        self._exchange = exchange
        hosts = [] if exchange is None else exchange.hosts
        self._slow_ranks = SlowRanks(planned_seconds(setting), hosts)
        self._window, self._window_s = WINDOW, WINDOW_S
        self._steps: list[float] = []
        self._window_start_s = time.monotonic()
        self._next_sample_s = 0.0
        # The marks of the last sample, which a device may not have reached yet.
        self._pending: _Marks | None = None
        # None ends the thread.
        self._medians: SimpleQueue[float | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def step(self, interpreters: Mapping[int, Interpreter]) -> None:
        """Add the times of a step that this rank has run, unless those of another were just added.

        Called before the next step begins.
        """
        if self._exchange is None:
            return
        interpreter = interpreters[self._exchange.rank]
        now_s = time.monotonic()
        if not interpreter.stages or now_s < self._next_sample_s:
            return
        self._next_sample_s = now_s + self._window_s / _MAX_SAMPLES
        # At the next sample: on an accelerator the times of this step are not known yet, and are
        # not waited for.
        if self._pending is not None:
            seconds = busy_seconds(interpreter.clock, self._pending)
            if seconds is not None:
                self._steps.append(seconds)
        self._pending = dict(interpreter.marks)
        elapsed_s = now_s - self._window_start_s
        if len(self._steps) >= self._window and elapsed_s >= self._window_s:
            self._enqueue(statistics.median(self._steps))
            self._steps.clear()
            self._window_start_s = now_s

    def close(self) -> None:
        """End the thread; a later step starts another one."""
        if self._thread is not None:
            self._medians.put(None)
            self._thread = None

    def _enqueue(self, median_s: float) -> None:
        """Have the thread publish a median."""
        self._medians.put(median_s)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-busy", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Publish medians as they come, until `close` or the end of the store."""
        while (median_s := self._medians.get()) is not None:
            try:
                self._publish(median_s)
            except RuntimeError:
                # The store has ended with its host, and so has what reads the medians.
                return

    def _publish(self, median_s: float) -> None:
        """Publish a median; on rank 0, compare those of all ranks."""
        assert self._exchange is not None
        store, rank = self._exchange.store, self._exchange.rank
        store.set(f"busy/{rank}", json.dumps(median_s))
        if rank == 0:
            self._compare(store, self._exchange.size)

    def _compare(self, store: Store, size: int) -> None:
        """Log which ranks are slow, by the times that have been published so far."""
        seconds = {}
        for rank in range(size):
            key = f"busy/{rank}"
            if store.check([key]):
                seconds[rank] = float(json.loads(store.get(key)))
        line = self._slow_ranks.compare(seconds)
        if line is not None:
            _LOG.warning("%s", line)


def busy_seconds(clock: Clock, marks: _Marks) -> float | None:
    """Return the seconds of the computing ops of a step; None if the device has not finished it."""
    intervals = [interval for op, interval in marks.items() if op.kind in _COMPUTING]
    if isinstance(clock, HostClock):
        # As below: a call per op takes 10 µs of a step of 3 ms.
        busy_s: float = sum([end - start for start, end in intervals])
        return busy_s
    total_s = 0.0
    for start, end in intervals:
        seconds = clock.elapsed(start, end)
        if seconds is None:
            return None
        total_s += seconds
    return total_s


def planned_seconds(setting: RunConfig) -> list[float]:
    """Return by rank the seconds per step in which it computes according to the plan; 0 if that is
    not known.
    """
    return [setting.planned_busy_s.get(program, 0.0) for program in setting.schedule.programs]
