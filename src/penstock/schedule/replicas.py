"""Data parallelism over pipelines: whole pipelines several times, or single stages more often than
others.

Two stages, as two pipelines and with two ranks for the first of them; micro-batch n of a stage on k
ranks is that of the (n mod k)-th of them:

    replicas=2              replicas=(2, 1)
    rank 0 | 0F0 0F2 …      rank 0 | 0F0 0F2 …
    rank 1 | 1F0 1F2 …      rank 1 | 0F1 0F3 …
    rank 2 | 0F1 0F3 …      rank 2 | 1F0 1F1 …
    rank 3 | 1F1 1F3 …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.errors import ScheduleError
from penstock.schedule.op import HANDING, Kind, Op, Program, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.updates import with_updates_of_batches


def pipelines(made: Schedule, replicas: int, micro_batches: int) -> Schedule:
    """`replicas` times the pipeline of `made`: micro-batch m goes to pipeline m mod `replicas`,
    rank r of which is rank r + `made.ranks` times its number.

    All play the same programs, with their own micro-batches, so that the copies of a stage come to
    their U at the same place.

    >>> print(pipelines(Schedule.parse("0F0 0B0 0F1 0B1 0U1"), replicas=2, micro_batches=3))
    rank 0 | 0F0 0B0 0F2 0B2 0U1
    rank 1 | 0F1 0B1 0U1

    Args:
        made: sound, and of as many micro-batches as the busiest pipeline has.
        replicas: at least 1.
        micro_batches: of all pipelines together: those of `made` for each, or for the last of them
        one less; of a stream, those
            of all its batches.

    Raises:
        ScheduleError: the copies of `made` do not add up their gradients.
    """
    _refuse_waves(made)
    cut = made.slicing
    slicing = None
    if cut is not None:
        slicing = Slicing(cut.along, tuple(cut.shares[m // replicas] for m in range(micro_batches)))
    programs: list[Program] = []
    pairs: set[tuple[Op, Op]] = set()
    for replica in range(replicas):
        new: dict[int, int] = {}
        for number in range(made.slices):
            own = number if cut is None else cut.micro_batch_of[number]
            micro_batch = own * replicas + replica
            if micro_batch < micro_batches:
                part = 0 if cut is None else number - cut.first_of[own]
                new[number] = (
                    micro_batch if slicing is None else slicing.first_of[micro_batch] + part
                )
        for program in made.programs:
            kept = [op for op in program if op.kind is Kind.U or op.micro_batch in new]
            programs.append(tuple(_renumbered(op, new) for op in kept))
        pairs.update(
            (_renumbered(one, new), _renumbered(other, new))
            for one, other in made.pairs
            if one.micro_batch in new and other.micro_batch in new
        )
    return replace(made, programs=tuple(programs), pairs=frozenset(pairs), slicing=slicing)


def _renumbered(op: Op, new: dict[int, int]) -> Op:
    return op if op.kind is Kind.U else op._replace(micro_batch=new[op.micro_batch])


def _refuse_waves(made: Schedule) -> None:
    if made.stream is not None and made.stream.waves is not None:
        raise ScheduleError(
            f"{made.name} has copies of its own, which do not add up their gradients: it takes no replicas, but "
            "more virtual workers"
        )


def round_robin(made: Schedule, replicas: Sequence[int]) -> Schedule:
    r"""`made` with stage s on `replicas[s]` ranks, which take its micro-batches in turn (PipeDream's
    1F1B-RR).

    Each runs its own in the order in which the stage ran all. Ops left out of a sound schedule
    leave a sound one. In a stream each copy's U stands right after its own last backward of the
    batch.

    >>> print(round_robin(Schedule.parse("0F0 0F1 0B0 0B1 0U1\n1F0 1B0 1F1 1B1 1U1"), (2, 1)))
    rank 0 | 0F0 0B0 0U1
    rank 1 | 0F1 0B1 0U1
    rank 2 | 1F0 1B0 1F1 1B1 1U1

    Source: Narayanan et al. 2019, PipeDream, section 3.2.

    Args:
        made: sound, with one stage on every rank, and stage s on rank s.
        replicas: per stage, at least 1 and at most as many as there are micro-batches; of a stream
        each divides those of a batch.

    Raises:
        ScheduleError: the schedule is of another form, or the replicas are others.
    """
    _refuse_waves(made)
    name = made.name
    if any(stages != (rank,) for rank, stages in enumerate(made.stages_of_rank)):
        raise ScheduleError(
            f"{name} has several stages on a rank, or copies: only replicas for all stages alike go with it, "
            f"such as replicas={max(replicas)}"
        )
    if made.pairs or made.slicing is not None or any(op.kind in HANDING for op in made.ops):
        raise ScheduleError(
            f"{name} cuts, pairs or hands on micro-batches: only replicas for all stages alike go with it, "
            f"such as replicas={max(replicas)}"
        )
    for stage, number in enumerate(replicas):
        if number > made.micro_batches:
            raise ScheduleError(
                f"stage {stage} has {number} replicas, but there are only {made.micro_batches} micro-batches: "
                "every replica needs one"
            )
        if made.stream is not None and made.micro_batches % number:
            raise ScheduleError(
                f"{name} goes on from batch to batch, so every replica of a stage needs as many micro-batches of a "
                f"batch as the others: stage {stage} has {number} replicas, but {made.micro_batches} is no multiple "
                f"of {number}"
            )
    programs = []
    for stage, number in enumerate(replicas):
        for replica in range(number):
            own = tuple(
                op
                for op in made.programs[stage]
                if op.kind is Kind.U or op.micro_batch % number == replica
            )
            if made.stream is not None:
                own = with_updates_of_batches(
                    [op for op in own if op.kind is not Kind.U], made.micro_batches
                )
            programs.append(own)
    return replace(made, programs=tuple(programs))


def start_up(replicas: Sequence[int]) -> tuple[int, ...]:
    """Per stage, the forwards that its ranks together run before the first backward, so that all
    stay busy from then on.

    Stage x on k of R ranks runs (w + 1) on each, w = floor((R - 1 - the ranks before) / k), but
    never more than the stage before, for it gets no more.

    >>> start_up((1, 1, 1, 1)), start_up((3, 1)), start_up((2, 1, 1))
    ((4, 3, 2, 1), (6, 1), (4, 2, 1))

    Source: PipeDream's runtime.py, in github.com/msr-fiddle/pipedream: w is its number of warm-up
    micro-batches.
    """
    ranks = sum(replicas)
    before = accumulate(replicas, initial=0)
    wanted = [
        number * ((ranks - 1 - earlier) // number + 1)
        for number, earlier in zip(replicas, before, strict=False)
    ]
    return tuple(accumulate(wanted, min))


def check_replicas(name: str, stages: int, replicas: object) -> None:
    """Pass, if `replicas` is a number of 1 or more, or one such per stage.

    Raises:
        ScheduleError: it is neither; `name` is for the message.
    """
    each = (
        tuple(replicas)
        if isinstance(replicas, Sequence) and not isinstance(replicas, str)
        else None
    )
    if each is not None and len(each) != stages:
        raise ScheduleError(
            f"{name} in {stages} stages takes one number of replicas, or {stages}, one per stage, not "
            f"{len(each)}"
        )
    for number in (replicas,) if each is None else each:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{name} needs at least 1 of replicas and got {number!r}")
