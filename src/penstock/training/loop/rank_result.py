"""The result of one rank of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.event import Timeline
from penstock.profile.conditions import RankConditions


@dataclass
class RankResult:
    """Result of a rank. All but `peak_rss_bytes`, `peak_allocated_bytes` and `conditions` is the
    same on every rank.

    Attributes:
        steps, loss: number of the last step; its loss.
        test_loss, test_accuracy: after the last epoch; the accuracy is None for targets that are
            no classes.
        step_s: the median step of the last epoch, without its first step; of an asynchronous plan,
            the mean time per batch while the pipeline was full.
        timeline: of the median of the recorded steps of the last epoch with a full batch; of an
            asynchronous plan, of the last batches.
        timeline_step_s: seconds of the step of that timeline, from call to loss; None of an
            asynchronous plan.
        busy: per rank, the share of that time in which it worked.
        weight_versions: per stage, the most versions of the weights that were stored.
        peak_rss_bytes: of this process.
        peak_allocated_bytes: the most that torch's allocator had allocated on a card in training;
            None on the CPU.
        seconds: of the whole training.
        step_times: seconds of each step of the last epoch.
        stopped: whether training ended before its last step, because of a signal or a request for
            another number of ranks.
        conditions: that this process saw in the steps of the last epoch.
    """

    steps: int = 0
    loss: float = float("nan")
    test_loss: float = float("nan")
    test_accuracy: float | None = None
    step_s: float = 0.0
    timeline: Timeline | None = None
    timeline_step_s: float | None = None
    busy: list[float] = field(default_factory=list)
    weight_versions: tuple[int, ...] = ()
    peak_rss_bytes: int = 0
    peak_allocated_bytes: int | None = None
    seconds: float = 0.0
    step_times: list[float] = field(default_factory=list)
    stopped: bool = False
    conditions: RankConditions | None = None
