"""Costs of micro-batches that are cut into slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.profile.profile import Phase, Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.stage_seconds import stage_seconds


def slice_costs(
    costs: Costs,
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    micro_batch: float,
) -> Costs:
    """Return `costs` with the measured seconds of slices on their devices.

    The fixed cost of a call does not shrink with its micro-batch. Slices of one micro-batch are
    assumed to be equally long, and to be on one rank. Unchanged if micro-batches are whole.
    """
    slicing = schedule.slicing
    if slicing is None:
        return costs
    slice_counts = [len(shares) for shares in slicing.shares]
    seconds_of: dict[tuple[int, int], dict[Phase, list[float]]] = {}
    for profile in profiles:
        for count in slice_counts:
            if (id(profile), count) not in seconds_of:
                seconds = stage_seconds(profile, lengths, micro_batch / count)
                seconds_of[id(profile), count] = seconds

    def phase_seconds(phase: Phase) -> list[list[float]]:
        """Return the seconds of a phase per stage and micro-batch: of all its slices together."""
        rows = []
        for stage in range(len(lengths)):
            row = []
            for count, first in zip(slice_counts, slicing.first_of, strict=True):
                profile = profiles[schedule.placement[stage, first]]
                row.append(count * seconds_of[id(profile), count][phase][stage])
            rows.append(row)
        return rows

    return replace(
        costs,
        forward=phase_seconds("forward"),
        backward=phase_seconds("backward"),
        input_grad=phase_seconds("input_grad"),
        weight_grad=phase_seconds("weight_grad"),
    )
