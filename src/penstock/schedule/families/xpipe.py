"""XPipe: 1F1B without a flush, whose weights are predicted once per batch."""

from __future__ import annotations

from penstock.schedule.catalogue import register
from penstock.schedule.families.pipedream import enough_batches, streamed
from penstock.schedule.op import Schedule
from penstock.schedule.streaming.streams import Stream


@register(
    "xpipe",
    synchronous=False,
    stages_per_rank="1",
    splits_backward=False,
    weights="xpipe",
    source="Guan et al. 2019, XPipe (arXiv 1911.04610)",
)
def xpipe(stages: int, micro_batches: int, batches: int | None = None) -> Schedule:
    """Run the order of `pipedream`, with weights that are predicted once per batch.

    Micro-batches of several batches are in flight at a time. The first micro-batch of every batch,
    its bellwether, predicts the weights for all of them; one version is kept.

    Facts for equal costs f and b and free links, p stages, m micro-batches:
        per batch           m(f + b): no bubble in the steady state
        in flight           p - s micro-batches on stage s
        versions            1, and the predicted weights (rule `xpipe`)

    >>> print(xpipe(2, 2, batches=2))
    rank 0 | 0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U2
    rank 1 | 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U2

    Args:
        stages: number of stages.
        micro_batches: micro-batches per batch.
        batches: number of batches in the programs; by default enough to show how they repeat.

    Raises:
        ScheduleError: `batches` is below 1.
    """
    if batches is None:
        batches = enough_batches(stages, micro_batches)
    return streamed("xpipe", micro_batches, range(stages, 0, -1), Stream(batches, "xpipe"))
