"""DAPPLE's latency of a pipeline, with its parts, as the paper writes it: the reference for the
kernel. Its times are those of warm-up, steady phase and ending, seen from the pivot stage.

        | warm up         | steady                       | ending
    Q   |       F0  ...   | F1 B0 F2 B1 ...              | B, and all after it

The pivot Q is the stage that has the fewest bubbles. Transfers count as stages between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Latency:
    """Seconds of the three phases of a step, and the pivot; `pivot` counts transfers as stages."""

    pivot: int
    warm_up_s: float
    steady_s: float
    ending_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.warm_up_s + self.steady_s + self.ending_s


def latency(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    all_reduce_s: Sequence[float],
    micro_batches: int,
) -> Latency:
    """Return the latency of a step.

        T_w = F_0 + ... + F_Q
        T_s = (M - 1)(F_Q + B_Q)
        T_e = maximum over all stages s of AR_s + (B_s + ... + B_Q)    for s <= Q
                                           AR_s - (B_Q + ... + B_s)    for s > Q

    >>> latency((1, 1), (2, 2), (0, 0), 4).seconds
    15

    Args:
        forward_s, backward_s: seconds of a micro-batch on every stage; a transfer is a stage, its
            forward that of the activation, its backward that of the gradient.
        all_reduce_s: seconds of the all-reduce of the stage's gradients; 0 for a transfer.
        micro_batches: M.

    Source: Fan et al. 2021, DAPPLE (arXiv 2007.01045), section 4.
    """
    steady = [(micro_batches - 1) * (f + b) for f, b in zip(forward_s, backward_s, strict=True)]
    pivot = len(steady) - 1
    for s in reversed(range(len(steady) - 1)):
        between = sum(forward_s[a] + backward_s[a] for a in range(s + 1, pivot))
        if steady[s] > steady[pivot] + between:
            pivot = s
    ending = -float("inf")
    for s, reduce_s in enumerate(all_reduce_s):
        if s <= pivot:
            ending = max(ending, reduce_s + sum(backward_s[s : pivot + 1]))
        else:
            ending = max(ending, reduce_s - sum(backward_s[pivot : s + 1]))
    return Latency(pivot, sum(forward_s[: pivot + 1]), steady[pivot], ending)
