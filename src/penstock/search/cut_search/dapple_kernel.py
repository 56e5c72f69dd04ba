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
    rounds = micro_batches - 1
    # The pivot: from the last stage to the first, a stage takes over if its steady phase is longer
    # than that of the pivot so far with a forward and backward of all stages between the two.
    pivot = count - 1
    between = 0.0
    for s in range(count - 2, -1, -1):
        pivot_steady = rounds * (forward[pivot] + backward[pivot])
        if rounds * (forward[s] + backward[s]) > pivot_steady + between:
            pivot = s
            between = 0.0
        else:
            between += forward[s] + backward[s]
    ending = -1e300
    # B_s + ... + B_Q
    backwards = 0.0
    for s in range(pivot, -1, -1):
        backwards += backward[s]
        ending = max(ending, reduce[s] + backwards)
    # B_Q + ... + B_s
    backwards = backward[pivot]
    for s in range(pivot + 1, count):
        backwards += backward[s]
        ending = max(ending, reduce[s] - backwards)
    total = ending + rounds * (forward[pivot] + backward[pivot])
    for s in range(pivot + 1):
        total += forward[s]
    return total


@compiled
def insert(
    values: Numbers,
    origins: Numbers,
    rest_start: int,
    ranking: int,
    value: float,
    origin: tuple[float, float],
) -> None:
    """Insert a pipeline into one ranking of a state, if it is among the best `keep`.

    Args:
        values, origins: the table of the state, see `extend`.
        rest_start: first layer of the rest, which is the column of the state.
        ranking: 0 or 1, each with `keep` rows, ascending.
        value: latency of the pipeline in this ranking.
        origin: its prefix and move.
    """
    keep = values.shape[0] // 2
    first_row = ranking * keep
    row = first_row + keep - 1
    if value >= values[row, rest_start]:
        return
    # One step of insertion sort: larger values move down by a row, and the last is dropped.
    while row > first_row and values[row - 1, rest_start] > value:
        values[row, rest_start] = values[row - 1, rest_start]
        origins[0, row, rest_start] = origins[0, row - 1, rest_start]
        origins[1, row, rest_start] = origins[1, row - 1, rest_start]
        row -= 1
    values[row, rest_start] = value
    origins[0, row, rest_start], origins[1, row, rest_start] = origin


@compiled
def prefix_seconds(
    forward: Numbers, backward: Numbers, reduce: Numbers, count: int
) -> tuple[float, float, float]:
    """Return three values of the first `count` stages and transfers.

    Returns:
        The longest forward and backward of one of them; the sum of their forwards; and their part
        of the ending, T_e up to the last one: the maximum over s of AR_s + (B_s + ... + B_last).
    """
    slowest, forward_sum, ending = 0.0, 0.0, 0.0
    for s in range(count):
        slowest = max(slowest, forward[s] + backward[s])
        forward_sum += forward[s]
        ending = max(ending, reduce[s]) + backward[s]
    return slowest, forward_sum, ending


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

        prefix   | transfer | new stage              | transfer | rest
        fixed    | fixed    | layers start to stop-1 |          | layers from stop on

    For every `stop`, unless a lower bound of the latency exceeds the cutoff, the pipeline is ranked
    twice: by the paper's latency with the rest as one stage, and by an estimate with the rest
    divided evenly among the remaining devices (see `dapple_search`).

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
    transfer_s, transfer_s_per_byte = numbers[5], numbers[6]
    reduce_s, reduce_s_per_byte = numbers[7], numbers[8]
    rest_reduce_s, rest_reduce_s_per_byte = numbers[9], numbers[10]
    new_forward_sum, new_backward_sum = sums[0], sums[1]
    rest_forward_sum, rest_backward_sum = sums[2], sums[3]
    output_bytes, weight_sum, least_work_sum = sums[4], sums[5], sums[6]
    forward, backward, reduce = stages[0], stages[1], stages[2]
    values, origins = table
    new, hop, rest = at, at + 1, at + 2
    has_prefix = at > 0
    layers, rounds = sums.shape[1] - 1, micro_batches - 1
    prefix_slowest, prefix_forward, prefix_ending = prefix_seconds(forward, backward, reduce, at)
    best, best_stop = 1e300, -1
    for stop in range(start + 1, layers):
        new_forward = new_forward_sum[stop] - new_forward_sum[start]
        new_backward = new_backward_sum[stop] - new_backward_sum[start]
        even_share = (least_work_sum[layers] - least_work_sum[stop]) / devices
        # A step takes at least the first stage once, and M - 1 times the slowest one. The new stage
        # only gets longer with `stop`, so that no later one is possible either; the even share of
        # the rest gets shorter, so that a later one may be.
        slowest = max(prefix_slowest, new_forward + new_backward)
        first_stage = forward[0] + backward[0] if has_prefix else new_forward + new_backward
        if rounds * slowest + first_stage > cutoff_s:
            break
        first_known = first_stage if has_prefix else 0.0
        if rounds * even_share + first_known > cutoff_s:
            continue
        forward[new], backward[new] = new_forward, new_backward
        reduce[new] = reduce_s + (weight_sum[stop] - weight_sum[start]) * reduce_s_per_byte
        hop_s = transfer_s + output_bytes[stop] * transfer_s_per_byte
        forward[hop], backward[hop], reduce[hop] = hop_s, hop_s, 0.0
        forward[rest] = rest_forward_sum[layers] - rest_forward_sum[stop]
        backward[rest] = rest_backward_sum[layers] - rest_backward_sum[stop]
        rest_bytes = weight_sum[layers] - weight_sum[stop]
        reduce[rest] = rest_reduce_s + rest_bytes * rest_reduce_s_per_byte
        one_stage_s = latency(forward, backward, reduce, rest + 1, micro_batches)
        if one_stage_s < best:
            best, best_stop = one_stage_s, stop
        # All pipelines of a state have the same rest. Its own latency is therefore left out, and it
        # counts only where it is the slowest.
        steady_s = rounds * max(slowest, 2 * hop_s, even_share)
        ending = max(prefix_ending, reduce[new])
        divided_s = steady_s + prefix_forward + new_forward + ending + new_backward + 2 * hop_s
        insert(values, origins, stop, 0, one_stage_s, origin)
        insert(values, origins, stop, 1, divided_s, origin)
    return best, best_stop
