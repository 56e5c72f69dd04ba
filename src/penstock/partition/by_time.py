"""torchgpipe's balance by measured time."""

from __future__ import annotations

from penstock.partition.block import block_partition
from penstock.partition.catalogue import register
from penstock.partition.validation import check_number
from penstock.profile.profile import Profile


def samples_of(profile: Profile, micro_batch: float | None) -> float:
    """Return the size of a micro-batch in samples; None means the largest size that was measured.

    Raises:
        PartitionError: `micro_batch` is not a number above 0.
    """
    if micro_batch is None:
        micro_batch = max(profile.sizes, default=1)
    return check_number("micro_batch", micro_batch)


@register("time", source="Kim et al. 2020, torchgpipe, balance_by_time")
def by_time(profile: Profile, stages: int, micro_batch: float | None = None) -> list[int]:
    """Balance the layers' forward and backward seconds with `block_partition`.

    Options:
        micro_batch: samples; None is the largest size that was measured.

    Raises:
        PartitionError: `micro_batch` is not a number above 0.
    """
    return block_partition(profile.step_seconds(samples_of(profile, micro_batch)), stages)
