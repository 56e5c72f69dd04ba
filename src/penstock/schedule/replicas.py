"""Data parallelism: replicate whole pipelines, or single stages.

Two stages, as two pipelines, and with two ranks for the first stage. Of a stage on k ranks,
micro-batch n is on the (n mod k)-th of them:

    replicas=2              replicas=(2, 1)
    rank 0 | 0F0 0F2 …      rank 0 | 0F0 0F2 …
    rank 1 | 1F0 1F2 …      rank 1 | 0F1 0F3 …
    rank 2 | 0F1 0F3 …      rank 2 | 1F0 1F1 …
    rank 3 | 1F1 1F3 …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.errors import ScheduleError
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Program, Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.updates import with_batch_updates


def pipelines(schedule: Schedule, replicas: int, micro_batches: int) -> Schedule:
    """Replicate the whole pipeline: micro-batch m goes to pipeline m mod `replicas`.

    Rank r of pipeline n is rank r + n * `schedule.ranks`. All pipelines run the same programs with
    their own micro-batches, so that the copies of a stage reach their U at the same place.

    >>> print(pipelines(Schedule.parse("0F0 0B0 0F1 0B1 0U1"), replicas=2, micro_batches=3))
    rank 0 | 0F0 0B0 0F2 0B2 0U1
    rank 1 | 0F1 0B1 0U1

    Args:
        schedule: a sound schedule with the micro-batches of the first pipeline.
        replicas: at least 1.
        micro_batches: total over all pipelines. Each pipeline has as many as `schedule`, the last
            ones may have one less. For a stream, those of all its batches.

    Raises:
        ScheduleError: the copies in `schedule` do not add up their gradients.
    """
    _check_no_waves(schedule)
    slicing = None
    if schedule.slicing is not None:
        shares = [schedule.slicing.shares[m // replicas] for m in range(micro_batches)]
        slicing = Slicing(schedule.slicing.along, tuple(shares))
    programs: list[Program] = []
    pairs: set[tuple[Op, Op]] = set()
    for replica in range(replicas):
        numbers = _replica_numbers(schedule, slicing, replica, replicas, micro_batches)
        for program in schedule.programs:
            renumbered = (_renumber(op, numbers) for op in program)
            programs.append(tuple(filter(None, renumbered)))
        for first, second in schedule.pairs:
            new_first, new_second = _renumber(first, numbers), _renumber(second, numbers)
            if new_first is not None and new_second is not None:
                pairs.add((new_first, new_second))
    return replace(schedule, programs=tuple(programs), pairs=frozenset(pairs), slicing=slicing)


def _replica_numbers(
    schedule: Schedule, slicing: Slicing | None, replica: int, replicas: int, micro_batches: int
) -> dict[int, int]:
    """Return the micro-batch or slice numbers of a pipeline by those in `schedule`.

    Args:
        schedule: the schedule of the first pipeline.
        slicing: the slicing over all pipelines, if micro-batches are cut.
        replica: number of the pipeline.
        replicas, micro_batches: numbers of pipelines, and of micro-batches over all of them.
    """
    numbers: dict[int, int] = {}
    for number in range(schedule.slices):
        if schedule.slicing is None or slicing is None:
            # In turn, so that two pipelines never differ by more than one micro-batch.
            micro_batch = number * replicas + replica
            if micro_batch < micro_batches:
                numbers[number] = micro_batch
        else:
            local = schedule.slicing.micro_batch_of[number]
            micro_batch = local * replicas + replica
            if micro_batch < micro_batches:
                slice_index = number - schedule.slicing.first_of[local]
                numbers[number] = slicing.first_of[micro_batch] + slice_index
    return numbers


def _renumber(op: Op, numbers: Mapping[int, int]) -> Op | None:
    """Return the op with its new number, None if there is none; U ops keep their version."""
    if op.kind is Kind.U:
        return op
    number = numbers.get(op.micro_batch)
    return None if number is None else op._replace(micro_batch=number)


def _check_no_waves(schedule: Schedule) -> None:
    """Check that the copies of a stage, if there are any, add up their gradients."""
    if schedule.stream is not None and schedule.stream.waves is not None:
        raise ScheduleError(
            f"{schedule.name} already has copies of its stages, which do not add up their "
            "gradients: it takes no replicas, but more virtual workers"
        )


def round_robin(schedule: Schedule, replicas: Sequence[int]) -> Schedule:
    r"""Put stage s on `replicas[s]` ranks, which take its micro-batches in turn.

    This is PipeDream's 1F1B-RR. Each rank runs its micro-batches in the order in which the stage
    ran all of them; removing ops from a sound schedule gives a sound one. In a stream each copy's U
    stands right after its own last backward of the batch.

    >>> print(round_robin(Schedule.parse("0F0 0F1 0B0 0B1 0U1\n1F0 1B0 1F1 1B1 1U1"), (2, 1)))
    rank 0 | 0F0 0B0 0U1
    rank 1 | 0F1 0B1 0U1
    rank 2 | 1F0 1B0 1F1 1B1 1U1

    Source: Narayanan et al. 2019, PipeDream, section 3.2.

    Args:
        schedule: a sound schedule with one stage per rank, stage s on rank s.
        replicas: per stage, from 1 to the number of micro-batches; for a stream it must divide the
            number of micro-batches of a batch.

    Raises:
        ScheduleError: the schedule has another form, or the replicas are invalid.
    """
    _check_round_robin(schedule, replicas)
    programs = []
    for stage, number in enumerate(replicas):
        for replica in range(number):
            program = tuple(
                op
                for op in schedule.programs[stage]
                if op.kind is Kind.U or op.micro_batch % number == replica
            )
            if schedule.stream is not None:
                # A replica ends a batch with another micro-batch than the whole stage does: its
                # updates are placed anew.
                work = [op for op in program if op.kind is not Kind.U]
                program = with_batch_updates(work, schedule.micro_batches)
            programs.append(program)
    return replace(schedule, programs=tuple(programs))


def _check_round_robin(schedule: Schedule, replicas: Sequence[int]) -> None:
    """Check that the micro-batches of a schedule can be distributed over replicas of its stages.

    Raises:
        ScheduleError: they cannot.
    """
    _check_no_waves(schedule)
    name = schedule.name
    if any(stages != (rank,) for rank, stages in enumerate(schedule.stages_of_rank)):
        raise ScheduleError(
            f"{name} has several stages on a rank, or copies: it takes only the same number of "
            f"replicas for all stages, such as replicas={max(replicas)}"
        )
    moves_activations = any(op.kind in ACTIVATION_MOVES for op in schedule.ops)
    if schedule.pairs or schedule.slicing is not None or moves_activations:
        raise ScheduleError(
            f"{name} pairs ops, cuts micro-batches, or moves activations to other ranks: it takes "
            f"only the same number of replicas for all stages, such as replicas={max(replicas)}"
        )
    _check_replicas_of_stages(schedule, replicas)


def _check_replicas_of_stages(schedule: Schedule, replicas: Sequence[int]) -> None:
    """Check the number of replicas of each stage against the number of micro-batches."""
    for stage, number in enumerate(replicas):
        if number > schedule.micro_batches:
            raise ScheduleError(
                f"stage {stage} has {number} replicas, but there are only {schedule.micro_batches} "
                "micro-batches: every replica needs one"
            )
        if schedule.stream is not None and schedule.micro_batches % number:
            raise ScheduleError(
                f"{schedule.name} runs batch after batch without a flush, so every replica of a "
                f"stage needs the same number of micro-batches of a batch: stage {stage} has "
                f"{number} replicas, but {schedule.micro_batches} is not a multiple of {number}"
            )


def start_up(replicas: Sequence[int], factor: int = 1) -> tuple[int, ...]:
    """Return PipeDream's number of warm-up forwards per stage, over all ranks of the stage.

    It is the number of forwards before the first backward with which all ranks stay busy from then
    on. Of R ranks, stage x has k; each of these runs (w + 1) forwards, w = floor((R - 1 - the ranks
    of earlier stages) / k), or (`factor` w + 1). The stage never runs more than the stage before,
    which passes on no more.

    >>> start_up((1, 1, 1, 1)), start_up((3, 1)), start_up((2, 1, 1))
    ((4, 3, 2, 1), (6, 1), (4, 2, 1))

    Source: PipeDream's runtime.py, in github.com/msr-fiddle/pipedream: w is its number of warm-up
    micro-batches.
    """
    ranks = sum(replicas)
    ranks_before = accumulate(replicas, initial=0)
    # Not strict: `accumulate` with an initial value yields one number more.
    forwards = [
        number * (factor * ((ranks - 1 - before) // number) + 1)
        for number, before in zip(replicas, ranks_before, strict=False)
    ]
    # No stage can run further ahead than the one before it, which makes its inputs.
    return tuple(accumulate(forwards, min))


def check_replicas(name: str, stages: int, replicas: object) -> None:
    """Check that `replicas` is a positive integer, or a sequence of one per stage.

    Raises:
        ScheduleError: it is neither; the message names the schedule `name`.
    """
    numbers: Sequence[object] = (replicas,)
    if isinstance(replicas, Sequence) and not isinstance(replicas, str):
        numbers = replicas
        if len(numbers) != stages:
            raise ScheduleError(
                f"{name} in {stages} stages takes one number of replicas, or {stages}, one per "
                f"stage, not {len(numbers)}"
            )
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ScheduleError(f"{name} needs at least 1 of replicas and got {number!r}")
