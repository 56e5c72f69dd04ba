"""Describe a plan as identical data-parallel pipelines, the model that other libraries share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import final

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.torch_csv.actions import unsupported_reason


@final
@dataclass(frozen=True)
class Pipelines:
    """Identical data-parallel pipelines.

    Attributes:
        count: number of pipelines.
        ranks: per pipeline its ranks in the plan, in the order of the ranks of `schedule`.
        schedule: of one pipeline, with micro-batches numbered from 0.
    """

    count: int
    ranks: tuple[tuple[int, ...], ...]
    schedule: Schedule

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank of one pipeline."""
        return self.schedule.stages_of_rank

    @property
    def linear(self) -> bool:
        """Whether rank r has stage r alone."""
        return all(stages == (rank,) for rank, stages in enumerate(self.placement))

    @property
    def loop(self) -> bool:
        """Whether stage s is on rank s mod p, with equally many stages on all p ranks."""
        width = len(self.placement)
        return self.schedule.stages % width == 0 and all(
            stages == tuple(range(rank, self.schedule.stages, width))
            for rank, stages in enumerate(self.placement)
        )

    @property
    def vee(self) -> bool:
        """Whether rank r of p has stages r and 2p - 1 - r."""
        width = len(self.placement)
        return all(
            stages == (rank, 2 * width - 1 - rank) for rank, stages in enumerate(self.placement)
        )


def pipelines_of(plan: Plan) -> Pipelines | None:
    """Split a plan into identical pipelines.

    Returns:
        The pipelines; None if single stages have replicas, pipelines run in both directions, the
        schedule is asynchronous, or pipelines have different numbers of micro-batches.
    """
    schedule = plan.schedule
    count = len(schedule.ranks_of_stage[0])
    has_uneven_replicas = any(len(ranks) != count for ranks in schedule.ranks_of_stage)
    if schedule.stream is not None or has_uneven_replicas:
        return None
    # Other libraries have no idle ranks: they get the programs of those that have a stage.
    if count == 1:
        used_ranks = tuple(rank for rank, stages in enumerate(schedule.stages_of_rank) if stages)
        programs = tuple(schedule.programs[rank] for rank in used_ranks)
        return Pipelines(1, (used_ranks,), replace(schedule, programs=programs))
    pipeline_ranks = []
    for replica in range(count):
        ranks = {stage_ranks[replica] for stage_ranks in schedule.ranks_of_stage}
        pipeline_ranks.append(tuple(sorted(ranks)))
    if sum(map(len, pipeline_ranks)) != len(set().union(*pipeline_ranks)):
        return None  # pipelines share ranks, as in both directions
    schedules = [_schedule_of_ranks(schedule, ranks) for ranks in pipeline_ranks]
    first = schedules[0]
    if first is None or any(other != first for other in schedules):
        return None
    return Pipelines(count, tuple(pipeline_ranks), first)


def _schedule_of_ranks(schedule: Schedule, ranks: tuple[int, ...]) -> Schedule | None:
    """Extract the schedule of some ranks, with micro-batches numbered from 0; None if their stages
    have different micro-batches.
    """
    micro_batches = _common_micro_batches(schedule, ranks)
    if micro_batches is None:
        return None
    new_numbers = {number: index for index, number in enumerate(sorted(micro_batches))}
    programs = []
    ops: set[Op] = set()
    for rank in ranks:
        ops.update(schedule.programs[rank])
        programs.append(tuple(_renumber(op, new_numbers) for op in schedule.programs[rank]))
    pairs = [
        (_renumber(first, new_numbers), _renumber(second, new_numbers))
        for first, second in schedule.pairs
        if first in ops and second in ops
    ]
    slicing = schedule.slicing
    if slicing is not None:
        whole = dict.fromkeys(slicing.micro_batch_of[number] for number in new_numbers)
        slicing = Slicing(slicing.along, tuple(slicing.shares[number] for number in whole))
    return replace(schedule, programs=tuple(programs), pairs=frozenset(pairs), slicing=slicing)


def _common_micro_batches(schedule: Schedule, ranks: tuple[int, ...]) -> set[int] | None:
    """Return the micro-batches of these ranks; None if their stages have different ones."""
    micro_batches: dict[int, set[int]] = {}
    for rank in ranks:
        for stage in schedule.stages_of_rank[rank]:
            micro_batches.setdefault(stage, set())
        for op in schedule.programs[rank]:
            if op.kind is Kind.F:
                micro_batches[op.stage].add(op.micro_batch)
    first, *others = micro_batches.values()
    return first if all(other == first for other in others) else None


def _renumber(op: Op, new_numbers: dict[int, int]) -> Op:
    """Replace the micro-batch of an op; an update has none."""
    return op if op.kind is Kind.U else op._replace(micro_batch=new_numbers[op.micro_batch])


def why_not_pipelines(plan: Plan) -> str:
    """Explain why `pipelines_of` returns None for a plan."""
    schedule = plan.schedule
    if schedule.stream is not None:
        return (
            f"{plan.schedule_name} is asynchronous, but the library has no weight versions and "
            "ends every batch with a flush"
        )
    replicas = [len(ranks) for ranks in schedule.ranks_of_stage]
    if len(set(replicas)) > 1:
        return (
            f"its stages have {', '.join(map(str, replicas))} ranks, but the library replicates "
            "whole pipelines, not single stages"
        )
    return (
        f"{plan.schedule_name} has {replicas[0]} replicas of every stage that are not identical "
        "pipelines, the only replicas that the library supports"
    )


def refuse(library: str, reasons: list[str]) -> None:
    """Raise PlanError if there are reasons why the library cannot run a plan.

    Raises:
        PlanError: there are; the message lists all of them.
    """
    if reasons:
        raise PlanError("\n  ".join([f"{library} cannot run this plan", *reasons]))


def require_pipelines(
    library: str,
    plan: Plan,
    plan_reasons: list[str],
    placement_reasons: Callable[[Plan, Pipelines], list[str]] | None = None,
) -> Pipelines:
    """Return the identical pipelines of a plan that a library can run.

    Args:
        library: its name in the message.
        plan: to export.
        plan_reasons: why the library cannot run the plan, however its ranks are divided.
        placement_reasons: returns why it cannot run the plan's pipelines; by default it runs all.

    Raises:
        PlanError: the plan is not identical pipelines, or there are reasons; the message lists all.
    """
    pipelines = pipelines_of(plan)
    if pipelines is None:
        reasons = [why_not_pipelines(plan)]
    else:
        reasons = [] if placement_reasons is None else placement_reasons(plan, pipelines)
    refuse(library, reasons + plan_reasons)
    assert pipelines is not None
    return pipelines


def not_in_loop(plan: Plan, pipelines: Pipelines, library: str) -> str:
    """Write the reason why a library that assigns stages to ranks in turn cannot place these."""
    placement = ", ".join(map(str, pipelines.placement))
    return (
        f"{plan.schedule_name} has stages {placement} on its ranks, "
        f"but {library} has stage k on rank k mod {len(pipelines.placement)}"
    )


def csv_reasons(plan: Plan, pipelines: Pipelines) -> list[str]:
    """Return the reason why torch's CSV cannot express the schedule, if there is one."""
    del plan
    reason = unsupported_reason(pipelines.schedule)
    return [] if reason is None else [reason]


def stage_names(plan: Plan) -> list[list[str]]:
    """Return the names of the layers of each stage."""
    return [list(plan.layer_names[start:end]) for start, end in plan.bounds]


def uneven_batch_reasons(plan: Plan) -> list[str]:
    """Return the reason why a library with micro-batches of one size cannot run a plan, if there is
    one.
    """
    smaller, remainder = divmod(plan.batch, plan.micro_batches)
    if remainder == 0:
        return []
    return [
        (
            f"a batch of {plan.batch} in {plan.micro_batches} micro-batches has some of {smaller} "
            f"and some of {smaller + 1} samples, but the library needs equal sizes"
        )
    ]


def unsupported_notes(plan: Plan, schedule_name: str, library_name: str) -> list[str]:
    """Return notes on what the export cannot express: another schedule, and the devices.

    Args:
        plan: to export.
        schedule_name: Penstock's name of the only schedule that the library runs.
        library_name: the library's name of it.
    """
    notes = []
    if plan.schedule_name != schedule_name or plan.slicing is not None:
        notes.append(
            f"the schedule: the library runs {library_name} instead of this plan's "
            f"{plan.schedule_name}, so time and memory differ from the prediction"
        )
    return notes + device_notes(plan)


def device_notes(plan: Plan) -> list[str]:
    """Return a note on the ranks' devices, unless rank r is on device r."""
    if not plan.devices or plan.devices == tuple(range(plan.ranks)):
        return []
    return [f"the devices: rank r belongs on device {compact_list(plan.devices)} of {plan.cluster}"]


def segment_lengths(plan: Plan) -> list[list[tuple[int, int]]]:
    """Return the recomputed segments of each stage, each as its first layer and the layer after its
    last one, counted from the stage's first layer.
    """
    stages = []
    for first, end in plan.bounds:
        segments = plan.selection.of_stage(first, end)
        stages.append([(start - first, stop - first) for start, stop in segments])
    return stages


def selective_layers(plan: Plan) -> str:
    """Write the recomputed layers, one word per segment: `3-5 6-8 11`."""
    words = []
    for first, end in plan.bounds:
        for start, stop in plan.selection.of_stage(first, end):
            words.append(str(start) if stop == start + 1 else f"{start}-{stop - 1}")
    return " ".join(words) or "none"


def compact_list(numbers: tuple[int, ...]) -> str:
    """Write a list of numbers, with runs of more than three as `0-7`."""
    words = []
    # In a run of consecutive numbers, number - index is constant.
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        if len(members) > 3:
            words.append(f"{members[0]}-{members[-1]}")
        else:
            words += map(str, members)
    return f"[{', '.join(words)}]"
