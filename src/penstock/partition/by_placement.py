"""Cuts for ranks that have several stages, from a profile."""

from __future__ import annotations

from penstock.errors import PartitionError
from penstock.partition.by_time import samples_of
from penstock.partition.catalogue import register
from penstock.partition.looped import folded, looped
from penstock.profile.profile import Profile


@register(
    "looped",
    source="Penstock; for the placement of Narayanan et al. 2021, Megatron-LM, section 2.2",
)
def by_loop(
    profile: Profile,
    stages: int,
    ranks: int | None = None,
    micro_batch: float | None = None,
    slack: float = 0.0,
) -> list[int]:
    """Stage lengths that `looped` finds for the layers' forward and backward seconds: stage s is on
    rank s mod `ranks`.

    Options:
        ranks: how many there are, a divisor of the number of stages; None is one for each stage.
        micro_batch: samples; None is the largest size that was measured.
        slack: by how much, relatively, the busiest rank may be above the least, for the sake of
        even stages.

    Raises:
        PartitionError: the stages cannot be dealt out evenly, or an option is out of its range.
    """
    count = stages if ranks is None else ranks
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or stages % count:
        raise PartitionError(
            f"looped deals {stages} stages out to ranks in turn, the same number to each, not to {ranks!r} ranks"
        )
    found = looped(
        profile.step_seconds(samples_of(profile, micro_batch)), count, stages // count, slack=slack
    )
    assert found is not None
    return found


@register(
    "folded",
    source="Penstock; for the placement of Qi et al. 2024, ZB-V and controllable memory (V)",
)
def by_fold(
    profile: Profile, stages: int, micro_batch: float | None = None, slack: float = 0.0
) -> list[int]:
    """Stage lengths that `folded` finds for the layers' forward and backward seconds: the first
    rank has the first and last stage.

    Options:
        micro_batch: samples; None is the largest size that was measured.
        slack: by how much, relatively, the busiest rank may be above the least, for the sake of
        even stages.

    Raises:
        PartitionError: the number of stages is odd, or an option is out of its range.
    """
    if stages % 2:
        raise PartitionError(
            f"folded gives every rank two stages, and {stages} is odd: ask for {stages + 1}, or one less"
        )
    found = folded(profile.step_seconds(samples_of(profile, micro_batch)), stages // 2, slack=slack)
    assert found is not None
    return found
