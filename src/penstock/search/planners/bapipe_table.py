"""BaPipe's formulas for its four schedules: time of a batch, memory for features and weights, and
the bandwidth that they need.

    schedule  | seconds of a batch                          | features,     | weights | bandwidth
              |                                             | stage i of N  |         |
    1F1B-AS   | (M+N-1)(F+B)                                | (N-i+1) a     | 2w      | a/F, a/B
    FBP-AS    | (M+N-1)(F+B)                                | 2(N-i+1) a    | 2w      | 2a/(F+B), both ways
    1F1B-SNO  | (M+N-1)(F+B) + (M+N-2-ceil((M-1)/N)) 2SR    | (N-i+1) a     | 2w      | -
    1F1B-SO   | (M+N-1)(F+B) + (N-1) 2SR                    | 2(N-i+1) a    | 2w      | -

Stages i = 1..N are alike; M micro-batches; F and B seconds of a micro-batch in one stage, SR of one
transfer, a bytes of a micro-batch's features at a boundary, w bytes of a stage's weights. A kind of
device is asynchronous (AS, an FPGA) if it computes and transfers at the same time at a fine grain,
so that transfers cost no time as long as the link has the needed bandwidth; synchronous ones (S, a
GPU) either wait for every transfer (SNO) or hide them behind twice the warm-up (SO).

Source: Zhao et al. 2020, BaPipe, as docs/literature/bapipe.md has it. 1F1B-SO holds while 2 SR <= F
+ B, above which the link is the bottleneck. FBP-AS at the grain of a micro-batch would take
(M+2N-1)(F+B); the formula is that of the paper, which streams inside a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final


@final
@dataclass(frozen=True)
class Stages:
    """N equal stages and a batch of M micro-batches. Seconds and bytes are those of one micro-batch
    in one stage.
    """

    count: int
    micro_batches: int
    forward_s: float
    backward_s: float
    transfer_s: float = 0.0
    feature_bytes: float = 0.0
    weight_bytes: float = 0.0

    @property
    def compute_s(self) -> float:
        """(M+N-1)(F+B): seconds of a batch if transfers cost nothing."""
        return (self.micro_batches + self.count - 1) * (self.forward_s + self.backward_s)


@final
@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        seconds: seconds of a batch.
        feature_bytes: bytes of features per stage, first to last.
        weight_bytes: bytes of weights and gradients of every stage.
        demand_bytes_per_s: bandwidth that a link needs for features and for their gradients, if
            transfers overlap compute; else 0.
    """

    seconds: float
    feature_bytes: tuple[float, ...]
    weight_bytes: float
    demand_bytes_per_s: tuple[float, float] = (0.0, 0.0)


def one_f_one_b_as(stages: Stages) -> Row:
    """Return the row of 1F1B on devices that compute and transfer at the same time."""
    demand = (stages.feature_bytes / stages.forward_s, stages.feature_bytes / stages.backward_s)
    return Row(stages.compute_s, _features(stages, 1), 2 * stages.weight_bytes, demand)


def fbp_as(stages: Stages) -> Row:
    """Return the row of FBP, which runs forward and backward of two micro-batches at the same time,
    each on its share of the compute units, so that traffic is even.
    """
    demand = 2 * stages.feature_bytes / (stages.forward_s + stages.backward_s)
    return Row(stages.compute_s, _features(stages, 2), 2 * stages.weight_bytes, (demand, demand))


def one_f_one_b_sno(stages: Stages) -> Row:
    """Return the row of 1F1B that waits for transfers: all but one micro-batch in N pay for one
    each way.
    """
    micro_batches, count = stages.micro_batches, stages.count
    waits = 0 if count == 1 else micro_batches + count - 2 - -(-(micro_batches - 1) // count)
    return Row(
        stages.compute_s + waits * 2 * stages.transfer_s,
        _features(stages, 1),
        2 * stages.weight_bytes,
    )


def one_f_one_b_so(stages: Stages) -> Row:
    """Return the row of 1F1B with twice the warm-up, which hides transfers but while filling and
    draining.
    """
    waits = stages.count - 1
    return Row(
        stages.compute_s + waits * 2 * stages.transfer_s,
        _features(stages, 2),
        2 * stages.weight_bytes,
    )


#: Schedules by the device's kind, in the paper's order: asynchronous ones, and synchronous ones.
AS: Final[dict[str, Callable[[Stages], Row]]] = {"1F1B-AS": one_f_one_b_as, "FBP-AS": fbp_as}
S: Final[dict[str, Callable[[Stages], Row]]] = {
    "1F1B-SNO": one_f_one_b_sno,
    "1F1B-SO": one_f_one_b_so,
}


def _features(stages: Stages, times: int) -> tuple[float, ...]:
    """Return the bytes of features per stage: `times` those of 1F1B."""
    return tuple(
        times * (stages.count - stage) * stages.feature_bytes for stage in range(stages.count)
    )
