"""Passes of all micro-batch sizes run in turn. No test looks at a clock."""

from __future__ import annotations

import pytest

from penstock.measure import pass_rounds
from penstock.measure.concurrent import ConcurrentRanks
from penstock.measure.pass_rounds import PassSeries, run_in_turn
from penstock.measure.timed_passes import PassSeconds


class CountedPasses:
    """Passes that note their size in a common log."""

    def __init__(self, log):
        self.log = log
        self.output_bytes = []

    def run(self, value):
        """Note the input, which is the size here."""
        self.log.append(value)
        self.output_bytes = [8 * value]
        return PassSeconds({"forward": [float(len(self.log))]}, {})


class Company(ConcurrentRanks):
    """Ranks of which the others need some more passes than this one."""

    def __init__(self, log, extra):
        super().__init__(False)
        self.log, self.extra = log, extra

    def wait_for_all(self):
        """Note the wait."""
        self.log.append("wait")

    def all_done(self):
        """Return whether the others have ended, too."""
        self.extra -= 1
        return self.extra < 0


def series_of(sizes, log):
    """One series per size, in one log."""
    return [
        PassSeries(size, CountedPasses(log), size, prepare=lambda size=size: log.append(-size))
        for size in sizes
    ]


def passes_in(log):
    """The sizes that ran, without the marks of their preparations."""
    return [entry for entry in log if entry == "wait" or entry > 0]


def test_sizes_take_turns_after_all_have_warmed_up(monkeypatch):
    """A slow spell of the machine then hits all sizes alike."""
    monkeypatch.setattr(pass_rounds, "_SHORT_S", -1.0)
    log = []
    series = series_of((1, 4, 16), log)
    run_in_turn(series, 2, Company(log, 0))
    assert passes_in(log) == [1, 4, 16, "wait", 1, 4, 16, 1, 4, 16]
    assert log[:6] == [-1, 1, -4, 4, -16, 16], "targets of a size are set before its pass"
    assert [len(entry.seconds) for entry in series] == [2, 2, 2]
    assert [entry.output_bytes for entry in series] == [[8], [32], [128]]


def test_the_fewer_passes_of_a_long_series_are_spread_over_all_rounds(monkeypatch):
    """Otherwise only the first rounds would compare the sizes."""
    warm_up_s = {1: 0.0, 16: 1.0}
    log = []
    series = series_of((1, 16), log)

    def warm_up(entry):
        """Return the seconds of a size without a pass."""
        return warm_up_s[entry.size]

    monkeypatch.setattr(PassSeries, "warm_up", warm_up)
    run_in_turn(series, 2, ConcurrentRanks(False))
    assert passes_in(log) == [1, 1, 1, 16, 1, 1, 1, 16]


@pytest.mark.parametrize("extra", [0, 3])
def test_a_rank_stays_busy_until_the_others_have_ended_and_counts_no_such_pass(extra, monkeypatch):
    """The others are to be measured as in training, beside a busy neighbour."""
    monkeypatch.setattr(pass_rounds, "_SHORT_S", -1.0)
    log = []
    series = series_of((2, 8), log)
    run_in_turn(series, 1, Company(log, extra))
    assert passes_in(log) == [2, 8, "wait", 2, 8, *[8] * extra]
    assert [len(entry.seconds) for entry in series] == [1, 1]


def test_progress_counts_the_timed_passes_of_all_sizes(monkeypatch):
    """A bar that ends where the measurement ends."""
    monkeypatch.setattr(pass_rounds, "_SHORT_S", -1.0)
    calls = []
    run_in_turn(series_of((1, 2), []), 1, ConcurrentRanks(False), lambda *call: calls.append(call))
    assert calls == [(1, 2, "micro-batches of 1"), (2, 2, "micro-batches of 2")]
