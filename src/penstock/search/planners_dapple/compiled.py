"""A stage more after a prefix of a pipeline, and the rest of the layers as the last stage: the latency of all such pipelines.

Compiled by Numba and kept on disk; importing this file loads Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import njit

#: NumPy arrays.
Numbers = Any


@dataclass(frozen=True)
class Numbered:
    """What `extend` gets as one array.

    `micro_batches`; `known`, a latency that is possible, so that what is surely above it need not be entered; `before` and `behind`,
    latency and seconds per byte of the transfers there; `reduce` and `reduce_rest`, the same of the all-reduce of the new stage and of
    the rest; `devices` left behind the new stage; `prefix` and `move`, where this comes from.
    """

    micro_batches: float
    known: float
    before: tuple[float, float]
    behind: tuple[float, float]
    reduce: tuple[float, float]
    reduce_rest: tuple[float, float]
    devices: int
    prefix: int
    move: int

    #: Where in the array these stand.
    KNOWN: ClassVar[int] = 1
    BEFORE: ClassVar[slice] = slice(2, 4)
    PREFIX: ClassVar[int] = 11

    def array(self) -> Numbers:
        """All numbers in this order."""
        pairs = (*self.before, *self.behind, *self.reduce, *self.reduce_rest)
        return np.array([self.micro_batches, self.known, *pairs, self.devices, self.prefix, self.move], float)


def _latency(forward: Numbers, backward: Numbers, reduce: Numbers, count: int, micro_batches: float) -> Any:
    """`dapple_latency.latency`, without its parts."""
    pivot = count - 1
    between = 0.0
    for s in range(count - 2, -1, -1):
        if (micro_batches - 1) * (forward[s] + backward[s]) > (micro_batches - 1) * (
            forward[pivot] + backward[pivot]
        ) + between:
            pivot = s
            between = 0.0
        else:
            between += forward[s] + backward[s]
    ahead = 0.0
    ending = -1e300
    for s in range(pivot, -1, -1):
        ahead += backward[s]
        ending = max(ending, reduce[s] + ahead)
    behind = backward[pivot]
    for s in range(pivot + 1, count):
        behind += backward[s]
        ending = max(ending, reduce[s] - behind)
    total = ending + (micro_batches - 1) * (forward[pivot] + backward[pivot])
    for s in range(pivot + 1):
        total += forward[s]
    return total


def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return njit(cache=True, nogil=True)(kernel)
    except RuntimeError:  # no folder that Numba may write to: compiled again in every process
        return njit(nogil=True)(kernel)


latency = _compiled(_latency)


def _extend(stages: Numbers, count: int, start: int, own: Numbers, rest: Numbers, layers: Numbers, numbers: Numbers,
            values: Numbers, origins: Numbers) -> tuple[float, int]:  # fmt: skip
    """Enter every pipeline with one more stage into the table of the state that it leads to; the best of them, and where its last
    stage starts, infinite where there is none.

    Args:
        stages: [3, at least count + 4]: forward, backward and all-reduce of the prefix, and room for four more.
        count: stages and transfers of the prefix.
        start: the new stage's first layer; it ends before any later layer.
        own, rest: [2, n + 1]: forward and backward before every layer, at the new stage's number of copies and at that of the rest.
        layers: [3, n + 1]: output bytes of the layer before, weights before it, and the least work before it.
        numbers: see `Numbered`.
        values: [2 keep, n + 1]: the table's least latencies by the layer that the rest starts with, ascending: with the rest as one
            stage, and with the rest spread evenly.
        origins: [2, 2 keep, n + 1]: their prefixes and moves.
    """
    micro_batches, known = numbers[0], numbers[1]
    last = own.shape[1] - 1
    first = stages[0, 0] + stages[1, 0] if count else 0.0
    keep = values.shape[0] // 2
    best, where = 1e300, -1
    most, forward, ending = 0.0, 0.0, 0.0
    for s in range(count):
        most = max(most, stages[0, s] + stages[1, s])
        forward += stages[0, s]
        ending = max(ending, stages[2, s]) + stages[1, s]
    at = count
    if start > 0:
        seconds = numbers[2] + layers[0, start] * numbers[3]
        stages[0, at] = stages[1, at] = seconds
        stages[2, at] = 0.0
        most = max(most, 2 * seconds)
        forward += seconds
        ending += seconds
        at += 1
    for stop in range(start + 1, last):
        f, b = own[0, stop] - own[0, start], own[1, stop] - own[1, start]
        if (micro_batches - 1) * max(most, f + b) + (first if count else f + b) > known:
            break
        if (micro_batches - 1) * (layers[2, last] - layers[2, stop]) / numbers[10] + first > known:
            continue
        stages[0, at], stages[1, at] = f, b
        stages[2, at] = numbers[6] + (layers[1, stop] - layers[1, start]) * numbers[7]
        seconds = numbers[4] + layers[0, stop] * numbers[5]
        stages[0, at + 1] = stages[1, at + 1] = seconds
        stages[2, at + 1] = 0.0
        stages[0, at + 2], stages[1, at + 2] = rest[0, last] - rest[0, stop], rest[1, last] - rest[1, stop]
        stages[2, at + 2] = numbers[8] + (layers[1, last] - layers[1, stop]) * numbers[9]
        value = latency(stages[0], stages[1], stages[2], at + 3, micro_batches)
        if value < best:
            best, where = value, stop
        # What the rest adds is the same for all ways to a state, unless it is what they are too slow for.
        slowest = max(most, f + b, 2 * seconds, (layers[2, last] - layers[2, stop]) / numbers[10])
        rank = (micro_batches - 1) * slowest + forward + f + max(ending, stages[2, at]) + b + 2 * seconds
        for kind, key in enumerate((value, rank)):
            first_place, place = kind * keep, kind * keep + keep - 1
            if key >= values[place, stop]:
                continue
            while place > first_place and values[place - 1, stop] > key:
                values[place, stop] = values[place - 1, stop]
                origins[0, place, stop] = origins[0, place - 1, stop]
                origins[1, place, stop] = origins[1, place - 1, stop]
                place -= 1
            values[place, stop] = key
            origins[0, place, stop], origins[1, place, stop] = numbers[11], numbers[12]
    return best, where


extend = _compiled(_extend)
