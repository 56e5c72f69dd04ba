"""Tables of what every possible stage would take on every number of ranks, and the exact searches
over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError
from penstock.partition.checks import Floats, check_costs
from penstock.partition.compiled import run
from penstock.partition.loops import Tables, fewest_ranks, least_with

Ints = npt.NDArray[np.int64]

#: A stage: its number of layers, and of ranks.
Stage = tuple[int, int]

#: How often the range of the bound is halved before it is searched value by value.
HALVINGS = 20

#: What stands for "no such limit".
NONE: Ints = np.empty((0, 0, 0), np.int64)


@dataclass(frozen=True)
class Chain:
    """A table as the loops read it. `links`: seconds of the cut before every layer and the end,
    free at both ends.
    """

    table: Floats
    links: Floats
    most_ranks: Ints
    most_stages: Ints

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return int(self.table.shape[0]) - 1

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return int(self.table.shape[2]) - 1

    @property
    def tables(self) -> Tables:
        """What the loops read."""
        return Tables(self.table, self.links, self.most_ranks, self.most_stages)

    @property
    def _turns(self) -> float:
        """About how many turns the search for the least bound takes."""
        return self.layers**2 * self.ranks / 8 * 2 * HALVINGS

    def entries(self) -> Floats:
        """Everything finite that a stage can take."""
        first, end = np.triu_indices(self.layers + 1, 1)
        values = self.table[first, end, 1:]
        return values[np.isfinite(values)]

    def seconds(self, found: list[Stage]) -> list[float]:
        """What each of the stages takes."""
        times, first = [], 0
        for length, copies in found:
            times.append(float(self.table[first, first + length, copies]))
            first += length
        return times

    def below(self, stages: int) -> Chain:
        """The same for the stage that is the `stages`-th from the end, this one counted."""
        if not self.most_stages.size:
            return self
        return replace(self, table=np.where(self.most_stages >= stages, self.table, np.inf))

    def without_depth(self) -> Chain:
        """The same with any number of stages after each."""
        return replace(self, most_stages=NONE)

    def deep(self, found: list[Stage]) -> bool:
        """Whether a stage has more stages after it than it may."""
        first = 0
        for number, (length, copies) in enumerate(found):
            if (
                self.most_stages.size
                and self.most_stages[first, first + length, copies] < len(found) - number
            ):
                return True
            first += length
        return False

    # The fewest ranks within a bound.

    def needed(self, bound: float, stages: int | None) -> list[Ints]:
        """Of 0, 1, … stages, the fewest ranks for every layer and those after it; up to `stages` or
        to what suffices.
        """
        found = [np.full(self.layers + 1, self.ranks + 1)]
        found[0][-1] = 0
        work = self._turns * (stages or 1)
        for count in range(1, (stages or self.layers) + 1):
            found.append(np.full(self.layers + 1, self.ranks + 1))
            run(fewest_ranks, work, self.tables, bound, count, found[-2], found[-1])
            if stages is None and found[-1][0] <= self.ranks:
                break
        return found

    def suffices(self, bound: float, stages: int | None) -> bool:
        """Whether the ranks are enough to keep the bound."""
        if stages is not None or self.most_stages.size:
            return bool(self.needed(bound, stages)[-1][0] <= self.ranks)
        found = np.full(self.layers + 1, self.ranks + 1)
        found[-1] = 0
        run(fewest_ranks, self._turns, self.tables, bound, 0, found, found)
        return bool(found[0] <= self.ranks)

    def search(self, stages: int | None) -> tuple[float, list[Stage]] | None:
        """The least bound that can be kept with the ranks or fewer, and the stages that keep it;
        None if there is none.
        """
        values = np.concatenate((self.entries(), self.links))
        low, high = -1.0, float(values.max())
        if not self.suffices(high, stages):
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.suffices(middle, stages) else (middle, high)
        bounds = np.unique(values[(values > low) & (values <= high)])
        start, stop = 0, len(bounds) - 1
        while start < stop:
            middle = (start + stop) // 2
            start, stop = (
                (start, middle)
                if self.suffices(float(bounds[middle]), stages)
                else (middle + 1, stop)
            )
        bound = float(bounds[start])
        return bound, self._way(bound, self.needed(bound, stages))

    def _way(self, bound: float, found: list[Ints]) -> list[Stage]:
        first, chosen = 0, []
        for count in range(len(found) - 1, 0, -1):
            table = self.below(count).table
            ends = np.arange(first + 1, self.layers + 1)
            copies = found[count][first] - found[count - 1][ends]
            can = (copies >= 1) & (self.links[ends] <= bound)
            copies = np.where(can, copies, 0)
            own = table[first, ends, copies]
            can &= own <= bound
            if self.most_ranks.size:
                can &= self.most_ranks[first, ends, copies] >= found[count][first]
            best = int(np.argmin(np.where(can, own, np.inf)))
            chosen.append((best + 1, int(copies[best])))
            first = int(ends[best])
        return chosen

    def topped_up(self, found: list[Stage], bound: float) -> list[Stage] | None:
        """The same cut on all ranks, within the bound, the seconds of the stages as even as can be;
        None if that cannot be.
        """
        edges = np.cumsum([0] + [length for length, _ in found])
        copies, unit = np.arange(self.ranks + 1), bound or 1.0
        least, choices = np.full(self.ranks + 1, np.inf), []
        least[0] = 0.0
        for number in range(len(found) - 1, -1, -1):
            first, end = edges[number], edges[number + 1]
            own = self.below(len(found) - number).table[first, end]
            can = (own <= bound) & (copies > 0)
            square = np.where(can, np.square(np.where(can, own, 0.0) / unit), np.inf)
            # Row r, column k: the stage on k of the r ranks from it to the end.
            padded = np.concatenate((np.full(self.ranks, np.inf), least))
            total = (
                np.lib.stride_tricks.sliding_window_view(padded, self.ranks + 1)[:, ::-1] + square
            )
            if self.most_ranks.size:
                total[copies[:, None] > self.most_ranks[first, end]] = np.inf
            choices.append(total.argmin(axis=1))
            least = total[copies, choices[-1]]
        if least[-1] == np.inf:
            return None
        left, chosen = self.ranks, []
        for (length, _), choice in zip(found, reversed(choices), strict=True):
            chosen.append((length, int(choice[left])))
            left -= chosen[-1][1]
        return chosen

    # The dynamic program itself.

    def least(
        self, *, bound: float, sums: bool, stages: int | None, exactly: bool
    ) -> list[Stage] | None:
        """The stages with the least sum, or the least maximum, none above `bound`."""
        if self.most_stages.size and stages is None:
            relaxed = self.without_depth().least(
                bound=bound, sums=sums, stages=None, exactly=exactly
            )
            if relaxed is None or not self.deep(relaxed):
                return relaxed
        end = np.full((self.layers + 1, self.ranks + 1), np.inf)
        end[-1, 0] = 0.0
        work = (self.layers * self.ranks) ** 2 / 4
        if stages is None and not self.most_stages.size:
            run(least_with, work, self.tables, bound, 0, sums, end, end)
            layers = [end]
        else:
            layers = [end]
            for count in range(1, (stages or self.layers) + 1):
                layers.append(np.full_like(end, np.inf))
                run(
                    least_with,
                    work * (stages or self.layers),
                    self.tables,
                    bound,
                    count,
                    sums,
                    layers[-2],
                    layers[-1],
                )
        counts = (
            [len(layers) - 1] if len(layers) == 1 or stages is not None else range(1, len(layers))
        )
        used = [self.ranks] if exactly else range(1, self.ranks + 1)
        value, count, ranks = min(
            (float(layers[count][0, ranks]), count, ranks) for count in counts for ranks in used
        )
        return None if value == np.inf else self._walk(layers, count, ranks, bound, sums=sums)

    def _walk(
        self, layers: list[Floats], count: int, left: int, bound: float, *, sums: bool
    ) -> list[Stage]:
        """The way that led to the state of no layer done, in `layers[count]`, with `left` ranks to
        use.
        """
        first, chosen, free = 0, [], len(layers) == 1
        while first < self.layers:
            after = layers[0 if free else count - 1]
            own = self.below(1 if free else count).table[first, first + 1 :, 1 : left + 1]
            links = self.links[first + 1 :, None]
            rest = after[first + 1 :, left - 1 :: -1]
            total = own + rest if sums else np.maximum(np.maximum(own, links), rest)
            can = (own <= bound) & (links <= bound)
            if self.most_ranks.size:
                can = can & (self.most_ranks[first, first + 1 :, 1 : left + 1] >= left)
            length, copies = (
                int(x) + 1
                for x in np.unravel_index(np.argmin(np.where(can, total, np.inf)), total.shape)
            )
            chosen.append((length, copies))
            first, left, count = first + length, left - copies, count - 1
        return chosen


def chain_of(
    table: Floats,
    boundary: Sequence[float] | Floats | None,
    most_ranks: Ints | None,
    most_stages: Ints | None,
) -> Chain:
    """The chain of a table, once it is one.

    Raises:
        PartitionError: a shape is not as `replicated_table` says, or a number is below 0 or NaN.
    """
    times = np.ascontiguousarray(table, dtype=np.float64)
    if times.ndim != 3 or times.shape[0] != times.shape[1] or min(times.shape) < 2:
        raise PartitionError(
            f"table: has the shape {times.shape}; it must be (layers + 1, layers + 1, ranks + 1)"
        )
    layers = times.shape[0] - 1
    first, end = np.triu_indices(layers + 1, 1)
    wrong = np.argwhere(~(times[first, end, 1:] >= 0))
    if len(wrong):
        at, copies = int(wrong[0][0]), int(wrong[0][1]) + 1
        place = (int(first[at]), int(end[at]), copies)
        raise PartitionError(
            f"table: entry {list(place)} is {times[place]}; every stage takes 0 s or more, infinity if it cannot be"
        )
    links = np.zeros(layers + 1)
    if boundary is not None:
        links[1:-1] = check_costs(boundary, "boundary", layers - 1)
    for name, most in (("most_ranks", most_ranks), ("most_stages", most_stages)):
        if most is not None and np.shape(most) != times.shape:
            raise PartitionError(
                f"{name}: has the shape {np.shape(most)}, and the table {times.shape}"
            )
    ranks, stages = (
        NONE if most is None else np.ascontiguousarray(most, dtype=np.int64)
        for most in (most_ranks, most_stages)
    )
    return Chain(times, links, ranks, stages)
