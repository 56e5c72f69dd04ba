"""Search over cuts and schedules together: every configuration with every cut that can win.

The steps of `auto` before this one judge a configuration by one or two cuts, which minimize the
slowest stage or rank. The best cut for a schedule may be another one, since filling, draining and
messages count too. Here no configuration is judged by a cut: it is skipped only if a lower bound
over all its cuts exceeds the best time.

Where a configuration has few cuts, all are bounded, and those below the best time are simulated,
most promising first. Where it has many, a local search over their bounds finds the cut to simulate,
and a local search by simulation continues from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb

import numpy as np

from penstock.schedule.arrays import Array
from penstock.schedule.op import Schedule
from penstock.search.cut_search.cut_bounds import CutBounds, all_cuts, lengths_of
from penstock.search.cut_search.refine_cut import refine_cut
from penstock.search.plan_search import PlanSearch
from penstock.search.search_space import Configuration

#: Up to this many cuts of one configuration are all bounded: 0.5 s for a schedule of 8 stages on
#: one core.
MOST_CUTS = 20_000

#: Cost of bounding one cut, expressed in ops of simulation: 3.6 us beside 0.4 us per op (VGG-16 on
#: 2 ranks).
OPS_PER_CUT = 10

#: Cuts of a configuration that are simulated before those of the next one; later rounds take four
#: times as many each.
FIRST_CUTS = 4

#: Numbers of layers by which the local search over bounds moves a boundary.
STEPS = (1, -1, 2, -2, 4, -4)


def explore_cuts(search: PlanSearch, configurations: Iterable[Configuration]) -> bool:
    """Simulate every configuration with every cut that may win, most promising first, until the
    budget is spent.

    Returns whether that is all: no other cut of any configuration is faster than the best.
    """
    if search.request.by != "bottleneck":
        return True
    complete = True
    cluster = search.request.cluster
    layers = len(search.request.profile)
    enumerations: list[_Enumeration] = []
    for configuration in sorted(configurations, key=lambda entry: entry.bound_s):
        if configuration.bound_s >= search.best_s:
            break
        if search.is_over:
            return False
        schedule = search.schedule_of(configuration)
        if schedule is None or configuration.shape.pipelines * schedule.ranks > cluster.ranks:
            continue
        bounds = CutBounds(
            search.request, configuration.shape, schedule, configuration.micro_batches
        )
        if comb(layers - 1, configuration.stages - 1) <= MOST_CUTS:
            enumerations.append(_Enumeration.of(search, configuration, schedule, bounds))
            enumerations[-1].evaluate(search, FIRST_CUTS)
        else:
            # The bound of the cut that a local search reaches says nothing about all other cuts.
            complete = False
            _climb(search, configuration, schedule, bounds)
    # Where bounds are weak, one configuration has thousands of cuts below the best time: all take
    # turns, so that each schedule has its most promising cuts simulated.
    count = FIRST_CUTS
    while enumerations:
        count *= 4
        enumerations = [entry for entry in enumerations if not entry.evaluate(search, count)]
        if enumerations and search.is_over:
            return False
    return complete


@dataclass
class _Enumeration:
    """All cuts of a configuration, in the order of their bounds.

    Attributes:
        configuration, schedule: what is cut.
        cuts: the cuts, the most promising first.
        seconds: their bounds.
        position: number of cuts that have been looked at.
    """

    configuration: Configuration
    schedule: Schedule
    cuts: Array
    seconds: Array
    position: int = 0

    @classmethod
    def of(
        cls,
        search: PlanSearch,
        configuration: Configuration,
        schedule: Schedule,
        bounds: CutBounds,
    ) -> _Enumeration:
        """Compute the bounds of all cuts."""
        cuts = all_cuts(len(search.request.profile), configuration.stages)
        search.work += len(cuts) * OPS_PER_CUT + sum(map(len, schedule.programs))
        seconds = bounds.seconds(cuts)
        # Stable, so that cuts of equal bounds come in the same order on every machine.
        order = np.argsort(seconds, kind="stable")
        return cls(configuration, schedule, cuts[order], seconds[order])

    def evaluate(self, search: PlanSearch, count: int) -> bool:
        """Simulate the next `count` cuts whose bound is below the best time. Return whether none of
        them is left.
        """
        end = min(self.position + count, len(self.cuts))
        while self.position < end:
            if self.seconds[self.position] >= search.best_s:
                return True
            if search.is_over:
                return False
            cut = self.cuts[self.position]
            self.position += 1
            lengths = lengths_of(cut)
            search.evaluate(search.proposal_of(self.configuration, self.schedule, lengths))
        return self.position == len(self.cuts)


def _climb(
    search: PlanSearch, configuration: Configuration, schedule: Schedule, bounds: CutBounds
) -> None:
    """Simulate the cut of a configuration with the least bound that a local search reaches, and
    move its boundaries while that helps.
    """
    start = search.lengths_of(configuration, schedule, "time")
    if start is None:
        return
    ends = np.array([np.concatenate([[0], np.cumsum(start)])])
    search.work += sum(map(len, schedule.programs))
    # By the bounds alone, which cost far less than simulations; only the end is simulated.
    least = float(bounds.seconds(ends)[0])
    while True:
        neighbours = _neighbours(ends[0])
        search.work += len(neighbours) * OPS_PER_CUT
        seconds = bounds.seconds(neighbours)
        place = int(np.argmin(seconds)) if len(seconds) else -1
        if place < 0 or seconds[place] >= least:
            break
        least, ends = float(seconds[place]), neighbours[place : place + 1]
    if least >= search.best_s:
        return
    candidate = search.evaluate(search.proposal_of(configuration, schedule, lengths_of(ends[0])))
    if candidate is not None:
        refine_cut(search, candidate)


def _neighbours(ends: Array) -> Array:
    """Return the cuts that differ in one boundary."""
    cuts = []
    for boundary in range(1, len(ends) - 1):
        for step in STEPS:
            moved = ends.copy()
            moved[boundary] += step
            if ends[boundary - 1] < moved[boundary] < ends[boundary + 1]:
                cuts.append(moved)
    return np.array(cuts, np.int64).reshape(-1, len(ends))
