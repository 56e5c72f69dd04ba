"""Costs where ranks are not alike: what an op takes is what the device takes that it stands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.profile.profile import Phase, Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.stage_seconds import PHASES, stage_seconds, update_seconds

__all__ = ["PHASES", "on_devices"]


def on_devices(
    costs: Costs,
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    micro_batch: float,
) -> Costs:
    """`costs` with the seconds that the stages' own devices take; unchanged where all ranks have
    one profile.

    Copies of a stage may stand on different devices: then its seconds are given by micro-batch.
    They update together, so the slowest copy's update counts.

    Args:
        costs: of the stages.
        schedule: says which rank has which micro-batch of a stage.
        profiles: per rank of the schedule; ranks alike share one object.
        lengths: layers in every stage.
        micro_batch: samples in the mean micro-batch.
    """
    if len({id(each) for each in profiles}) == 1:
        return costs
    unlike = {id(each): each for each in profiles}
    of_device = {key: stage_seconds(each, lengths, micro_batch) for key, each in unlike.items()}
    kinds = [id(each) for each in profiles]

    def seconds(phase: Phase) -> list[float | list[float]]:
        rows: list[float | list[float]] = []
        for stage, ranks in enumerate(schedule.ranks_of_stage):
            of_kind = {
                kind: of_device[kind][phase][stage] for kind in {kinds[rank] for rank in ranks}
            }
            if len(of_kind) == 1:
                rows += of_kind.values()
            else:
                rows.append(
                    [of_kind[kinds[schedule.placement[stage, m]]] for m in range(schedule.slices)]
                )
        return rows

    updates = {key: update_seconds(each, lengths) for key, each in unlike.items()}
    update = [
        max(updates[kinds[rank]][stage] for rank in ranks)
        for stage, ranks in enumerate(schedule.ranks_of_stage)
    ]
    return replace(
        costs,
        update=update,
        forward=seconds("forward"),
        backward=seconds("backward"),
        input_grad=seconds("input_grad"),
        weight_grad=seconds("weight_grad"),
    )
