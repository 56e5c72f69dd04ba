"""Run the systems of equal cells in turn, in one run, and record each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.files.text import one_line
from penstock.peers.catalogue import system
from penstock.peers.cuts import Cuts
from penstock.peers.hosts import Hosts
from penstock.peers.measuring import BOUND, Comparison, Entrant, Row, Rules
from penstock.study.cell import Cell
from penstock.study.records import Extra, Outcome, Record, status_of_error
from penstock.study.train_cell import DEFAULT_BALANCE, Prepared, prepare, setup_of_cell

if TYPE_CHECKING:
    from penstock.study.runner import RunOptions

#: Others are compared with Penstock's 1F1B.
REFERENCE = ("penstock", "1f1b")


def run_in_turn(
    cells: Sequence[Cell], options: RunOptions, hosts: Hosts, cuts: Cuts
) -> list[Record]:
    """Return the records of cells that differ in system, schedule and options only.

    A record's `seconds` are the medians of its rounds. Its `extra` has all steps of all rounds, by
    the number of the round, so that a ratio to another system is that of the same round.

    Args:
        cells: with equal model, data, batch, stages and micro-batches.
        options: how to run.
        hosts: of the systems.
        cuts: of the study.
    """
    started = time.monotonic()
    records: dict[Cell, Record] = {}
    prepared: dict[str, Prepared] = {}
    for cell in cells:
        try:
            hosts.of(system(cell.system)).ready()
            prepared[_name(cell)] = prepare(cell, cuts)
        except PenstockError as error:
            records[cell] = Record(cell, status_of_error(error), one_line(error))
    log = options.folder / "logs" / f"{cells[0].file_name}.txt"
    log.unlink(missing_ok=True)
    if prepared:
        rows = _compare(prepared, options, hosts, cuts, log)
        # The systems ran in turn: each is charged an equal part.
        wall_s = round((time.monotonic() - started) / len(rows), 3)
        for row in rows:
            ready = prepared[row.name]
            records[ready.cell] = _record(ready, row, hosts, wall_s)
    return [records[cell] for cell in cells]


def _name(cell: Cell) -> str:
    """Return the name of a cell's system, as in tables."""
    return BOUND if cell.system == BOUND else cell.system_label


def _compare(
    prepared: dict[str, Prepared], options: RunOptions, hosts: Hosts, cuts: Cuts, log: Path
) -> list[Row]:
    """Measure the systems of prepared cells in turn."""
    entrants = []
    for name, ready in prepared.items():
        chosen = system(ready.cell.system)
        entrants.append(Entrant(name, chosen, ready.setup, hosts.of(chosen)))
    first = next(iter(prepared.values())).cell
    rounds = first.steps
    reference = " ".join(REFERENCE)
    rules = Rules(
        reference,
        rounds=rounds,
        long_rounds=max(1, (rounds + 1) // 2),
        limit_s=min(options.limit_s, 600.0),
        realtime=options.realtime,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-gradients-") as folder:
        path = Path(folder) / "gradients.safetensors"
        names = cuts.gradients(setup_of_cell(first), path)
        return Comparison(entrants, (path, names), rules, log).run()


def _record(ready: Prepared, row: Row, hosts: Hosts, wall_s: float) -> Record:
    """Return the record of a measured system."""
    cell, setup = ready.cell, ready.setup
    if row.status != "ok" or not row.rounds:
        status = row.status if row.status != "ok" else "failed"
        return Record(cell, status, row.reason or "no round was measured", wall_s=wall_s)
    extra: Extra = {
        "rounds": {str(number): steps for number, steps in row.rounds.items()},
        "bounds": {str(number): list(pair) for number, pair in row.parts.items()},
        "gradient_error": row.gradient_error,
        "idle_s": row.idle_s,
        "whole_peaks": row.whole_peaks,
        "ranks": row.ranks,
        "threads": row.threads,
        "lengths": list(setup.lengths),
        "halves": list(setup.halves or ()),
        "balance": cell.balance or DEFAULT_BALANCE,
        "versions": hosts.of(system(cell.system)).ready(),
    }
    outcome = Outcome(tuple(row.seconds()), peak_bytes=tuple(row.peaks), extra=extra)
    if row.reason:
        return Record(cell, "failed", row.reason, outcome, wall_s)
    return Record(cell, "ok", "", outcome, wall_s)
