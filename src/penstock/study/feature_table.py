"""Features of pipeline libraries, each with the place where it is seen: data/table1.yaml.

The rows extend table 1 of Núñez et al. 2024, "A Study of Pipeline Parallelism in Deep Neural
Networks", which compares torchgpipe, FairScale and DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from penstock.errors import FileError
from penstock.files.read import parse_yaml
from penstock.report.document import Column, Table

_FILE = "table1.yaml"


@dataclass(frozen=True)
class Library:
    """A library at the version that the table describes.

    Attributes:
        name: for example "DeepSpeed".
        version: the version or, for a snapshot of a branch, the version that it states and its day.
        repository: address of the repository; empty for Penstock, whose files are in this project.
        ref: tag or commit of that version in the repository.
    """

    name: str
    version: str
    repository: str
    ref: str

    def address(self, where: str) -> str:
        """Return the address of a cell's file; for one of Penstock, its path in the project."""
        if where.startswith("https://"):
            return where
        if where.startswith("./") or not self.repository:
            return where.removeprefix("./")
        return f"{self.repository}/blob/{self.ref}/{where}"


@dataclass(frozen=True)
class Cell:
    """What a library does about a feature.

    Attributes:
        value: in a few words; "no" if the library does not have it.
        version: of the library, for which the value holds.
        where: a file in the library's repository at that version, or an address. For Penstock, and
            with "./" in front, a file of this project.
        evidence: a phrase of that file by which the place is found. Empty if the file as a whole
            shows it, or if the value is "no" and the file is where the feature would be.
    """

    value: str
    version: str
    where: str
    evidence: str = ""


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
        name: identifier of the row.
        title: text of the first column.
        about: what the row says, in a sentence.
        cells: one per library, in the order of the table's libraries.
    """

    name: str
    title: str
    about: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class FeatureTable:
    """All libraries and features.

    Attributes:
        libraries: the columns.
        features: the rows.
    """

    libraries: tuple[Library, ...]
    features: tuple[Feature, ...]

    def feature(self, name: str) -> Feature:
        """Return the row called `name`.

        Raises:
            KeyError: there is none.
        """
        for feature in self.features:
            if feature.name == name:
                return feature
        raise KeyError(name)


@dataclass(frozen=True)
class _CellEntry:
    """A cell in the file; without a version, the library's holds."""

    value: str
    where: str
    evidence: str = ""
    version: str = ""


@dataclass(frozen=True)
class _FeatureEntry:
    """A row in the file; its cells by name of the library."""

    name: str
    title: str
    about: str
    cells: dict[str, _CellEntry]


@dataclass(frozen=True)
class _File:
    """The file."""

    libraries: tuple[Library, ...]
    features: tuple[_FeatureEntry, ...]


def feature_table() -> FeatureTable:
    """Return the table that the package contains."""
    file = resources.files("penstock.study") / "data" / _FILE
    return parse_feature_table(file.read_text(encoding="utf-8"), _FILE)


def parse_feature_table(text: str, source: str) -> FeatureTable:
    """Read a table.

    Args:
        text: YAML of the form of data/table1.yaml.
        source: place of the text, for messages.

    Raises:
        FileError: the text is no strict YAML, has unknown, missing or empty fields, names a feature
            or library twice, or a feature has no cell for a library or a cell for an unknown one.
    """
    content = parse_yaml(text, _File, source, kind="feature table")
    _check_names(source, "library", [library.name for library in content.libraries])
    _check_names(source, "feature", [entry.name for entry in content.features])
    features = tuple(_feature(entry, content.libraries, source) for entry in content.features)
    return FeatureTable(content.libraries, features)


def _check_names(source: str, kind: str, names: list[str]) -> None:
    """Refuse a name that occurs twice."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise FileError(f"{source} has the {kind} {name!r} twice: remove one")


def _feature(entry: _FeatureEntry, libraries: tuple[Library, ...], source: str) -> Feature:
    """Return a row with its cells in the order of the libraries."""
    names = [library.name for library in libraries]
    unknown = [name for name in entry.cells if name not in names]
    if unknown:
        raise FileError(
            f"{source}, feature {entry.name}: there is no library {unknown[0]!r}; "
            f"there are {', '.join(names)}"
        )
    cells = []
    for library in libraries:
        cell = entry.cells.get(library.name)
        if cell is None:
            raise FileError(f"{source}, feature {entry.name}: no cell for {library.name}")
        if not cell.value or not cell.where:
            raise FileError(
                f"{source}, feature {entry.name}, {library.name}: value and where must not be empty"
            )
        version = cell.version or library.version
        cells.append(Cell(cell.value, version, cell.where, cell.evidence))
    return Feature(entry.name, entry.title, entry.about, tuple(cells))


def overview(table: FeatureTable) -> Table:
    """Return the values: a row per feature, a column per library."""
    columns = [Column("feature")]
    for library in table.libraries:
        columns.append(Column(library.name, about=f"version {library.version}"))
    rows = []
    for feature in table.features:
        rows.append((feature.title, *(cell.value for cell in feature.cells)))
    return Table(
        name="libraries",
        title="Features of pipeline libraries",
        columns=tuple(columns),
        rows=tuple(rows),
        caption="Table 1 of the study, with four more libraries and more features.",
        source=(_FILE,),
    )


def sources(table: FeatureTable) -> Table:
    """Return where each value is seen: a row per cell."""
    rows = []
    for index, library in enumerate(table.libraries):
        for feature in table.features:
            cell = feature.cells[index]
            address = library.address(cell.where)
            rows.append((library.name, feature.title, cell.version, address, cell.evidence))
    return Table(
        name="libraries-sources",
        title="Where the features are seen",
        columns=tuple(map(Column, ("library", "feature", "version", "where", "phrase"))),
        rows=tuple(rows),
        source=(_FILE,),
    )
