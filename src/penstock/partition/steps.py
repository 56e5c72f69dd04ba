"""Ways through a chain in as many steps as there are stages, where each stage has a table of what
each of its steps would cost.

A table has one row for every layer that a stage may end before (row i - 1: before layer i), and one
column for every start: of `longest` columns, column c is the stage that starts with layer i -
longest + c. Steps that cannot be are infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.partition.checks import Floats

#: The table of a stage, by its number.
Table = Callable[[int], Floats]


def spans(layers: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ends, shape (layers, 1), and starts, shape (layers, longest), of a table's steps, and
    which of them can be.

    Starts before the first layer are given as 0, so that they can index.
    """
    ends = np.arange(1, layers + 1)[:, None]
    starts = ends - longest + np.arange(longest)
    possible = starts >= 0
    starts[~possible] = 0
    return ends, starts, possible


def least_bottleneck(table: Table, stages: int, layers: int) -> float:
    """The least maximum over all ways of `stages` steps through `layers` layers; infinite if there
    is none.
    """
    states = np.full(layers + 1, np.inf)
    states[0] = -np.inf
    for stage in range(stages):
        steps = table(stage)
        states[1:] = np.maximum(_before(states, steps.shape[1]), steps).min(axis=1)
        states[0] = np.inf
    return float(states[-1])


def least_sum(table: Table, stages: int, layers: int) -> list[int]:
    """The lengths of the steps of the way with the least sum; of equal ones the one with the
    longest last step.

    There must be a way of finite sum.
    """
    rows = np.arange(layers)
    states = np.full(layers + 1, np.inf)
    states[0] = 0.0
    lengths = []
    for stage in range(stages):
        steps = table(stage)
        total = _before(states, steps.shape[1]) + steps
        column = total.argmin(axis=1)
        lengths.append(steps.shape[1] - column)
        states[1:], states[0] = total[rows, column], np.inf
    end, chosen = layers, []
    for step in reversed(lengths):
        chosen.append(int(step[end - 1]))
        end -= chosen[-1]
    assert end == 0
    return chosen[::-1]


def _before(states: Floats, longest: int) -> Floats:
    """Row i - 1, column c: the state of the layers before a stage that ends before layer i;
    infinite if there is none.
    """
    padded = np.concatenate((np.full(longest, np.inf), states))
    return np.lib.stride_tricks.sliding_window_view(padded, longest)[1 : len(states)]
