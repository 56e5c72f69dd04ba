"""What a plan is in the words that other libraries share: equal pipelines side by side, each of
ranks that hold stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import final

from penstock.errors import PlanError
from penstock.plan.plan import Plan
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.slicing import Slicing


@final
@dataclass(frozen=True)
class Pipelines:
    """`count` times one pipeline; `ranks[j]` are those of the j-th, in the order of the ranks of
    `schedule`, which is one's own.

    Its micro-batches are numbered from 0, whatever their numbers in the plan.
    """

    count: int
    ranks: tuple[tuple[int, ...], ...]
    schedule: Schedule

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank of one pipeline."""
        return self.schedule.stages_of_rank

    @property
    def linear(self) -> bool:
        """Stage s alone on rank s."""
        return all(stages == (rank,) for rank, stages in enumerate(self.placement))

    @property
    def loop(self) -> bool:
        """Stage s on rank s mod ranks, on every rank equally many."""
        width = len(self.placement)
        return self.schedule.stages % width == 0 and all(
            stages == tuple(range(rank, self.schedule.stages, width))
            for rank, stages in enumerate(self.placement)
        )

    @property
    def vee(self) -> bool:
        """Rank r of p has stages r and 2p - 1 - r."""
        width = len(self.placement)
        return all(
            stages == (rank, 2 * width - 1 - rank) for rank, stages in enumerate(self.placement)
        )


def pipelines_of(plan: Plan) -> Pipelines | None:
    """The plan as equal pipelines; None if it is not that: stages with copies of their own,
    pipelines in both directions, a stream, or pipelines of different numbers of micro-batches.
    """
    made = plan.schedule
    count = len(made.ranks_of_stage[0])
    if made.stream is not None or any(len(ranks) != count for ranks in made.ranks_of_stage):
        return None
    if count == 1:
        used = tuple(rank for rank, stages in enumerate(made.stages_of_rank) if stages)
        return Pipelines(
            1, (used,), replace(made, programs=tuple(made.programs[rank] for rank in used))
        )
    ranks = [tuple(sorted({of_stage[j] for of_stage in made.ranks_of_stage})) for j in range(count)]
    if sum(map(len, ranks)) != len(set().union(*ranks)):
        return None
    found = [_alone(made, own) for own in ranks]
    if found[0] is None or any(each != found[0] for each in found):
        return None
    return Pipelines(count, tuple(ranks), found[0])


def _alone(made: Schedule, ranks: tuple[int, ...]) -> Schedule | None:
    """What these ranks do, with numbers from 0; None if its stages have different micro-batches."""
    carried = [
        {op.micro_batch for op in made.programs[rank] if op.kind is Kind.F and op.stage == stage}
        for rank in ranks
        for stage in made.stages_of_rank[rank]
    ]
    if any(each != carried[0] for each in carried):
        return None
    numbers = {number: new for new, number in enumerate(sorted(carried[0]))}
    slicing = made.slicing
    if slicing is not None:
        own = dict.fromkeys(slicing.micro_batch_of[number] for number in numbers)
        slicing = Slicing(slicing.along, tuple(slicing.shares[micro_batch] for micro_batch in own))
    held = {op for rank in ranks for op in made.programs[rank]}
    return replace(
        made,
        programs=tuple(
            tuple(_renumbered(op, numbers) for op in made.programs[rank]) for rank in ranks
        ),
        pairs=frozenset(
            (_renumbered(a, numbers), _renumbered(b, numbers))
            for a, b in made.pairs
            if a in held and b in held
        ),
        slicing=slicing,
    )


def _renumbered(op: Op, numbers: dict[int, int]) -> Op:
    return op if op.kind is Kind.U else op._replace(micro_batch=numbers[op.micro_batch])


def why_not_pipelines(plan: Plan) -> str:
    """Why `pipelines_of` finds none, in words."""
    made = plan.schedule
    if made.stream is not None:
        return f"{plan.schedule_name} is asynchronous: there are no versions of weights there, and every batch ends in a flush"
    copies = [len(ranks) for ranks in made.ranks_of_stage]
    if len(set(copies)) > 1:
        return (
            f"its stages have {', '.join(map(str, copies))} ranks: copies are of whole pipelines there, and single stages have "
            "none of their own"
        )
    return (
        f"{plan.schedule_name} has {copies[0]} copies of every stage that are no equal pipelines side by side: that is all it has "
        "of copies"
    )


def refuse(library: str, reasons: list[str]) -> None:
    """Pass, if there is no reason.

    Raises:
        PlanError: there is; the message has every one.
    """
    if reasons:
        raise PlanError("\n  ".join([f"{library} cannot run this plan", *reasons]))


def stage_names(plan: Plan) -> list[list[str]]:
    """The layers' names, stage by stage."""
    return [list(plan.layer_names[start:end]) for start, end in plan.bounds]


def uneven_batch(plan: Plan) -> str | None:
    """Why micro-batches of one size are too few words for this plan, if they are."""
    if plan.batch % plan.micro_batches == 0:
        return None
    return (
        f"a batch of {plan.batch} in {plan.micro_batches} micro-batches has some of {plan.batch // plan.micro_batches} and some of "
        f"{-(-plan.batch // plan.micro_batches)} samples: all have one size there"
    )


def told(plan: Plan, own: str, plays: str) -> list[str]:
    """What is left out everywhere: the schedule, if the library plays another, and the devices.
    `own` is the name here of what it plays, `plays` its name there.
    """
    notes = []
    if plan.schedule_name != own or plan.slicing is not None:
        notes.append(
            f"the schedule: {plays} is played, and not this plan's {plan.schedule_name}, so its time and memory are not those "
            "predicted"
        )
    if plan.devices and plan.devices != tuple(range(plan.ranks)):
        notes.append(f"the devices: rank r belongs on device {row(plan.devices)} of {plan.cluster}")
    return notes


def segment_lengths(plan: Plan) -> list[list[tuple[int, int]]]:
    """Of every stage, the segments that run again, counted from its first layer: first, and one
    past the last.
    """
    return [
        [(a - first, b - first) for a, b in plan.selection.of_stage(first, end)]
        for first, end in plan.bounds
    ]


def selective_layers(plan: Plan) -> str:
    """The layers that run again, for a note: `3-5 6-8 11`, a dash within a segment."""
    found = [
        segment
        for of_stage, (first, _) in zip(segment_lengths(plan), plan.bounds, strict=True)
        for segment in ((a + first, b + first) for a, b in of_stage)
    ]
    return " ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in found) or "none"


def row(numbers: tuple[int, ...]) -> str:
    """Numbers in a list, runs of more than three as `0-7`."""
    words = []
    for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        found = [number for _, number in run]
        words += [f"{found[0]}-{found[-1]}"] if len(found) > 3 else list(map(str, found))
    return f"[{', '.join(words)}]"
