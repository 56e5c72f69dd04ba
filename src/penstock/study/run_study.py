"""A whole study: its cells run or read from records, its report written, in one folder."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.report.document import Facts, Report
from penstock.study.catalogue import StudyEntry
from penstock.study.cell import Cell
from penstock.study.records import Record, Records
from penstock.study.runner import Progress, RunOptions, run_cells
from penstock.study.settings import Settings


@dataclass(frozen=True)
class StudyRun:
    """A study that has run.

    Attributes:
        cells: all cells, those left out included.
        records: of the cells that have one.
        report: on them.
        machine: facts of the machine on which the study began.
    """

    cells: tuple[Cell, ...]
    records: tuple[Record, ...]
    report: Report
    machine: dict[str, str]


def select_cells(cells: Sequence[Cell], only: str) -> list[Cell]:
    """Return the cells whose text contains another text.

    Raises:
        SettingError: there are none.
    """
    selected = [cell for cell in cells if only in str(cell)]
    if not selected:
        example = str(cells[0]) if cells else "none"
        raise SettingError(f"--only {only}: no cell contains it; the first of all is: {example}")
    return selected


def run_study(
    entry: StudyEntry,
    settings: Settings,
    options: RunOptions,
    progress: Progress,
    only: str = "",
) -> StudyRun:
    """Run the cells of a study that have no record yet, and make its report.

    Args:
        entry: the study.
        settings: of its cells.
        options: how to run them.
        progress: to show.
        only: run only cells whose text contains this; the report has all cells that have a record.

    Raises:
        PenstockError: the settings are impossible, or the folder cannot be used.
    """
    study = entry.study()
    cells = study.cells(settings)
    selected = select_cells(cells, only) if only else cells
    records = Records(options.folder, entry.name, machine_facts())
    run_cells(entry, selected, records, options, progress)
    return make_run(entry, settings, cells, records)


def make_run(
    entry: StudyEntry, settings: Settings, cells: Sequence[Cell], records: Records
) -> StudyRun:
    """Make the report on the records of some cells."""
    finished = records.of(cells)
    report = entry.study().report(settings, finished)
    facts = Facts((*report.facts.items, *sorted(records.machine.items())))
    report = Report(report.title, report.pages, facts)
    return StudyRun(tuple(cells), tuple(finished), report, records.machine)


def machine_facts() -> dict[str, str]:
    """Return facts of this machine on which times depend."""
    import torch

    from penstock.measure.profiler import machine_facts as device_facts

    return {
        **device_facts(torch.device("cpu")),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
