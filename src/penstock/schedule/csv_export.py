"""A schedule as rows of torch.distributed.pipelining's actions, or the reason why these cannot say
it.

With communication, every transfer stands at one moment in both ranks' rows: that at which it begins
when F, I and W take one unit and B two. So any two ranks have their messages, of both directions,
in one order, and the rows finish even where a send waits until the receiver has come to its
receive, and where both directions share one queue (NCCL). torch's executor posts receives and sends
without waiting; only the op that needs a value waits, and the end of the step for the sends.

What the executor (2.13) does by itself, and the rows must suit:
- it divides a stage's gradients by the number of micro-batches at `REDUCE_GRAD`. Rows without it
  leave them that much too large.
- a module under FSDP needs `UNSHARD` before its first op; any other ignores that and `RESHARD`.
- it keeps the last stage's losses in the order of their forwards, and finds a micro-batch's by its
  number.
- stages whose neighbour is on the same rank hand tensors over by themselves: a transfer there would
  be sent to itself.
- stages are given to it in ascending order, at least one per rank, or it hangs.
- `defer_pp_recv=True`, which moves the receives of a "compute_only" file, keeps no order between
  activations and gradients: with V shapes, whose ranks exchange both in both directions, gradients
  come out wrong and nothing fails (ZB-V: 20 times too large).
"""

from __future__ import annotations

from itertools import pairwise

from penstock.errors import ScheduleError
from penstock.schedule.csv_cells import Communication, Gathering, overlaps
from penstock.schedule.graph import build
from penstock.schedule.lower import Direction, Message
from penstock.schedule.op import HANDING, Kind, Op, Schedule
from penstock.schedule.updates import with_updates

_UNITS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def refuse_unsayable(schedule: Schedule) -> None:
    """Pass, if torch's actions can say all of the schedule.

    Raises:
        ScheduleError: they cannot; the message says what and why.
    """
    reason = why_not(schedule)
    if reason is not None:
        raise ScheduleError(reason)


def why_not(schedule: Schedule) -> str | None:
    """What torch's actions cannot say of a schedule, if there is anything."""
    name = schedule.name
    if not schedule.synchronous or schedule.stream is not None:
        return (
            f"{name} is asynchronous: torch's CSV has no optimizer step and no weight versions, and is of one batch, whose every "
            "micro-batch stands there once"
        )
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        if len(ranks) > 1:
            return f"stage {stage} has copies on ranks {', '.join(map(str, ranks))}: torch's CSV has each stage on one rank"
    if schedule.slicing is not None:
        return (
            f"{name} cuts micro-batches along {schedule.slicing.along}: torch's CSV has whole micro-batches, all of one size, "
            "and no order between parts of one"
        )
    for rank, program in enumerate(schedule.programs):
        for op in program:
            if op.kind in HANDING:
                return f"{op} on rank {rank} hands activations to another rank: torch's CSV has no action for it"
    return _why_not_its_pairs(schedule) or _why_not_its_losses(schedule)


def _why_not_its_pairs(schedule: Schedule) -> str | None:
    members: set[Op] = set()
    for one, other in sorted(schedule.pairs):
        if not overlaps(one, other):
            return f"{one}&{other} run as one: torch's OVERLAP_F_B is of a forward and the backward that passes a gradient on"
        if one in members or other in members:
            return f"{one}&{other} share an op with another pair: torch's OVERLAP_F_B is of two ops"
        members |= {one, other}
    return None


def _why_not_its_losses(schedule: Schedule) -> str | None:
    last = [op for op in schedule.ops if op.kind is Kind.F and op.stage == schedule.stages - 1]
    for one, other in pairwise(last):
        if other.micro_batch < one.micro_batch:
            return (
                f"the last stage runs {one} before {other}: torch keeps losses in the order of these forwards and finds them by "
                "number, so a micro-batch would get the loss of another"
            )
    return None


def compute_rows(schedule: Schedule) -> list[list[str]]:
    """Per rank, its compute actions."""
    cells = [_cells(schedule, rank) for rank in range(schedule.ranks)]
    return [
        [cells[rank][op] for op in program if op in cells[rank]]
        for rank, program in enumerate(schedule.programs)
    ]


def communication_rows(schedule: Schedule) -> list[list[str]]:
    """Per rank, its actions with those that communicate.

    Raises:
        ScheduleError: a rank has no op, or the programs never finish.
    """
    for rank, program in enumerate(schedule.programs):
        if not any(op.kind is not Kind.U for op in program):
            raise ScheduleError(
                f"rank {rank} has no op: torch's CSV with communication has no cell for that"
            )
    updated = tuple(
        program
        if all(Op(Kind.U, stage, 1) in program for stage in stages)
        else with_updates(_without_updates(program))
        for program, stages in zip(schedule.programs, schedule.stages_of_rank, strict=True)
    )
    schedule = Schedule(updated, schedule.name, pairs=schedule.pairs)
    graph = build(schedule)
    if graph.order()[1]:
        raise ScheduleError(f"{schedule.name} never finishes: `verify` says where it stands still")
    cells = [_cells(schedule, rank) for rank in range(schedule.ranks)]
    rows: list[list[str]] = [[] for _ in range(schedule.ranks)]
    gathered: set[int] = set()
    second = dict(schedule.pairs)
    events = graph.events(lambda _, op: _UNITS.get(op.kind, 0.0), lambda *_: 0.0)
    # Each event comes after all that it waits for. At one moment transfers come first: before the
    # next op of either rank.
    for rank, op, _, _, _, target in sorted(events, key=lambda event: (event[2], event[5] is None)):
        if target is not None:
            message = Message(Kind.F if op.kind is Kind.F else Kind.B, op.stage, op.micro_batch)
            rows[rank].append(_written(Communication(Direction.SEND, message)))
            rows[target].append(_written(Communication(Direction.RECV, message)))
        elif op.kind is Kind.U:
            rows[rank] += [
                f"{op.stage}{Gathering.REDUCE_GRAD.value}",
                f"{op.stage}{Gathering.RESHARD.value}",
            ]
        elif op in cells[rank]:
            new = dict.fromkeys(
                stage for stage in (op.stage, second.get(op, op).stage) if stage not in gathered
            )
            rows[rank] += [*(f"{stage}{Gathering.UNSHARD.value}" for stage in new), cells[rank][op]]
            gathered.update(new)
    return rows


def _cells(schedule: Schedule, rank: int) -> dict[Op, str]:
    """The cell of every op that has one: of a pair the first, and of updates none."""
    program = _without_updates(schedule.programs[rank])
    cells = {op: str(op) for op in program}
    for one, other in pairwise(program) if schedule.pairs else ():
        if (one, other) in schedule.pairs:
            # The forward stands first: functions registered for OVERLAP_F_B count on it. Whichever
            # starts first, both may.
            forward, backward = (one, other) if one.kind is Kind.F else (other, one)
            cells[one] = f"({forward};{backward})OVERLAP_F_B"
            del cells[other]
    return cells


def _without_updates(program: tuple[Op, ...]) -> list[Op]:
    return [op for op in program if op.kind is not Kind.U]


def _written(transfer: Communication) -> str:
    return f"{transfer.stage}{transfer.direction.value}_{transfer.message.kind.value}{transfer.message.micro_batch}"
