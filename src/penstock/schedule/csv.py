"""To and from the CSV of torch.distributed.pipelining (`_PipelineScheduleRuntime._load_csv`), in
both of its forms.

One row per rank, one cell per action. "compute_only" has F, B, I, W and overlaps, and empty cells
for idle slots; torch adds the transfers. "compute_comms" has everything, and torch plays it as it
stands, unchecked: two receives in the wrong order bring wrong gradients and no error. So a file of
this form is checked when it is read. Files are parsed, never executed.

What torch cannot say is refused on writing (see `csv_export`); what is not torch's on reading (see
`csv_cells`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import FileError
from penstock.schedule.csv_cells import Cell, Communication, Compute, Gathering, parse_cell
from penstock.schedule.csv_export import communication_rows, compute_rows, refuse_unsayable
from penstock.schedule.lower import Action, Direction, LoweredSchedule, Transfer
from penstock.schedule.op import Kind, Op, Program, Schedule
from penstock.schedule.transfers import transfer_findings, unsound
from penstock.schedule.updates import with_updates


def to_csv(schedule: Schedule, communication: bool = False) -> str:
    """The schedule in torch's form. torch steps no optimizer: U ops are left out, or with
    communication say where a stage's gradients are reduced.

    Args:
        schedule: a sound schedule (see `verify`).
        communication: with transfers, for `format="compute_comms"`; else for
        `format="compute_only"`.

    Raises:
        ScheduleError: torch cannot express it: copies of a stage, an asynchronous schedule, slices
        of micro-batches,
            activations handed over, pairs of other ops than a forward and a backward, a last stage
            that takes micro-batches out of order; with communication also a rank without ops, and
            programs that never finish.
    """
    refuse_unsayable(schedule)
    text = io.StringIO()
    # A rank without ops is one idle slot: a blank line would be lost at the end of the file.
    rows = (
        communication_rows(schedule)
        if communication
        else [row or [""] for row in compute_rows(schedule)]
    )
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule in `text`, of either form, without its transfers. Run `verify` on the result.

    Raises:
        FileError: a cell is not torch's; the message names row, column and cell.
        ScheduleError: its transfers do not carry what the ops need; `findings` has every one that
        is wrong.
    """
    schedule, lowered = parse_csv(text, name)
    if lowered is not None and (findings := transfer_findings(schedule, lowered)):
        raise unsound(name, findings)
    return schedule


def read_csv(path: str | Path) -> Schedule:
    """The schedule in the file at `path`, named after the file.

    Raises:
        FileError: the file is missing or not of that form.
        ScheduleError: its transfers do not carry what the ops need.
    """
    file = Path(path)
    return from_csv(_text_of(file), file.stem)


def load_csv(path: str | Path) -> tuple[Schedule, LoweredSchedule | None]:
    """As `parse_csv`, of the file at `path`, for whoever checks the transfers: `verify_lowered`
    tells more than `read_csv`.

    Raises:
        FileError: the file is missing or not of that form.
    """
    file = Path(path)
    return parse_csv(_text_of(file), file.stem)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"cannot read the schedule {file}: {getattr(error, 'strerror', None) or error}"
        ) from error


def parse_csv(text: str, name: str = "csv") -> tuple[Schedule, LoweredSchedule | None]:
    """The schedule in `text`, and where the file has more than compute actions also its ops and
    transfers as they stand.

    A stage's U stands where its gradients are reduced, or right after its last backward if the file
    says nothing of that. `UNSHARD` and `RESHARD` are passed over: where FSDP gathers and frees
    parameters changes no schedule.

    Raises:
        FileError: a cell is not torch's; the message names row, column and cell.
    """
    rows = list(_rows(text))
    cells = [cell for row in rows for cell in row]
    computes = [cell for cell in cells if isinstance(cell, Compute)]
    if not computes:
        raise FileError("the CSV has no ops: one row per rank, with cells such as 2F0, is needed")
    home = {
        op.stage: rank
        for rank, row in enumerate(rows)
        for cell in row
        if isinstance(cell, Compute)
        for op in cell.ops
    }
    programs = [[action for cell in row for action in _actions(cell, home)] for row in rows]
    ops = [[action for action in program if isinstance(action, Op)] for program in programs]
    if not any(op.kind is Kind.U for program in ops for op in program):
        updated = [with_updates(program) for program in ops]
        programs = [_with_transfers(*both) for both in zip(updated, programs, strict=True)]
        ops = [list(program) for program in updated]
    pairs = frozenset((cell.ops[0], cell.ops[1]) for cell in computes if len(cell.ops) == 2)
    schedule = Schedule(tuple(map(tuple, ops)), name, pairs=pairs)
    return schedule, None if len(computes) == len(cells) else LoweredSchedule(
        tuple(map(tuple, programs))
    )


def _rows(text: str) -> Iterator[list[Cell]]:
    """The cells of every row that are not empty."""
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
        raise FileError(f"this is no CSV: {error}") from error


def _actions(cell: Cell, home: dict[int, int]) -> tuple[Action, ...]:
    """What a cell is among ops and transfers. `home` has the rank of every stage; without one there
    is no peer, which is -1.
    """
    if isinstance(cell, Compute):
        return cell.ops
    if isinstance(cell, Communication):
        other = cell.message.target if cell.direction is Direction.SEND else cell.message.stage
        return (Transfer(cell.direction, cell.message, home.get(other, -1)),)
    return (Op(Kind.U, cell.stage, 1),) if cell.what is Gathering.REDUCE_GRAD else ()


def _with_transfers(ops: Program, actions: list[Action]) -> list[Action]:
    """`actions`, with the updates that `ops` have besides theirs."""
    merged: list[Action] = []
    rest = iter(ops)
    following = next(rest, None)
    for action in actions:
        merged.append(action)
        if action == following and isinstance(action, Op):
            following = next(rest, None)
        while following is not None and following.kind is Kind.U:
            merged.append(following)
            following = next(rest, None)
    return merged
