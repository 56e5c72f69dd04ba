"""Convert a schedule to torch.distributed.pipelining's actions, or say why that is impossible.

With communication, a transfer is placed in both ranks' rows at the same moment: when it begins if
F, I and W take one unit of time and B two. So any two ranks list their messages, of both
directions, in one order. The rows then finish even where a send blocks until the receiver has
reached its receive, and where both directions share one queue (NCCL). torch's executor posts
receives and sends without waiting; only the op that needs a value waits, and the end of the step
waits for the sends.

What the executor (2.13) does by itself, and the rows must account for:
- it divides a stage's gradients by the number of micro-batches at `REDUCE_GRAD`. Without that cell
  the gradients are too large by this factor.
- a module under FSDP needs `UNSHARD` before its first op; other modules ignore `UNSHARD` and
  `RESHARD`.
- it stores the last stage's losses in the order of their forwards, and looks up the loss of a
  micro-batch by its number.
- stages whose neighbour is on the same rank pass tensors on directly: a transfer there would be
  sent to the rank itself.
- stages must be given to it in ascending order, at least one per rank, or it hangs.
- `defer_pp_recv=True`, which moves the receives of a "compute_only" file, keeps no order between
  activations and gradients: with V shapes, whose ranks exchange both in both directions, gradients
  are wrong without an error (ZB-V: 20 times too large).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.channels import topological_order
from penstock.schedule.dependencies import dependencies_of
from penstock.schedule.lower import Direction, Link, Message, messages, output_message
from penstock.schedule.op import ACTIVATION_MOVES, Kind, Op, Schedule
from penstock.schedule.torch_csv.cells import Communication, FsdpAction, overlaps
from penstock.schedule.unit_times import unit_times, usual_units
from penstock.schedule.updates import with_updates


def check_supported(schedule: Schedule) -> None:
    """Check that torch's actions can express the schedule.

    Raises:
        ScheduleError: they cannot; the message says what and why.
    """
    reason = unsupported_reason(schedule)
    if reason is not None:
        raise ScheduleError(reason)


def unsupported_reason(schedule: Schedule) -> str | None:
    """Return the reason why torch's actions cannot express the schedule, None if they can."""
    name = schedule.name
    if not schedule.synchronous or schedule.stream is not None:
        return (
            f"{name} is asynchronous: torch's CSV has no optimizer step and no weight versions, "
            "and describes one batch, in which every micro-batch occurs once"
        )
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        if len(ranks) > 1:
            return (
                f"stage {stage} has copies on ranks {', '.join(map(str, ranks))}: "
                "torch's CSV has each stage on one rank"
            )
    if schedule.slicing is not None:
        return (
            f"{name} cuts micro-batches along {schedule.slicing.along}: torch's CSV has whole "
            "micro-batches, all of one size, and no order between parts of one"
        )
    for rank, program in enumerate(schedule.programs):
        for op in program:
            if op.kind in ACTIVATION_MOVES:
                return (
                    f"{op} on rank {rank} hands activations to another rank: "
                    "torch's CSV has no action for it"
                )
    return _unsupported_pairs(schedule) or _unsupported_loss_order(schedule)


def _unsupported_pairs(schedule: Schedule) -> str | None:
    """Return the reason why torch cannot express the pairs, None if it can."""
    paired_ops: set[Op] = set()
    for first, second in sorted(schedule.pairs):
        if not overlaps(first, second):
            return (
                f"{first}&{second} run as one: torch's OVERLAP_F_B takes a forward and the "
                "backward that passes a gradient on"
            )
        if first in paired_ops or second in paired_ops:
            return (
                f"{first}&{second} share an op with another pair: torch's OVERLAP_F_B takes two ops"
            )
        paired_ops |= {first, second}
    return None


def _unsupported_loss_order(schedule: Schedule) -> str | None:
    """Return the reason if torch would confuse the losses of micro-batches, else None."""
    last_stage = schedule.stages - 1
    forwards = [op for op in schedule.ops if op.kind is Kind.F and op.stage == last_stage]
    for op, next_op in pairwise(forwards):
        if next_op.micro_batch < op.micro_batch:
            return (
                f"the last stage runs {op} before {next_op}: torch stores losses in the order of "
                "these forwards and finds them by number, so a micro-batch would get the loss of "
                "another"
            )
    return None


def compute_rows(schedule: Schedule) -> list[list[str]]:
    """Return the compute cells of each rank."""
    return [list(_cells(schedule, rank).values()) for rank in range(schedule.ranks)]


def communication_rows(schedule: Schedule) -> list[list[str]]:
    """Return the cells of each rank, including communication.

    Raises:
        ScheduleError: a rank has no op, or the programs deadlock.
    """
    for rank, program in enumerate(schedule.programs):
        if not _without_updates(program):
            raise ScheduleError(
                f"rank {rank} has no op: torch's CSV with communication has no cell for that"
            )
    schedule = _with_missing_updates(schedule)
    cells = [_cells(schedule, rank) for rank in range(schedule.ranks)]
    rows: list[list[str]] = [[] for _ in range(schedule.ranks)]
    unsharded: set[int] = set()
    for _, _, rank, op, target in _ordered_events(schedule):
        if target is not None:
            message = output_message(op, schedule.stages)
            assert message is not None, "an op with a transfer has an output"
            rows[rank].append(_transfer_cell(Direction.SEND, message))
            rows[target].append(_transfer_cell(Direction.RECV, message))
        elif op.kind is Kind.U:
            rows[rank].append(f"{op.stage}{FsdpAction.REDUCE_GRAD.value}")
            rows[rank].append(f"{op.stage}{FsdpAction.RESHARD.value}")
        elif op in cells[rank]:
            # The second op of a pair needs none: backwards come after a forward of every stage.
            if op.stage not in unsharded:
                unsharded.add(op.stage)
                rows[rank].append(f"{op.stage}{FsdpAction.UNSHARD.value}")
            rows[rank].append(cells[rank][op])
    return rows


class _Start(NamedTuple):
    """The start of an op, or of the transfer of its value to the rank `target`."""

    moment: float
    is_op: bool
    rank: int
    op: Op
    target: int | None


def _ordered_events(schedule: Schedule) -> list[_Start]:
    """Return all ops and transfers in the order in which they start.

    Raises:
        ScheduleError: the programs deadlock.
    """
    dependencies = dependencies_of(schedule)
    if len(dependencies.blocked):
        raise ScheduleError(f"{schedule.name} deadlocks: `verify` says where")
    times = unit_times(schedule, usual_units)
    rank_of, sent = dependencies.ops.rank.tolist(), times.sent.tolist()
    starts = [
        _Start(moment, True, rank, op, None)
        for moment, rank, op in zip(times.start.tolist(), rank_of, schedule.ops, strict=True)
    ]
    first = dependencies.ops.first.tolist()
    for link, _, producer_index, _ in messages(schedule):
        producer = first[link.source] + producer_index
        op = schedule.ops[producer]
        starts.append(_Start(sent[producer], False, link.source, op, link.target))
    order, _ = topological_order(_predecessors_with_transfers(schedule))
    # Every event comes after all that it waits for; the sort is stable. At equal times, transfers
    # come first: before the next op of either rank.
    return sorted((starts[node] for node in order), key=lambda start: (start.moment, start.is_op))


def _predecessors_with_transfers(schedule: Schedule) -> list[list[int]]:
    """Return what every op and transfer waits for; transfers are numbered after the ops.

    Transfers are in the order of `messages`.
    """
    dependencies = dependencies_of(schedule)
    first = dependencies.ops.first.tolist()
    predecessors = dependencies.predecessors()
    # The first op of a pair waits for the inputs of both, and the second for the first.
    leader = dependencies.graph.leader.tolist()
    for place in dependencies.pairs.tolist():
        predecessors[place + 1] = [place]
    last_on_link: dict[Link, int] = {}
    for link, _, producer_index, consumer_index in messages(schedule):
        producer = first[link.source] + producer_index
        consumer = first[link.target] + consumer_index
        transfer = len(predecessors)
        predecessors.append([producer])
        if link in last_on_link:
            predecessors[transfer].append(last_on_link[link])
        last_on_link[link] = transfer
        waiting = leader[consumer]
        predecessors[waiting] = [
            transfer if node == producer else node for node in predecessors[waiting]
        ]
    return predecessors


def _with_missing_updates(schedule: Schedule) -> Schedule:
    """Return the schedule with default updates on the ranks that do not have one for each stage."""
    programs = []
    for program, stages in zip(schedule.programs, schedule.stages_of_rank, strict=True):
        if all(Op(Kind.U, stage, 1) in program for stage in stages):
            programs.append(program)
        else:
            programs.append(with_updates(_without_updates(program)))
    return Schedule(tuple(programs), schedule.name, pairs=schedule.pairs)


def _cells(schedule: Schedule, rank: int) -> dict[Op, str]:
    """Return the cell of every op of a rank that has one, in the order of its program.

    Of a pair only the first op has a cell, updates have none.
    """
    program = _without_updates(schedule.programs[rank])
    cells = {op: str(op) for op in program}
    for first, second in pairwise(program) if schedule.pairs else ():
        if (first, second) in schedule.pairs:
            # The forward comes first in the cell, whichever op starts first: functions registered
            # for OVERLAP_F_B rely on that.
            forward, backward = (first, second) if first.kind is Kind.F else (second, first)
            cells[first] = f"({forward};{backward})OVERLAP_F_B"
            del cells[second]
    return cells


def _without_updates(program: tuple[Op, ...]) -> list[Op]:
    """Return the ops of a program other than updates."""
    return [op for op in program if op.kind is not Kind.U]


def _transfer_cell(direction: Direction, message: Message) -> str:
    """Return the cell that sends or receives a message, e.g. `1SEND_F0`."""
    stage = Communication(direction, message).stage
    return f"{stage}{direction.value}_{message.kind.value}{message.micro_batch}"
