"""Run the cells of a study that have no record yet, each in fresh processes with a time limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from penstock.errors import PenstockError
from penstock.files.read import validate
from penstock.files.text import one_line
from penstock.peers.catalogue import system
from penstock.peers.cuts import Cuts
from penstock.peers.host import Host
from penstock.peers.hosts import Hosts
from penstock.peers.team import Team
from penstock.study.catalogue import STUDIES, StudyEntry
from penstock.study.cell import Cell
from penstock.study.in_turn import run_in_turn
from penstock.study.records import Outcome, Record, Records, status_of_error
from penstock.study.train_cell import prepare, train_prepared

#: Modules of the process from which cells with a function of their own are forked.
CELL_MODULES = ("penstock.study.cell_commands", "penstock.runtime.pipeline")
_CELL_HOST = "cells"
#: Seconds that stand for "no limit".
NO_LIMIT_S = 30 * 86_400.0


@dataclass(frozen=True)
class RunOptions:
    """How to run cells.

    Attributes:
        folder: of the study.
        jobs: number of cells to run at the same time. Times of cells that ran at the same time
            depend on each other.
        limit_s: time limit of a cell.
        retry: whether to run cells again that have a record of a failure.
        environments: folder of a library, by the name of its system.
        realtime: whether processes are scheduled before all others of the host (needs root).
    """

    folder: Path
    jobs: int = 1
    limit_s: float = NO_LIMIT_S
    retry: bool = False
    environments: Mapping[str, Path] = field(default_factory=dict)
    realtime: bool = False


class Progress(Protocol):
    """Shows the progress of a study."""

    def start(self, pending: int, total: int) -> None:
        """Begin: `pending` of `total` cells have to run."""
        ...

    def begin(self, cells: Sequence[Cell]) -> None:
        """Show that some cells begin to run."""
        ...

    def end(self, record: Record, left_s: float) -> None:
        """Show the record of a cell, and an estimate of the seconds left."""
        ...


#: Cells that run together: one, or those whose systems take steps in turn.
Unit = tuple[Cell, ...]


def run_cells(
    entry: StudyEntry,
    cells: Sequence[Cell],
    records: Records,
    options: RunOptions,
    progress: Progress,
) -> None:
    """Run the cells that have no record yet, and add their records.

    A record is written when its cell ends, so that an interrupt loses only the cells in progress.
    All processes end with this function, however it ends.

    Raises:
        FileError: a record cannot be written.
        KeyboardInterrupt: after Ctrl-C.
    """
    pending = pending_units(entry, cells, records, retry=options.retry)
    count = sum(map(len, pending))
    progress.start(count, len(cells))
    if not pending:
        return
    logs = options.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    done = 0
    with Hosts(options.environments, logs) as hosts:
        executor = _Executor(entry, options, hosts, logs)
        for unit_records in executor.run(pending, progress):
            done += len(unit_records)
            left_s = (time.monotonic() - started) / done * (count - done)
            for record in unit_records:
                records.add(record)
                progress.end(record, left_s)


def pending_units(
    entry: StudyEntry, cells: Sequence[Cell], records: Records, *, retry: bool
) -> list[Unit]:
    """Return the cells to run, in units that run together.

    A cell runs if it has no record; with `retry` also if its record has no outcome, unless the
    study chose to skip it.
    """
    units: dict[object, list[Cell]] = {}
    for index, cell in enumerate(cells):
        key = comparison(cell) if entry.in_turn else index
        units.setdefault(key, []).append(cell)
    pending = []
    for unit in units.values():
        unit_records = [records.get(cell) for cell in unit]
        if any(_must_run(record, retry=retry) for record in unit_records):
            pending.append(tuple(unit))
    return pending


def comparison(cell: Cell) -> Cell:
    """Return what cells have in common whose systems are compared in turn."""
    return replace(cell, system="", schedule="", options=())


def _must_run(record: Record | None, *, retry: bool) -> bool:
    """Whether a cell with this record has to run."""
    if record is None:
        return True
    return retry and record.status not in ("ok", "skipped")


class _Executor:
    """Runs units of cells."""

    def __init__(self, entry: StudyEntry, options: RunOptions, hosts: Hosts, logs: Path) -> None:
        self._entry = entry
        self._options = options
        self._hosts = hosts
        self._logs = logs

    def run(self, units: Sequence[Unit], progress: Progress) -> Iterator[list[Record]]:
        """Yield the records of each unit when it ends.

        Everything that starts hosts or measures happens in this thread, between other cells.
        """
        if self._options.jobs == 1 or self._entry.in_turn:
            for unit in units:
                progress.begin(unit)
                yield self._prepare(unit)()
            return
        with _interruptible(ThreadPoolExecutor(self._options.jobs), self._hosts) as pool:
            running: set[Future[list[Record]]] = set()
            for unit in units:
                if len(running) >= self._options.jobs:
                    ended, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in ended)
                progress.begin(unit)
                running.add(pool.submit(self._prepare(unit)))
            while running:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in ended)

    def _prepare(self, unit: Unit) -> Callable[[], list[Record]]:
        """Start what a unit needs, outside of its time limit; return the function that runs it.

        What fails here is a record with an error too.
        """
        if self._entry.in_turn:
            return lambda: run_in_turn(unit, self._options, self._hosts, self._cuts())
        (cell,) = unit
        started = time.monotonic()
        log = self._logs / f"{cell.file_name}.txt"
        log.unlink(missing_ok=True)
        try:
            if self._entry.measure is not None:
                host = self._cell_host()
                host.ready()
                return lambda: [_recorded(cell, lambda: self._measure(cell, host, log), log)]
            host = self._hosts.of(system(cell.system))
            host.ready()
            prepared = prepare(cell, self._cuts())
        except PenstockError as error:
            wall_s = _since(started)
            record = Record(cell, status_of_error(error), one_line(error), wall_s=wall_s)
            return lambda: [record]
        limit_s = self._options.limit_s
        return lambda: [_recorded(cell, lambda: train_prepared(prepared, host, log, limit_s), log)]

    def _cuts(self) -> Cuts:
        """Return the cuts of models, from profiles that are measured once per study."""
        host = self._hosts.of(system("penstock"))
        return Cuts(self._options.folder / "profiles", host)

    def _cell_host(self) -> Host:
        """Return the host of cells with a function of their own."""
        # All studies: a forked process looks its own up in the catalogue, which imports them.
        modules = {entry.make.__module__ for entry in STUDIES.entries().values()}
        return self._hosts.start(_CELL_HOST, (*CELL_MODULES, *sorted(modules)))

    def _measure(self, cell: Cell, host: Host, log: Path) -> Outcome:
        """Run the study's own function on a cell, in a process of its own."""
        team = Team(host, 1, log)
        try:
            message = {"cell": asdict(cell), "folder": str(self._options.folder)}
            (answer,) = team.tell("measure", [message], self._options.limit_s)
        finally:
            team.end()
        return validate(json.dumps(answer), Outcome, "an outcome")


def _recorded(cell: Cell, run: Callable[[], Outcome], log: Path) -> Record:
    """Run a cell and return its record, whatever happens."""
    started = time.monotonic()
    try:
        outcome = run()
    except PenstockError as error:
        reason = one_line(error)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{reason}\n")
        return Record(cell, status_of_error(error), reason, wall_s=_since(started))
    return Record(cell, "ok", "", outcome, wall_s=_since(started))


def _since(started: float) -> float:
    """Return the seconds since a time, to milliseconds."""
    return round(time.monotonic() - started, 3)


@contextmanager
def _interruptible(pool: ThreadPoolExecutor, hosts: Hosts) -> Iterator[ThreadPoolExecutor]:
    """End the hosts before waiting for threads, if the study is interrupted: a thread waits for
    processes that would go on.
    """
    try:
        yield pool
    except BaseException:
        hosts.end()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
