"""To and from the CSV of torch.distributed.pipelining (`_PipelineScheduleRuntime._load_csv`, format "compute_only").

One row per rank, one cell per op in the form `2F0`, an empty cell for an idle slot. torch's own reader lets much pass (its
pattern is not anchored, an old dialect's `2BW0` reads as `2B`); this one refuses what it does not know.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from penstock.errors import FileError, ScheduleError
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.updates import with_updates


def to_csv(schedule: Schedule) -> str:
    """The schedule in torch's form. U ops are left out: torch has none, the user steps the optimizer after each batch.

    Raises:
        ScheduleError: torch cannot express it: a stage with copies on several ranks, or an asynchronous schedule.
    """
    if not schedule.synchronous:
        raise ScheduleError(f"{schedule.name} is asynchronous: torch's CSV has no optimizer step and no weight versions")
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        if len(ranks) > 1:
            raise ScheduleError(f"stage {stage} has copies on ranks {', '.join(map(str, ranks))}: "
                                "torch's CSV has each stage on one rank")  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for program in schedule.programs:
        # A rank without ops is one idle slot: a blank line would be lost at the end of the file.
        writer.writerow([str(op) for op in program if op.kind is not Kind.U] or [""])
    return text.getvalue()


def from_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule in `text`. Every stage gets its U right after its last backward. Run `verify` on the result.

    Raises:
        FileError: a cell is not a compute op; the message names row, column and cell.
    """
    programs = []
    try:
        rows = list(csv.reader(io.StringIO(text.strip("\r\n"), newline="")))
    except csv.Error as error:
        raise FileError(f"this is no CSV: {error}") from error
    if not any(cell.strip() for row in rows for cell in row):
        raise FileError("the CSV has no ops: one row per rank, with cells such as 2F0, is needed")
    for row_number, row in enumerate(rows, start=1):
        if not row:
            raise FileError(f'row {row_number} is blank: take it out, or write "" for a rank without ops')
        ops: list[Op] = []
        for column, cell in enumerate(row, start=1):
            if not cell.strip():
                continue
            try:
                op = Op.parse(cell)
            except ScheduleError as error:
                raise FileError(f"row {row_number}, column {column}: {error}. Communication cells and overlaps are not "
                                "read: export the schedule as 'compute_only'") from error  # fmt: skip
            if op.kind is Kind.U:
                raise FileError(f"row {row_number}, column {column}: {cell!r} is not one of torch's kinds F B I W")
            ops.append(op)
        programs.append(with_updates(ops))
    return Schedule(tuple(programs), name)


def read_csv(path: str | Path) -> Schedule:
    """The schedule in the file at `path`, named after the file.

    Raises:
        FileError: the file is missing or not of that form.
    """
    file = Path(path)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read the schedule {file}: {getattr(error, 'strerror', None) or error}") from error
    return from_csv(text, file.stem)
