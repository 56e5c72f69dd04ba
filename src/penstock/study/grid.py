"""A study from a YAML file: the Cartesian product of the values of a cell's fields.

title: How many micro-batches?
system: [penstock, torch]
schedule: [1f1b, gpipe]
stages: [2, 4]
micro_batches: [4, 8]
model: mlp
model_options: {layers: 6}
data: random
batch: 32
steps: 10
repetitions: 3
exclude:
  - {system: torch, schedule: gpipe}
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.errors import SettingError, UnknownName
from penstock.files.read import read_yaml
from penstock.files.text import quote
from penstock.peers.catalogue import System, systems
from penstock.peers.cuts import cut_method, is_method, parse_lengths
from penstock.peers.plain import Plain
from penstock.report.document import Page, Report, Section
from penstock.study.catalogue import StudyEntry
from penstock.study.cell import Cell, options
from penstock.study.records import Record
from penstock.study.settings import Settings
from penstock.study.tables import record_table

#: Cells of a grid at most, so that a typing error does not start a study of years.
_MAX_CELLS = 10_000


@dataclass(frozen=True)
class GridFile:
    """Content of the file. Every field but `title`, `repetitions` and `exclude` has one value or a
    list of values.
    """

    system: str | list[str]
    model: str | list[str]
    data: str | list[str]
    batch: int | list[int]
    title: str = ""
    schedule: str | list[str] = ""
    stages: int | list[int] = 1
    micro_batches: int | list[int] = 1
    balance: str | list[str] = "bottleneck"
    model_options: dict[str, Plain] | list[dict[str, Plain]] = field(default_factory=dict)
    options: dict[str, Plain] | list[dict[str, Plain]] = field(default_factory=dict)
    epochs: int | list[int] = 0
    steps: int | list[int] = 0
    repetitions: int = 1
    exclude: list[dict[str, Plain]] = field(default_factory=list)


#: Fields whose values are multiplied.
_AXES = tuple(
    entry.name
    for entry in fields(GridFile)
    if entry.name not in ("title", "repetitions", "exclude")
)
_COUNTS = ("stages", "micro_batches", "batch")


def grid_entry(path: Path) -> StudyEntry:
    """Return the study that a YAML file describes.

    Raises:
        FileError: the file cannot be read or is not of this form.
        PenstockError: a name in it is unknown, or a number is out of range.
    """
    grid = read_yaml(path, GridFile, kind="study")
    name = path.stem
    study = Grid(name, grid, str(path))
    # Its cells are not needed yet: this raises what is wrong with the file.
    study.cells(Settings())
    about = grid.title or f"The grid of {path.name}."
    return StudyEntry(name, lambda: study, about, limit_s=600.0)


@dataclass(frozen=True)
class Grid:
    """A study of all combinations of some values."""

    name: str
    grid: GridFile
    source: str

    def cells(self, settings: Settings) -> list[Cell]:
        """Return a cell per combination that is not excluded, times the repetitions."""
        self._check()
        axes = {name: _values(getattr(self.grid, name)) for name in _AXES}
        if settings.data:
            axes["data"] = [settings.data]
        repetitions = settings.repetitions or self.grid.repetitions
        cells = []
        for values in itertools.product(*axes.values()):
            combination = dict(zip(axes, values, strict=True))
            if not any(_matches(combination, pattern) for pattern in self.grid.exclude):
                cells += [self._cell(combination, seed) for seed in range(repetitions)]
        if not cells:
            raise SettingError(f"{self.source}: every combination is excluded")
        self._check_models(cells)
        return list(dict.fromkeys(cells))

    def _cell(self, combination: Mapping[str, Any], repetition: int) -> Cell:
        """Return the cell of a combination."""
        values = dict(combination)
        values["model_options"] = options(values["model_options"])
        values["options"] = options(values["options"])
        return Cell(self.name, repetition=repetition, **values)

    def _check(self) -> None:
        """Check every value of the file.

        Raises:
            PenstockError: a name is unknown, or a number out of range; the message names the file.
        """
        # Imported here, since it loads torch: a mistake in the file is reported before.
        from penstock.zoo.catalogue import models

        grid = self.grid
        systems_by_name = systems()
        chosen = []
        for name in _values(grid.system):
            if name not in systems_by_name:
                raise UnknownName("system", name, systems_by_name)
            chosen.append(systems_by_name[name])
        for name in _values(grid.model):
            if name not in models():
                raise UnknownName("model", name, models())
        self._check_schedules(chosen)
        for balance in _values(grid.balance):
            _ = cut_method(balance) if is_method(balance) else parse_lengths(balance)
        for name in _COUNTS:
            for count in _values(getattr(grid, name)):
                if count < 1:
                    raise SettingError(f"{self.source}: {name} {count}: must be at least 1")
        self._check_length()
        unknown = {key for pattern in grid.exclude for key in pattern} - set(_AXES)
        if unknown:
            raise SettingError(
                f"{self.source}: exclude has the unknown key {quote(min(unknown))}; known: "
                f"{', '.join(_AXES)}"
            )
        self._check_size()

    def _check_models(self, cells: Sequence[Cell]) -> None:
        """Refuse options that a model does not take, by making every model once without memory.

        Raises:
            SettingError: an option is unknown to its model, or its value is invalid.
        """
        from penstock.zoo.catalogue import model

        for name, values in dict.fromkeys((cell.model, cell.model_options) for cell in cells):
            try:
                model(name, device="meta", **dict(values))
            except SettingError as error:
                raise SettingError(f"{self.source}: model_options: {error}") from error

    def _check_schedules(self, chosen: Sequence[System]) -> None:
        """Reject schedules that none of the chosen systems has."""
        schedules = {""}
        for system in chosen:
            schedules.update(system.schedules)
        for name in _values(self.grid.schedule):
            if name not in schedules:
                raise UnknownName("schedule of these systems", name, sorted(schedules - {""}))

    def _check_length(self) -> None:
        """Refuse runs without a step."""
        lengths = [*_values(self.grid.steps), *_values(self.grid.epochs)]
        if min(lengths) < 0 or max(lengths) < 1 or self.grid.repetitions < 1:
            raise SettingError(f"{self.source}: steps or epochs, and repetitions: at least 1")

    def _check_size(self) -> None:
        """Refuse more cells than anyone wants to run."""
        count = self.grid.repetitions
        for name in _AXES:
            count *= len(_values(getattr(self.grid, name)))
        if count > _MAX_CELLS:
            raise SettingError(f"{self.source}: {count:,} cells, more than {_MAX_CELLS:,}")

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return one table with a row per combination."""
        del settings
        title = self.grid.title or self.name
        table = record_table("cells", title, records)
        ended = sum(record.ok for record in records)
        summary = (f"{ended} of {len(records)} runs ended.",)
        page = Page("cells", title, (Section("Cells", (table,)),), summary=summary)
        return Report(title, (page,))


def _values(value: Any) -> list[Any]:
    """Return a setting's values as a list; a single value is a list of one."""
    return list(value) if isinstance(value, list) else [value]


def _matches(combination: Mapping[str, Any], pattern: Mapping[str, Plain]) -> bool:
    """Return whether a combination has all values of a pattern."""
    return all(combination[name] == value for name, value in pattern.items())
