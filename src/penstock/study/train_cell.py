"""Run the cells of a study that trains systems: from a cell to a setup, and from its run to an
outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SettingError
from penstock.peers.catalogue import TRAINING_OPTIONS, system
from penstock.peers.cuts import Cuts
from penstock.peers.host import Host
from penstock.peers.plain import Plain
from penstock.peers.setup import Setup
from penstock.peers.training import Length, train
from penstock.study.cell import Cell
from penstock.study.records import Outcome

#: Of a cell without a balance: cut where the slowest stage is fastest.
DEFAULT_BALANCE = "bottleneck"


@dataclass(frozen=True)
class Prepared:
    """A cell that is ready to run: its setup, with the cut."""

    cell: Cell
    setup: Setup


def setup_of_cell(cell: Cell) -> Setup:
    """Return the setup of a cell, without its cut.

    Raises:
        SettingError: the learning rate or the momentum is no number.
    """
    options = dict(cell.options)
    training: dict[str, float] = {}
    for name in TRAINING_OPTIONS:
        value = options.pop(name, None)
        if value is not None:
            training[name] = _number(name, value)
    return Setup(
        model=cell.model,
        model_options=dict(cell.model_options),
        data=cell.data,
        batch=cell.batch,
        stages=cell.stages,
        micro_batches=cell.micro_batches,
        schedule=cell.schedule,
        options=options,
        learning_rate=training.get("lr", Setup.learning_rate),
        momentum=training.get("momentum", Setup.momentum),
        memory_limit=int(training.get("memory_limit", Setup.memory_limit)),
        seed=cell.repetition,
    )


def _number(name: str, value: Plain) -> float:
    """Return an option as a number; reject other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"option {name}: must be a number, not {value!r}")
    return float(value)


def prepare(cell: Cell, cuts: Cuts) -> Prepared:
    """Cut the model for a cell, or plan it. Runs in the main thread: it may measure.

    Raises:
        PenstockError: the cell is impossible.
        PeerFailed: the model could not be measured.
    """
    setup = setup_of_cell(cell)
    if system(cell.system).pipeline:
        setup = cuts.with_lengths(setup, cell.balance or DEFAULT_BALANCE)
    if cell.schedule == "auto":
        setup = cuts.with_plan(setup)
    return Prepared(cell, setup)


def train_prepared(prepared: Prepared, host: Host, log: Path, limit_s: float) -> Outcome:
    """Train the system of a cell, in processes forked from its host.

    Raises:
        PeerMissing, PeerFailed, PeerTimeout, Refused: see `train`.
    """
    cell, setup = prepared.cell, prepared.setup
    chosen = system(cell.system)
    length = Length(cell.steps, cell.epochs, warm=0 if cell.epochs else 1)
    result = train(chosen, setup, host, log, length, limit_s=limit_s)
    extra = {
        "lengths": list(setup.lengths),
        "ranks": result.ranks,
        "threads": result.threads,
        "whole_peaks": result.whole_peaks,
        "steps_per_unit": result.steps_per_unit,
        "notes": result.notes,
        "versions": host.ready(),
    }
    if setup.halves is not None:
        extra["halves"] = list(setup.halves)
    return Outcome(result.seconds, result.losses, result.peak_bytes, result.unit, extra)
