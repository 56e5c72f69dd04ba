"""All studies by name, one file per study in `studies/`.

A study is a class with two methods:

    @register("depth", about="How does the number of stages act?", measure=measure)
    class Depth:
        def cells(self, settings: Settings) -> list[Cell]: ...
        def report(self, settings: Settings, records: Sequence[Record]) -> Report: ...

`measure(cell, folder) -> Outcome` runs one cell, in a fresh process of its own. Without it the
system of the cell is trained with `penstock.peers`, see `train_cell.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.registry import Registry
from penstock.report.document import Report
from penstock.study.cell import Cell
from penstock.study.records import Outcome, Record
from penstock.study.settings import Settings


class Study(Protocol):
    """A question, as cells to run and a report on their records."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return all cells in the order of running.

        Raises:
            PenstockError: the settings are impossible.
        """
        ...

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return the report. Records of some cells may be missing."""
        ...


#: Runs a cell in its own process. `folder` is the study's, for files that cells share.
Measure = Callable[[Cell, Path], Outcome]

STUDIES: Registry[Callable[[], Study]] = Registry("study", "penstock.study.studies")
#: Enter a study. The facts are the fields of `StudyEntry`.
register = STUDIES.register


@dataclass(frozen=True)
class StudyEntry:
    """A study of the catalogue.

    Attributes:
        name: of the study.
        study: makes it.
        about: the question, in a sentence.
        measure: runs a cell; None: the cell's system is trained.
        limit_s: time limit of a cell at the small scale; at the full scale there is none by
            default.
        in_turn: whether the systems of cells that are otherwise equal take steps in turn, in one
            run; such cells are run and resumed together.
    """

    name: str
    study: Callable[[], Study]
    about: str
    measure: Measure | None = None
    limit_s: float = 120.0
    in_turn: bool = False


def study_entry(name: str) -> StudyEntry:
    """Return the study called `name`.

    Raises:
        UnknownName: there is none.
    """
    entry = STUDIES.find(name)
    facts: dict[str, Any] = dict(entry.facts)
    return StudyEntry(entry.name, entry.make, **facts)


def studies() -> dict[str, StudyEntry]:
    """Return all studies by name."""
    return {name: study_entry(name) for name in STUDIES.entries()}
