"""Kernel of DAPPLE's search: the latency of all pipelines that add one stage to a prefix and put
the remaining layers into a last stage.

Importing this file loads Numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from penstock.compiled import compiled

#: NumPy arrays.
Numbers = Any


@dataclass(frozen=True)
class StepNumbers:
    """The numbers that `extend` takes as one array.

    Attributes:
        micro_batches: micro-batches of a step.
        behind: latency and seconds per byte of the transfer from the new stage to the rest.
        reduce: the same of the all-reduce of the new stage.
        all_reduce_rest: the same of the all-reduce of the rest.
        devices: devices left for the rest.
        move: index of the new stage's move.
        cutoff_s: a latency that is possible; pipelines whose bound exceeds it are skipped.
        prefix: index of the prefix.
    """

    micro_batches: float
    behind: tuple[float, float]
    reduce: tuple[float, float]
    all_reduce_rest: tuple[float, float]
    devices: int
    move: int
    cutoff_s: float = 0.0
    prefix: int = 0

    #: Their places in the array.
    CUTOFF: ClassVar[int] = 1
    PREFIX: ClassVar[int] = 2

    def array(self) -> Numbers:
        """Return all numbers, in the order in which `extend` reads them."""
        pairs = (*self.behind, *self.reduce, *self.all_reduce_rest)
        return np.array(
            [self.micro_batches, self.cutoff_s, self.prefix, self.move, self.devices, *pairs], float
        )


@compiled
def latency(
    forward: Numbers, backward: Numbers, reduce: Numbers, count: int, micro_batches: float
) -> Any:
    """Return the paper's latency of a step: warm-up, steady phase and ending, seen from the pivot
    Q, the stage that has the fewest bubbles. Transfers count as stages between stages.

        T_w = F_0 + ... + F_Q
        T_s = (M - 1)(F_Q + B_Q)
        T_e = maximum over all stages s of AR_s + (B_s + ... + B_Q)    for s <= Q
                                           AR_s - (B_Q + ... + B_s)    for s > Q

    Args:
        forward, backward: seconds of a micro-batch on every stage and transfer.
        reduce: seconds of the all-reduce of the stage's gradients; 0 for a transfer.
        count: number of stages and transfers, from the first on.
        micro_batches: M.

    Source: Fan et al. 2021, DAPPLE (arXiv 2007.01045), section 4.
    """
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


@compiled
def insert(
    values: Numbers, origins: Numbers, stop: int, kind: int, key: float, origin: tuple[float, float]
) -> None:
    """Insert a pipeline into one ranking of a state, if it is among the best `keep`."""
    keep = values.shape[0] // 2
    top, place = kind * keep, kind * keep + keep - 1
    if key >= values[place, stop]:
        return
    while place > top and values[place - 1, stop] > key:
        values[place, stop] = values[place - 1, stop]
        origins[0, place, stop] = origins[0, place - 1, stop]
        origins[1, place, stop] = origins[1, place - 1, stop]
        place -= 1
    values[place, stop] = key
    origins[0, place, stop], origins[1, place, stop] = origin


@compiled
def extend(
    stages: Numbers,
    at: int,
    start: int,
    sums: Numbers,
    numbers: Numbers,
    table: tuple[Numbers, Numbers],
) -> tuple[float, int]:
    """Insert all pipelines with one more stage into the table of the state that they lead to.

    Args:
        stages: [3, at + 3 or more]: forward, backward and all-reduce of the stages and transfers of
            the prefix, the transfer behind it included, and room for more.
        at: number of those columns.
        start: first layer of the new stage, which ends before any later layer.
        sums: [7, n + 1], sums before every layer: forward and backward with the new stage's number
            of replicas, and with that of the rest; output bytes of the layer before; weights; the
            least work.
        numbers: see `StepNumbers`.
        table: [2 keep, n + 1], the least latencies by the first layer of the rest, ascending: with
            the rest as one stage, and with the rest divided evenly; and [2, 2 keep, n + 1], their
            prefixes and moves.

    Returns:
        The least latency, and the first layer of the rest; -1 if there is no pipeline.
    """
    rounds, cutoff_s, devices, last = numbers[0] - 1, numbers[1], numbers[4], sums.shape[1] - 1
    first = stages[0, 0] + stages[1, 0] if at else 0.0
    best, where = 1e300, -1
    most, forward, ending = 0.0, 0.0, 0.0
    for s in range(at):
        most = max(most, stages[0, s] + stages[1, s])
        forward += stages[0, s]
        ending = max(ending, stages[2, s]) + stages[1, s]
    for stop in range(start + 1, last):
        f, b = sums[0, stop] - sums[0, start], sums[1, stop] - sums[1, start]
        share = (sums[6, last] - sums[6, stop]) / devices
        if rounds * max(most, f + b) + (first if at else f + b) > cutoff_s:
            break
        if rounds * share + first > cutoff_s:
            continue
        stages[0, at], stages[1, at] = f, b
        stages[2, at] = numbers[7] + (sums[5, stop] - sums[5, start]) * numbers[8]
        hop = numbers[5] + sums[4, stop] * numbers[6]
        stages[0, at + 1], stages[1, at + 1], stages[2, at + 1] = hop, hop, 0.0
        stages[0, at + 2], stages[1, at + 2] = (
            sums[2, last] - sums[2, stop],
            sums[3, last] - sums[3, stop],
        )
        stages[2, at + 2] = numbers[9] + (sums[5, last] - sums[5, stop]) * numbers[10]
        value = latency(stages[0], stages[1], stages[2], at + 3, rounds + 1)
        if value < best:
            best, where = value, stop
        # All pipelines of a state have the same rest, so that its contribution matters only where
        # it is slower than they are.
        spread = (
            rounds * max(most, f + b, 2 * hop, share)
            + forward
            + f
            + max(ending, stages[2, at])
            + b
            + 2 * hop
        )
        insert(table[0], table[1], stop, 0, value, (numbers[2], numbers[3]))
        insert(table[0], table[1], stop, 1, spread, (numbers[2], numbers[3]))
    return best, where
