"""Exact searches over a table of the seconds of every possible stage on every number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.compiled import run
from penstock.errors import PartitionError
from penstock.partition.chain_dp import SUM, best_cut
from penstock.partition.dp_loops import Tables, fewest_ranks, least_with
from penstock.partition.validation import Floats, Ints

#: A stage: its number of layers, and of ranks (data-parallel replicas).
Stage = tuple[int, int]

#: Bisections of the bound's range before the search over the table's own values.
HALVINGS = 20

#: An empty table of limits: no limit.
NO_LIMIT: Ints = np.empty((0, 0, 0), np.int64)


@dataclass(frozen=True)
class Chain:
    """A table of stage costs and its limits, in the form that the loops read.

    table, most_stages: see `dp_loops.Tables`.
    """

    table: Floats
    most_stages: Ints

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self.table.shape[0]) - 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.table.shape[2]) - 1

    @property
    def tables(self) -> Tables:
        """The arguments of the loops."""
        return Tables(self.table, self.most_stages)

    @property
    def _iterations(self) -> float:
        """Approximate number of innermost iterations of `fewest_ranks`."""
        return self.layers**2 * self.ranks / 8

    def entries(self) -> Floats:
        """Return all finite stage seconds of the table."""
        first, end = np.triu_indices(self.layers + 1, 1)
        values = self.table[first, end, 1:]
        return values[np.isfinite(values)]

    def seconds(self, stages: list[Stage]) -> list[float]:
        """Return the seconds of each of these stages."""
        return seconds_of(self.table, stages)

    def below(self, stages: int) -> Chain:
        """Return the chain with only the entries that may have `stages` stages to the end.

        The stage itself counts; all other entries become infinite. (See `Tables.most_stages`.)
        """
        if not self.most_stages.size:
            return self
        return replace(self, table=np.where(self.most_stages >= stages, self.table, np.inf))

    def without_depth(self) -> Chain:
        """Return the chain without limits on the number of later stages."""
        return replace(self, most_stages=NO_LIMIT)

    def exceeds_depth(self, stages: list[Stage]) -> bool:
        """Return whether a stage has more later stages than its limit."""
        if not self.most_stages.size:
            return False
        first = 0
        for index, (length, replicas) in enumerate(stages):
            if self.most_stages[first, first + length, replicas] < len(stages) - index:
                return True
            first += length
        return False

    # Search for the least bound, by the fewest ranks that keep a bound.

    def fewest_per_count(self, bound: float, stages: int | None) -> list[Ints]:
        """Return, for 0, 1, … stages, the fewest ranks from every layer to the end.

        Stops at `stages`, or, if that is None, at the first number of stages for which the ranks
        suffice.
        """
        # One rank more than there are says "impossible".
        fewest = [np.full(self.layers + 1, self.ranks + 1)]
        fewest[0][-1] = 0
        calls = 2 * HALVINGS * (stages or 1)
        for count in range(1, (stages or self.layers) + 1):
            fewest.append(np.full(self.layers + 1, self.ranks + 1))
            arguments = (self.tables, bound, count, fewest[-2], fewest[-1])
            run(fewest_ranks, self._iterations, *arguments, calls=calls)
            if stages is None and fewest[-1][0] <= self.ranks:
                break
        return fewest

    def suffices(self, bound: float, stages: int | None) -> bool:
        """Return whether the ranks suffice to stay within the bound."""
        if stages is not None or self.most_stages.size:
            return bool(self.fewest_per_count(bound, stages)[-1][0] <= self.ranks)
        fewest = np.full(self.layers + 1, self.ranks + 1)
        fewest[-1] = 0
        arguments = (self.tables, bound, 0, fewest, fewest)
        run(fewest_ranks, self._iterations, *arguments, calls=2 * HALVINGS)
        return bool(fewest[0] <= self.ranks)

    def search(self, stages: int | None) -> tuple[float, list[Stage]] | None:
        """Return the least bound that the ranks, or fewer, can keep, and the stages that keep it.

        None if no bound can be kept.
        """
        # The least bound is one of these. Halving the range first avoids sorting all of them.
        values = self.entries()
        if not values.size:
            return None
        # Below every entry, also 0: `low` itself is left out of the bounds below.
        low, high = -1.0, float(values.max())
        if not self.suffices(high, stages):
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.suffices(middle, stages):
                high = middle
            else:
                low = middle
        bounds = np.unique(values[(values > low) & (values <= high)])
        start, stop = 0, len(bounds) - 1
        while start < stop:
            index = (start + stop) // 2
            if self.suffices(float(bounds[index]), stages):
                stop = index
            else:
                start = index + 1
        bound = float(bounds[start])
        return bound, self._trace_stages(self.fewest_per_count(bound, stages))

    def _trace_stages(self, fewest: list[Ints]) -> list[Stage]:
        """Trace back the stages within the bound that `fewest` was computed for."""
        first, stages = 0, []
        for count in range(len(fewest) - 1, 0, -1):
            table = self.below(count).table
            ends = np.arange(first + 1, self.layers + 1)
            # A stage on a best path has the difference of ranks; of several the fastest is taken,
            # which keeps the bound, since one of them does.
            replicas = fewest[count][first] - fewest[count - 1][ends]
            allowed = replicas >= 1
            replicas = np.where(allowed, replicas, 0)
            seconds = table[first, ends, replicas]
            best = int(np.argmin(np.where(allowed, seconds, np.inf)))
            stages.append((best + 1, int(replicas[best])))
            first = int(ends[best])
        return stages

    def spread_ranks(self, stages: list[Stage], bound: float) -> list[Stage] | None:
        """Distribute all ranks over the stages of a cut, within the bound.

        It minimises the sum of squared stage seconds, which makes the stages as even as possible.
        None if the ranks cannot all be placed.
        """
        edges = np.cumsum([0] + [length for length, _ in stages])
        # Squares of shares of the bound. Under a bound of 0 all seconds are 0, and any unit does.
        unit = bound or 1.0

        # `best_cut` divides the ranks here, as a chain, and begins with those of the last stage.
        def squares(step: int) -> Floats:
            """Return the table of the stage that is the `step`-th from the end.

            Its rows are equal, so it has one; column c is for `ranks` - c replicas.
            """
            index = len(stages) - 1 - step
            first, end = edges[index], edges[index + 1]
            seconds = self.below(step + 1).table[first, end, :0:-1]
            allowed = seconds <= bound
            return np.where(allowed, np.square(np.where(allowed, seconds, 0.0) / unit), np.inf)

        cut = best_cut(squares, len(stages), self.ranks, SUM, longest_last=False)
        if not cut.lengths:
            return None
        lengths = [length for length, _ in stages]
        return list(zip(lengths, reversed(cut.lengths), strict=True))

    # The dynamic program over layers and ranks.

    def least(
        self, *, bound: float, sums: bool, stages: int | None, exactly: bool
    ) -> list[Stage] | None:
        """Return the stages with the least sum or least maximum of seconds; None if there are none.

        The dynamic program computes, for every layer and number of ranks, the best stages from that
        layer to the last one on exactly these ranks (see `dp_loops.least_with`); the stages are
        then traced back from the first layer.

        Args:
            bound: the most seconds of a stage.
            sums: whether to minimise the sum of the stages' seconds; else the slowest stage.
            stages: number of stages; None is any.
            exactly: whether all ranks must be used.
        """
        if self.most_stages.size and stages is None:
            # Without the limit on later stages the search is faster by a factor of the number of
            # stages; its result is exact whenever it happens to keep the limit.
            relaxed = self.without_depth().least(
                bound=bound, sums=sums, stages=None, exactly=exactly
            )
            if relaxed is None or not self.exceeds_depth(relaxed):
                return relaxed
        tables = self._least_per_count(bound, sums=sums, stages=stages)
        if stages is not None:
            counts = [stages]
        elif len(tables) == 1:
            counts = [0]  # the single table is for any number of stages
        else:
            counts = list(range(1, len(tables)))
        used_ranks = [self.ranks] if exactly else range(1, self.ranks + 1)
        candidates = []
        for count in counts:
            for ranks in used_ranks:
                candidates.append((float(tables[count][0, ranks]), count, ranks))
        # Of equal values that of the fewest stages wins, then that of the fewest ranks.
        value, count, ranks = min(candidates)
        return None if value == np.inf else self._trace_back(tables, count, ranks, bound, sums=sums)

    def _least_per_count(self, bound: float, *, sums: bool, stages: int | None) -> list[Floats]:
        """Return the tables of `least_with` for 0, 1, … stages, or one for any number of them."""
        table = np.full((self.layers + 1, self.ranks + 1), np.inf)
        table[-1, 0] = 0.0
        work = (self.layers * self.ranks) ** 2 / 4
        if stages is None and not self.most_stages.size:
            run(least_with, work, self.tables, bound, 0, sums, table, table)
            return [table]
        most = stages or self.layers
        tables = [table]
        for count in range(1, most + 1):
            tables.append(np.full_like(table, np.inf))
            arguments = (self.tables, bound, count, sums, tables[-2], tables[-1])
            run(least_with, work, *arguments, calls=most)
        return tables

    def _trace_back(
        self, tables: list[Floats], count: int, ranks: int, bound: float, *, sums: bool
    ) -> list[Stage]:
        """Return the stages that lead to the best value for all layers on `ranks` ranks.

        Args:
            tables: of `_least_per_count`.
            count: number of stages; ignored if there is only one table.
            ranks: number of ranks to use.
            bound: the most seconds of a stage.
            sums: as in `least`.
        """
        any_count = len(tables) == 1
        first, stages = 0, []
        while first < self.layers:
            table = self.below(1 if any_count else count).table
            after = tables[0 if any_count else count - 1]
            # By the end of the stage and its replicas, from 1 to all ranks that are left; and the
            # value of the later stages, which then have from ranks - 1 to 0 ranks.
            seconds = table[first, first + 1 :, 1 : ranks + 1]
            later = after[first + 1 :, ranks - 1 :: -1]
            total = seconds + later if sums else np.maximum(seconds, later)
            best = np.argmin(np.where(seconds <= bound, total, np.inf))
            row, column = np.unravel_index(best, total.shape)
            length, replicas = int(row) + 1, int(column) + 1
            stages.append((length, replicas))
            first, ranks, count = first + length, ranks - replicas, count - 1
        return stages


def seconds_of(table: Floats, stages: Sequence[Stage]) -> list[float]:
    """Return the seconds of each of these stages, from the table of all."""
    times, first = [], 0
    for length, replicas in stages:
        times.append(float(table[first, first + length, replicas]))
        first += length
    return times


def chain_of(table: Floats, most_stages: Ints | None) -> Chain:
    """Return the validated chain of a table.

    Raises:
        PartitionError: a shape is not as `replicated_table` says, or a number is negative or NaN.
    """
    times = np.ascontiguousarray(table, dtype=np.float64)
    if times.ndim != 3 or times.shape[0] != times.shape[1] or min(times.shape) < 2:
        raise PartitionError(
            f"table: has the shape {times.shape}; it must be (layers + 1, layers + 1, ranks + 1)"
        )
    layers = times.shape[0] - 1
    first, end = np.triu_indices(layers + 1, 1)
    invalid = np.argwhere(~(times[first, end, 1:] >= 0))
    if len(invalid):
        index, replicas = int(invalid[0][0]), int(invalid[0][1]) + 1
        entry = (int(first[index]), int(end[index]), replicas)
        raise PartitionError(
            f"table: entry {list(entry)} is {times[entry]}; "
            f"the seconds of a stage must be 0 or more, infinite if the stage is impossible"
        )
    if most_stages is None:
        return Chain(times, NO_LIMIT)
    if np.shape(most_stages) != times.shape:
        raise PartitionError(
            f"most_stages: has the shape {np.shape(most_stages)}, and the table {times.shape}"
        )
    return Chain(times, np.ascontiguousarray(most_stages, dtype=np.int64))
