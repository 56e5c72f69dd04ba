"""The dynamic program that cuts a chain of layers into consecutive stages.

    state       | the layers before a boundary, and the number of stages so far
    recurrence  | best[s + 1, end] = min over start < end of
                |                    combine(best[s, start], cost of stage s of layers start .. end - 1)
    objective   | how the stages' costs combine: `MAXIMUM`, `SUM` or `RANGE`
    feasibility | a stage that is too long, does not fit in memory, or may not end there costs
                | infinity

The partitioners differ in their costs, limits, objective and rule for ties; each describes these by
one table per stage:

    row r       | the stage ends before layer r + 1
    column c    | the stage has `longest` - c layers: starts are in ascending order

Entries of stages that would start before the first layer are ignored. A table whose rows are equal
may be a single row. Few columns make the program fast; no stage of a complete cut has more than
layers - stages + 1 layers.

What does not use it has another state: how many ranks are left over (`replica_search`, and the
planners of PipeDream and SPP), which kinds of rank were used (`ordered`), both ends of the chain at
once (`folded`). `looped` runs the same recurrence thousands of times on few layers, in a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.partition.validation import Floats

#: A function from the number of a stage to its table.
Table = Callable[[int], Floats]


class Objective(NamedTuple):
    """What a cut minimises: a number that follows from the costs of its stages, one after another.

    The value of a state has one or two components; with two, the first less the second is
    minimised.

    combine: per component, the function of its value before a stage and of the stage's cost that
        returns its value behind the stage.
    start: the components for no stages.
    unreachable: the components where no cut leads to a state.
    """

    combine: tuple[np.ufunc, ...]
    start: tuple[float, ...]
    unreachable: tuple[float, ...]


#: A second component is always finite, so that infinity is never subtracted from infinity.
HUGE = float(np.finfo(np.float64).max)

#: The cost of the most expensive stage.
MAXIMUM = Objective((np.maximum,), (-np.inf,), (np.inf,))
#: The sum of the stages' costs.
SUM = Objective((np.add,), (0.0,), (np.inf,))
#: The cost of the most expensive stage less that of the cheapest. A best cut may contain a prefix
#: that is not the best of its state, so that the result is not always the least.
RANGE = Objective((np.maximum, np.minimum), (0.0, HUGE), (np.inf, HUGE))


class Cut(NamedTuple):
    """A cut of a chain.

    value: of the objective; infinite if no cut is possible.
    lengths: layers of every stage; empty if no cut is possible.
    """

    value: float
    lengths: list[int]


def best_cut(
    table: Table, stages: int, layers: int, objective: Objective, *, longest_last: bool = True
) -> Cut:
    """Return the cut with the least value of the objective.

    Args:
        table: the stages' costs.
        stages: number of stages.
        layers: number of layers.
        objective: what to minimise.
        longest_last: of equal cuts of the layers before a boundary take the one whose last stage is
            longest; else the one whose last stage is shortest.
    """
    components = range(len(objective.combine))
    values = [np.full(layers + 1, number) for number in objective.unreachable]
    for component in components:
        values[component][0] = objective.start[component]
    rows = np.arange(layers)
    lengths = []
    for stage in range(stages):
        steps = table(stage)
        width = steps.shape[-1]
        behind = []
        for component in components:
            before = at_starts(values[component], width, objective.unreachable[component])
            behind.append(objective.combine[component](before, steps))
        score = behind[0] if len(behind) == 1 else behind[0] - behind[1]
        column = score.argmin(axis=1) if longest_last else width - 1 - score[:, ::-1].argmin(axis=1)
        lengths.append(width - column)
        for component in components:
            values[component][0] = objective.unreachable[component]
            values[component][1:] = behind[component][rows, column]
    value = float(score[-1, column[-1]])
    return Cut(value, _trace_back(lengths, layers) if value < np.inf else [])


def _trace_back(lengths: list[np.ndarray], layers: int) -> list[int]:
    """Return the stages' lengths, given per stage its best length before every boundary."""
    end, cut = layers, []
    for best_lengths in reversed(lengths):
        cut.append(int(best_lengths[end - 1]))
        end -= cut[-1]
    assert end == 0
    return cut[::-1]


def at_starts(values: Floats, longest: int, outside: float = 0.0) -> Floats:
    """Return the table of what `values` has at the first layer of a stage, without copying it.

    Args:
        values: one number per boundary, shape (layers + 1,).
        longest: number of columns.
        outside: the number for starts before the first layer.
    """
    layers = len(values) - 1
    padded = np.concatenate((np.full(longest - 1, outside), values))
    # As `sliding_window_view`, which takes ten times as long on short chains.
    return np.ndarray((layers, longest), np.float64, padded, strides=(padded.itemsize,) * 2)


def stage_sums(prefix: Floats, longest: int) -> Floats:
    """Return the table of the sums of one number per layer, from their prefix sums."""
    return prefix[1:, None] - at_starts(prefix, longest)
