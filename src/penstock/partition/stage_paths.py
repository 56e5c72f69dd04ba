"""Shortest paths through a chain of layers with one step per stage.

A stage's table holds the cost of every step it could make. It has one row for every layer that the
stage may end before (row i - 1: before layer i) and one column for every start: with `longest`
columns, column c is the stage that starts at layer i - longest + c. Impossible steps are infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.partition.validation import Floats

#: A function from the number of a stage to its table.
Table = Callable[[int], Floats]


def spans(layers: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ends and starts of a table's steps, and a mask of the possible ones.

    Ends have the shape (layers, 1), starts and mask (layers, longest).

    Starts before the first layer are 0, so that they can be used as indices.
    """
    ends = np.arange(1, layers + 1)[:, None]
    starts = ends - longest + np.arange(longest)
    possible = starts >= 0
    starts[~possible] = 0
    return ends, starts, possible


def least_bottleneck(table: Table, stages: int, layers: int) -> float:
    """Return the least maximum step cost over all paths of `stages` steps through `layers` layers.

    It is infinite if there is no path.
    """
    least_maximum = np.full(layers + 1, np.inf)
    least_maximum[0] = -np.inf
    for stage in range(stages):
        steps = table(stage)
        least_maximum[1:] = np.maximum(_before(least_maximum, steps.shape[1]), steps).min(axis=1)
        least_maximum[0] = np.inf
    return float(least_maximum[-1])


def least_sum(table: Table, stages: int, layers: int) -> list[int]:
    """Return the step lengths of the path with the least sum of step costs.

    Among paths of equal sum it takes the one with the longest last step. A path of finite sum must
    exist.
    """
    rows = np.arange(layers)
    least_cost = np.full(layers + 1, np.inf)
    least_cost[0] = 0.0
    lengths = []
    for stage in range(stages):
        steps = table(stage)
        total = _before(least_cost, steps.shape[1]) + steps
        column = total.argmin(axis=1)
        lengths.append(steps.shape[1] - column)
        least_cost[1:], least_cost[0] = total[rows, column], np.inf
    end, chosen = layers, []
    for step in reversed(lengths):
        chosen.append(int(step[end - 1]))
        end -= chosen[-1]
    assert end == 0
    return chosen[::-1]


def _before(states: Floats, longest: int) -> Floats:
    """Return the state before every step of a table; infinite before the first layer.

    Row i - 1, column c is the state of the layers before a stage that ends before layer i.
    """
    padded = np.concatenate((np.full(longest, np.inf), states))
    return np.lib.stride_tricks.sliding_window_view(padded, longest)[1 : len(states)]
