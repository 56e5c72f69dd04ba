"""`penstock study NAME|FILE`: run the cells of a study, list them, install other libraries."""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli.progress_bar import bar_with_lines
from penstock.cli.studies.study_convergence import NAME as CONVERGENCE
from penstock.errors import SettingError, UnknownName
from penstock.text_table import aligned
from penstock.units import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from penstock.study.catalogue import StudyEntry
    from penstock.study.cell import Cell
    from penstock.study.records import Record
    from penstock.study.run_study import StudyRun
    from penstock.study.settings import Settings

#: Endings by which a name is taken for a file.
_FILE_SUFFIXES = (".yaml", ".yml")
_CONVERGENCE_ABOUT = "Which weight rules lose accuracy, and when? (own flags, see --help)"


@dataclass(frozen=True)
class Flags:
    """Flags of the command line."""

    scale: str = "small"
    data: str | None = None
    repetitions: int | None = None
    only: str = ""
    out: Path | None = None
    jobs: int = 1
    limit_s: float | None = None
    retry: bool = False
    realtime: bool = False
    environments: tuple[str, ...] = ()

    def refuse_all(self, study: str) -> None:
        """Refuse flags that were passed to a study that does not have them.

        Raises:
            SettingError: one was passed.
        """
        for entry in fields(self):
            shared = entry.name in ("out", "jobs")
            if not shared and getattr(self, entry.name) != entry.default:
                flag = {"environments": "environment"}.get(entry.name, entry.name)
                raise SettingError(
                    f"the study {study} has no --{flag.replace('_', '-')}; see its flags in "
                    "penstock study --help"
                )


def print_studies(*, json: bool) -> None:
    """Print all studies with their questions."""
    from penstock.study.catalogue import studies

    abouts = {name: entry.about for name, entry in studies().items()}
    abouts[CONVERGENCE] = _CONVERGENCE_ABOUT
    if json:
        print(json_module.dumps(dict(sorted(abouts.items())), indent=1))
        return
    print("\n".join(line.rstrip() for line in aligned(sorted(abouts.items()))))


def install_peers(names: Sequence[str]) -> None:
    """Install libraries, and print where they are."""
    from penstock.peers.environments import install

    for name, folder in install(names).items():
        print(f"{name}: installed in {folder}")


def _entry(name: str, flags: Flags) -> tuple[StudyEntry, Settings]:
    """Return the study and its settings.

    Raises:
        PenstockError: there is no such study, the file is not valid, or a setting is not.
    """
    from penstock.study.catalogue import study_entry
    from penstock.study.grid import grid_entry
    from penstock.study.settings import Settings

    settings = Settings(flags.scale, flags.data or "", flags.repetitions)  # type: ignore[arg-type]  # checked there
    if name.endswith(_FILE_SUFFIXES) or "/" in name:
        return grid_entry(Path(name)), settings
    try:
        return study_entry(name), settings
    except UnknownName as error:
        # The study of convergence has flags of its own, and is not in the catalogue.
        raise UnknownName("study", name, sorted((*error.valid_names, CONVERGENCE))) from None


def print_cells(name: str, flags: Flags, *, json: bool) -> None:
    """Print the cells of a study."""
    from penstock.study.run_study import select_cells

    entry, settings = _entry(name, flags)
    cells = entry.study().cells(settings)
    if flags.only:
        cells = select_cells(cells, flags.only)
    if json:
        print(json_module.dumps([asdict(cell) for cell in cells], indent=1))
        return
    for cell in cells:
        print(cell)
    typer.echo(f"{len(cells)} cells", err=True)


def run(name: str, flags: Flags, *, json: bool) -> None:
    """Run a study, print its report and write its files.

    Raises:
        PenstockError: the study, a setting or the folder is not valid.
        RunError: no cell has a result.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from penstock.peers.environments import find_environments
    from penstock.report.text import report_text
    from penstock.study.report_files import write_report
    from penstock.study.run_study import run_study
    from penstock.study.runner import NO_LIMIT_S, RunOptions

    entry, settings = _entry(name, flags)
    if flags.limit_s is not None and not 0 < flags.limit_s < float("inf"):
        raise SettingError(f"--limit-s {flags.limit_s:g}: must be above 0")
    if flags.realtime:
        _check_realtime(entry)
    limit_s = entry.limit_s if settings.scale == "small" else NO_LIMIT_S
    options = RunOptions(
        folder=flags.out or Path("runs") / entry.name,
        jobs=flags.jobs,
        limit_s=flags.limit_s or limit_s,
        retry=flags.retry,
        realtime=flags.realtime,
        environments=find_environments(flags.environments),
    )
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[left]}  {task.description}"),
    )
    with bar_with_lines(*columns, quiet=json) as (bar, say):
        study_run = run_study(entry, settings, options, _Progress(bar, say), flags.only)
    print(_as_json(study_run) if json else report_text(study_run.report))
    write_report(study_run.report, options.folder)
    typer.echo(f"results are in {options.folder}", err=True)


def _check_realtime(entry: StudyEntry) -> None:
    """Check that a study's systems can run before all other processes of the host.

    Raises:
        SettingError: they do not take turns, or the user may not schedule them so.
    """
    if not entry.in_turn:
        raise SettingError(
            f"--realtime: the systems of {entry.name} do not take turns; those of libraries do"
        )
    if os.geteuid() != 0:
        raise SettingError("--realtime: only root may run processes before all others")


def _as_json(study_run: StudyRun) -> str:
    """Write the records and the tables of a study as JSON."""
    from penstock.report.document import Table

    tables = {}
    for page in study_run.report.pages:
        for section in page.sections:
            for block in section.blocks:
                if isinstance(block, Table):
                    tables[block.name] = asdict(block)
    content = {
        "schema": 1,
        "machine": study_run.machine,
        "cells": len(study_run.cells),
        "records": [asdict(record) for record in study_run.records],
        "tables": tables,
    }
    return json_module.dumps(content, indent=1)


class _Progress:
    """Prints a line per cell that ends, and updates a bar."""

    def __init__(self, bar: Bar, say: Callable[[str], None]) -> None:
        self._bar, self._say = bar, say
        self._task = bar.add_task("", total=None, left="")

    def start(self, pending: int, total: int) -> None:
        """See `penstock.study.runner.Progress`."""
        self._bar.update(self._task, total=pending)
        if pending < total:
            self._say(f"{total - pending} of {total} cells have a record already")

    def begin(self, cells: Sequence[Cell]) -> None:
        """See `penstock.study.runner.Progress`."""
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        self._bar.update(self._task, description=f"{cells[0]}{more}")

    def end(self, record: Record, left_s: float) -> None:
        """See `penstock.study.runner.Progress`."""
        left = f"{format_seconds(left_s)} left"
        self._bar.update(self._task, advance=1, left=left)
        detail = f"{record.wall_s:.1f} s"
        if not record.ok:
            detail = f"{record.status}: {record.reason}"
        self._say(f"{record.cell}: {detail} ({left})")
