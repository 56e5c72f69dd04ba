"""AutoPipe's model of 1F1B: the critical path through its steady phase and its cool-down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

#: Relative difference of times that counts as equal: the rounding of sums in another order.
ROUNDING = 1e-9


@final
@dataclass(frozen=True)
class Path:
    """A step's seconds by AutoPipe's formula, and its critical stage."""

    step_s: float
    critical: int


def critical_path(
    forward: Sequence[float], backward: Sequence[float], transfer_s: float = 0.0
) -> Path:
    """Return the time of 1F1B for m = 2p micro-batches on p stages.

    F[i][k] and B[i][k] are the starts of stage i's k-th forward and backward of the steady phase,
    which are those of micro-batches p - 1 - i + k and k.

        F[i][0] = never a bound                          the start-up is the path of one
                                                         micro-batch to the last stage
        B[i][0] = all forwards + backwards behind i      (a transfer with each)
        F[i][k] = max(F[i-1][k-1] + f[i-1], B[i][k-1] + b[i])      + transfer, if i > 0
        B[i][k] = max(B[i+1][k] + b[i+1], F[i][k] + f[i])          + transfer, if i < p - 1
                                                                   k = 1 … m - p + i

    The critical stage is the last one whose own chain determines all of its maxima: it never waits.
    The cool-down starts there; D[r][c] is the start of the c-th backward from the end on the r-th
    stage from the critical one:

        D[r][c] = max(D[r][c+1] + b, D[r+1][c] + b of the next stage) + transfer,
                  and for r > 0 not before D[r-1][c+1]
        step    = D[0][0] + backwards of the stages up to the critical one (a transfer with each)

    Stages before the critical one are assumed to pass the last gradient on at once, and those
    behind it to have started in time: for a pipeline whose slowest stage is in the middle the
    result is a little less than what the program takes.

    >>> critical_path([1, 1, 1, 1], [2, 2, 2, 2])
    Path(step_s=33.0, critical=3)

    Args:
        forward, backward: seconds of every stage.
        transfer_s: seconds of every hop; the repository of its authors has 0.

    Source: Liu et al. 2022, AutoPipe, section 3.2; github.com/HPDL-Group/Merak, autopipe.cpp.
    docs/literature/autopipe.md.
    """
    stages = len(forward)
    starts, waits = _steady(forward, backward, transfer_s)
    critical = max((i for i in range(stages) if not waits[i]), default=_slowest(forward, backward))
    last = _cool_down(starts, backward, critical, transfer_s)
    return Path(last + sum(backward[: critical + 1]) + critical * transfer_s, critical)


def _steady(
    forward: Sequence[float], backward: Sequence[float], transfer_s: float
) -> tuple[list[float], list[bool]]:
    """Return the start of every stage's last backward of the steady phase, and whether it ever
    waited for another stage.
    """
    stages = len(forward)
    last = stages - 1
    fill = sum(forward) + last * transfer_s
    forward_start = [float("-inf")] * stages
    backward_start = []
    for stage in range(stages):
        back_to_stage = sum(backward[stage + 1 :]) + (last - stage) * transfer_s
        backward_start.append(fill + back_to_stage)
    waits = [False] * stages
    tolerance = ROUNDING * (sum(forward) + sum(backward)) * stages
    for k in range(1, 2 * stages):
        first = max(0, k - stages)  # stages with fewer rounds are in their cool-down
        # From the last stage to the first: F[i-1] is still that of round k - 1, and B[i+1] is
        # already that of round k.
        for stage in range(last, first - 1, -1):
            idle = backward_start[stage] + backward[stage]
            if stage == 0:
                forward_start[stage] = idle
            else:
                arrival = forward_start[stage - 1] + forward[stage - 1]
                waits[stage] |= arrival > idle + tolerance
                forward_start[stage] = max(arrival, idle) + transfer_s
            idle = forward_start[stage] + forward[stage]
            if stage == last:
                backward_start[stage] = idle
            else:
                arrival = backward_start[stage + 1] + backward[stage + 1]
                waits[stage] |= arrival > idle + tolerance
                backward_start[stage] = max(arrival, idle) + transfer_s
    return backward_start, waits


def _cool_down(
    starts: Sequence[float], backward: Sequence[float], critical: int, transfer_s: float
) -> float:
    """Return D[0][0], the start of the critical stage's last backward."""
    rows = len(backward) - critical
    start = {(row, rows - 1 - row): starts[critical + row] for row in range(rows)}
    for column in range(rows - 2, -1, -1):
        for row in range(rows - 2 - column, -1, -1):
            after_same = start[row, column + 1] + backward[critical + row]
            after_next = start[row + 1, column] + backward[critical + row + 1]
            begin = max(after_same, after_next) + transfer_s
            start[row, column] = max(begin, start[row - 1, column + 1]) if row else begin
    return start[0, 0]


def _slowest(forward: Sequence[float], backward: Sequence[float]) -> int:
    """Return the last of the stages that take longest."""
    return max(range(len(forward)), key=lambda i: (forward[i] + backward[i], i))
