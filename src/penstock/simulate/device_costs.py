"""Costs on unequal devices: an op takes the seconds of the device on which it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.profile.profile import Phase, Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.stage_seconds import stage_seconds, update_seconds


def on_devices(
    costs: Costs,
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    micro_batch: float,
) -> Costs:
    """Return `costs` with the seconds of the stages' own devices.

    Unchanged if all ranks have the same profile. Replicas of a stage may be on different devices;
    then its seconds differ by micro-batch. They update together, so the slowest replica's update
    counts.

    Args:
        costs: of the stages.
        schedule: its placement defines the rank of every micro-batch of a stage.
        profiles: per rank of the schedule; equal ranks share one object.
        lengths: layers in every stage.
        micro_batch: samples in the mean micro-batch.
    """
    # By identity: to compare profiles would be to compare all their layers.
    kinds = [id(profile) for profile in profiles]
    if len(set(kinds)) == 1:
        return costs
    profile_of_kind = dict(zip(kinds, profiles, strict=True))
    seconds_of_kind = {
        kind: stage_seconds(profile, lengths, micro_batch)
        for kind, profile in profile_of_kind.items()
    }

    def seconds(phase: Phase) -> list[float | list[float]]:
        """Return the seconds of a phase per stage; per micro-batch where replicas differ."""
        rows: list[float | list[float]] = []
        for stage, ranks in enumerate(schedule.ranks_of_stage):
            if len({kinds[rank] for rank in ranks}) == 1:
                rows.append(seconds_of_kind[kinds[ranks[0]]][phase][stage])
                continue
            kind_of = [kinds[schedule.placement[stage, m]] for m in range(schedule.slices)]
            rows.append([seconds_of_kind[kind][phase][stage] for kind in kind_of])
        return rows

    updates = {kind: update_seconds(profile, lengths) for kind, profile in profile_of_kind.items()}
    update = []
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        update.append(max(updates[kinds[rank]][stage] for rank in ranks))
    return replace(
        costs,
        update=update,
        forward=seconds("forward"),
        backward=seconds("backward"),
        input_grad=seconds("input_grad"),
        weight_grad=seconds("weight_grad"),
    )
