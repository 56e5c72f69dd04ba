"""Read and write the CSV format of torch.distributed.pipelining, in both of its variants.

The format is that of `_PipelineScheduleRuntime._load_csv`: one row per rank, one cell per action.
The variant "compute_only" has F, B, I, W, overlaps, and empty cells for idle slots; torch adds the
transfers. The variant "compute_comms" has all actions, and torch executes it unchecked: two
receives in the wrong order give wrong gradients and no error. So a file of this variant is checked
when it is read. Files are parsed, never executed.

Schedules that torch cannot express are refused on writing (see `actions`), cells that are not in
torch's format on reading (see `cells`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import FileError
from penstock.files.text import read_text
from penstock.schedule.lower import Action, Direction, LoweredSchedule, Transfer
from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.size_limit import check_ops
from penstock.schedule.torch_csv.actions import check_supported, communication_rows, compute_rows
from penstock.schedule.torch_csv.cells import (
    Cell,
    Communication,
    Compute,
    FsdpAction,
    Shards,
    parse_cell,
)
from penstock.schedule.transfers import transfer_findings, unsound
from penstock.schedule.updates import with_updates

#: Cells of a file at most; this number takes about 200 MB.
_MAX_CELLS = 1_000_000


def to_csv(schedule: Schedule, communication: bool = False) -> str:
    """Return the schedule in torch's CSV format.

    torch runs no optimizer step: U ops are left out, or, with communication, become the cell that
    reduces the stage's gradients.

    Args:
        schedule: a sound schedule (see `verify`).
        communication: include transfers, for torch's `format="compute_comms"`; otherwise the text
            is for `format="compute_only"`.

    Raises:
        ScheduleError: torch cannot express the schedule: copies of a stage, an asynchronous
            schedule, slices of micro-batches, activations handed to another rank, pairs other than
            a forward and a backward, a last stage that takes micro-batches out of order; with
            communication also a rank without ops, and programs that deadlock.
    """
    check_supported(schedule)
    if communication:
        rows = communication_rows(schedule)
    else:
        # A rank without ops is one idle slot: a blank line would be lost at the end of the file.
        rows = [row or [""] for row in compute_rows(schedule)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Parse CSV text of either variant and return the schedule without its transfers.

    Run `verify` on the result.

    Raises:
        FileError: a cell is not in torch's format; the message names row, column and cell.
        ScheduleError: the transfers do not carry what the ops need; `findings` lists every error.
    """
    schedule, lowered = parse_csv(text, name)
    if lowered is not None and (findings := transfer_findings(schedule, lowered)):
        raise unsound(name, findings)
    return schedule


def read_csv(path: str | Path) -> Schedule:
    """Read a schedule from the file at `path`; it is named after the file.

    Raises:
        FileError: the file is missing or not in torch's format.
        ScheduleError: its transfers do not carry what the ops need.
    """
    file = Path(path)
    return from_csv(read_text(file, "schedule"), file.stem)


def load_csv(path: str | Path) -> tuple[Schedule, LoweredSchedule | None]:
    """Read the file at `path` as `parse_csv` does, without checking its transfers.

    Use it together with `verify_lowered`, which reports more than `read_csv`.

    Raises:
        FileError: the file is missing or not in torch's format.
    """
    file = Path(path)
    return parse_csv(read_text(file, "schedule"), file.stem)


def parse_csv(text: str, name: str = "csv") -> tuple[Schedule, LoweredSchedule | None]:
    """Parse CSV text of either variant.

    The U of a stage stands where its gradients are reduced, or right after its last backward if
    the file has no such cell. `UNSHARD` and `RESHARD` are skipped: where FSDP gathers and frees
    parameters does not change the schedule.

    Returns:
        The schedule without transfers; and, if the file has more than compute actions, its ops and
        transfers in their order, else None.

    Raises:
        FileError: a cell is not in torch's format; the message names row, column and cell.
        ScheduleError: the ops name more stages and micro-batches than a schedule can have.
    """
    count = text.count(",") + text.count("\n")  # counted first: parsed cells take 40 times more
    if count > _MAX_CELLS:
        raise FileError(f"the CSV has {count:,} cells, more than the {_MAX_CELLS:,} allowed")
    rows = list(_rows(text))
    cells = [cell for row in rows for cell in row]
    computes = [cell for cell in cells if isinstance(cell, Compute)]
    if not computes:
        raise FileError("the CSV has no ops: one row per rank, with cells such as 2F0, is needed")
    programs = _programs(rows)
    if not _reduces_gradients(cells):
        programs = list(map(_with_default_updates, programs))
    check_ops(name, (cell.ops for cell in computes))
    pairs = frozenset((cell.ops[0], cell.ops[1]) for cell in computes if len(cell.ops) == 2)
    schedule = Schedule(tuple(map(_ops_of, programs)), name, pairs=pairs)
    if len(computes) == len(cells):
        return schedule, None
    return schedule, LoweredSchedule(tuple(map(tuple, programs)))


def _reduces_gradients(cells: Sequence[Cell]) -> bool:
    """Return whether a cell says where gradients are reduced."""
    shards = [cell for cell in cells if isinstance(cell, Shards)]
    return any(cell.action is FsdpAction.REDUCE_GRAD for cell in shards)


def _rows(text: str) -> Iterator[list[Cell]]:
    """Yield the parsed cells of every row, without the empty ones."""
    # A blank line is an error in between, and none at the ends of a file.
    reader = csv.reader(io.StringIO(text.strip("\r\n"), newline=""))
    try:
        for number, row in enumerate(reader, start=1):
            if not row:
                raise FileError(
                    f'row {number} is blank: take it out, or write "" for a rank without ops'
                )
            cells = []
            for column, cell in enumerate(row, start=1):
                try:
                    cells += [parse_cell(cell)] if cell.strip() else []
                except FileError as error:
                    raise FileError(f"row {number}, column {column}: {error}") from error
            yield cells
    except csv.Error as error:
        raise FileError(f"this is not CSV: {error}") from error


def _rank_of_stage(rows: Sequence[Sequence[Cell]]) -> dict[int, int]:
    """Return the rank of every stage, by the cells in which it computes."""
    rank_of_stage: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            if isinstance(cell, Compute):
                rank_of_stage.update((op.stage, rank) for op in cell.ops)
    return rank_of_stage


def _programs(rows: Sequence[Sequence[Cell]]) -> list[list[Action]]:
    """Return the ops and transfers of each row."""
    rank_of_stage = _rank_of_stage(rows)
    programs: list[list[Action]] = []
    for row in rows:
        program: list[Action] = []
        for cell in row:
            program += _actions(cell, rank_of_stage)
        programs.append(program)
    return programs


def _actions(cell: Cell, rank_of_stage: dict[int, int]) -> tuple[Action, ...]:
    """Return the ops and transfers that a cell stands for.

    The peer of a transfer is -1 if no rank holds its stage.
    """
    if isinstance(cell, Compute):
        return cell.ops
    if isinstance(cell, Communication):
        message = cell.message
        peer_stage = message.target if cell.direction is Direction.SEND else message.stage
        return (Transfer(cell.direction, message, rank_of_stage.get(peer_stage, -1)),)
    return (Op(Kind.U, cell.stage, 1),) if cell.action is FsdpAction.REDUCE_GRAD else ()


def _ops_of(actions: Sequence[Action]) -> Program:
    return tuple(action for action in actions if isinstance(action, Op))


def _with_default_updates(actions: list[Action]) -> list[Action]:
    """Return a program without updates with a U right after each stage's last backward."""
    merged: list[Action] = []
    remaining_ops = iter(with_updates(_ops_of(actions)))
    next_op = next(remaining_ops, None)
    for action in actions:
        merged.append(action)
        if isinstance(action, Op):
            next_op = next(remaining_ops, None)
        if next_op is not None and next_op.kind is Kind.U:
            merged.append(next_op)
            next_op = next(remaining_ops, None)
    return merged
