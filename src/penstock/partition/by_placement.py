"""Partitioning for ranks that hold several stages, from a profile."""

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
    """Balance ranks of the looped placement (stage s on rank s mod `ranks`) with `looped`.

    The costs are the layers' forward and backward seconds.

    Options:
        ranks: number of ranks, a divisor of the number of stages; None is one rank per stage.
        micro_batch: samples; None is the largest size that was measured.
        slack: relative amount by which the busiest rank may exceed the optimum, to get more even
            stages.

    Raises:
        PartitionError: `ranks` does not divide the number of stages, or an option is out of range.
    """
    count = stages if ranks is None else ranks
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or stages % count:
        raise PartitionError(
            f"looped places the same number of stages on every rank, and {stages} stages "
            f"cannot be divided over {ranks!r} ranks; ask for a multiple of the number of ranks"
        )
    seconds = profile.step_seconds(samples_of(profile, micro_batch))
    lengths = looped(seconds, count, stages // count, slack=slack)
    assert lengths is not None  # without memory limits a cut always exists
    return lengths


@register(
    "folded",
    source="Penstock; for the placement of Qi et al. 2024, ZB-V and controllable memory (V)",
)
def by_fold(
    profile: Profile, stages: int, micro_batch: float | None = None, slack: float = 0.0
) -> list[int]:
    """Balance ranks of the V placement (first and last stage on the first rank) with `folded`.

    The costs are the layers' forward and backward seconds.

    Options:
        micro_batch: samples; None is the largest size that was measured.
        slack: relative amount by which the busiest rank may exceed the optimum, to get more even
            stages.

    Raises:
        PartitionError: the number of stages is odd, or an option is out of range.
    """
    if stages % 2:
        even = f"{stages + 1} or {stages - 1}" if stages > 1 else "2"
        raise PartitionError(
            f"folded gives every rank two stages, and {stages} stages is an odd number: "
            f"ask for {even}"
        )
    seconds = profile.step_seconds(samples_of(profile, micro_batch))
    lengths = folded(seconds, stages // 2, slack=slack)
    assert lengths is not None  # without memory limits a cut always exists
    return lengths
