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
    micro_batches, cutoff_s, devices = numbers[0], numbers[1], numbers[4]
    origin = numbers[2], numbers[3]  # prefix and move
    behind_s, behind_s_per_byte = numbers[5], numbers[6]
    reduce_s, reduce_s_per_byte = numbers[7], numbers[8]
    rest_reduce_s, rest_reduce_s_per_byte = numbers[9], numbers[10]
    forward_sum, backward_sum, rest_forward_sum, rest_backward_sum = (
        sums[0],
        sums[1],
        sums[2],
        sums[3],
    )
    output_bytes, weight_sum, least_work_sum = sums[4], sums[5], sums[6]
    forward, backward, reduce = stages[0], stages[1], stages[2]
    rounds, last = micro_batches - 1, sums.shape[1] - 1
    # Of the prefix: its slowest stage or transfer, its forward, and its backward with the syncs.
    most, prefix_forward, prefix_ending = 0.0, 0.0, 0.0
    for s in range(at):
        most = max(most, forward[s] + backward[s])
        prefix_forward += forward[s]
        prefix_ending = max(prefix_ending, reduce[s]) + backward[s]
    best, where = 1e300, -1
    for stop in range(start + 1, last):
        f, b = forward_sum[stop] - forward_sum[start], backward_sum[stop] - backward_sum[start]
        share = (least_work_sum[last] - least_work_sum[stop]) / devices
        first = forward[0] + backward[0] if at else f + b
        # Longer stages only take longer; the rest, divided evenly, takes less the later it starts.
        if rounds * max(most, f + b) + first > cutoff_s:
            break
        if rounds * share + (first if at else 0.0) > cutoff_s:
            continue
        # The new stage, the transfer behind it, and the rest as one stage.
        forward[at], backward[at] = f, b
        reduce[at] = reduce_s + (weight_sum[stop] - weight_sum[start]) * reduce_s_per_byte
        hop = behind_s + output_bytes[stop] * behind_s_per_byte
        forward[at + 1], backward[at + 1], reduce[at + 1] = hop, hop, 0.0
        forward[at + 2] = rest_forward_sum[last] - rest_forward_sum[stop]
        backward[at + 2] = rest_backward_sum[last] - rest_backward_sum[stop]
        rest_bytes = weight_sum[last] - weight_sum[stop]
        reduce[at + 2] = rest_reduce_s + rest_bytes * rest_reduce_s_per_byte
        value = latency(forward, backward, reduce, at + 3, micro_batches)
        if value < best:
            best, where = value, stop
        # All pipelines of a state have the same rest, so that its contribution matters only where
        # it is slower than they are.
        slowest = max(most, f + b, 2 * hop, share)
        ending = max(prefix_ending, reduce[at])
        spread = rounds * slowest + prefix_forward + f + ending + b + 2 * hop
        insert(table[0], table[1], stop, 0, value, origin)
        insert(table[0], table[1], stop, 1, spread, origin)
    return best, where
