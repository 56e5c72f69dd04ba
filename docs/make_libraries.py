"""Write the tables and programs of docs/libraries.md: python docs/make_libraries.py.

They come from libraries.yaml, the features of pipeline libraries, each with the place where it is
seen, and from the programs in examples/libraries. The rows extend table 1 of Núñez et al. 2024, "A
Study of Pipeline Parallelism in Deep Neural Networks", which compares torchgpipe, FairScale and
DeepSpeed.

    python docs/make_libraries.py --check DeepSpeed=/path/to/DeepSpeed torchtitan=/path/to/torchtitan

checks instead that the files of these libraries have the phrases of their cells, in checkouts of the
versions that the table names, or in folders that packages are installed in.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import FileError
from penstock.files.read import parse_yaml

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "libraries.md"
TABLE = DOCS / "libraries.yaml"
PROGRAMS = DOCS.parent / "examples" / "libraries"
#: Libraries that the study compares; they come first in the table.
STUDY = 3
START, END = "<!-- {0}, written by make_libraries.py -->", "<!-- end of {0} -->"


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
class CellEntry:
    """A cell in the file; without a version, the library's holds."""

    value: str
    where: str
    evidence: str = ""
    version: str = ""


@dataclass(frozen=True)
class FeatureEntry:
    """A row in the file; its cells by name of the library."""

    name: str
    title: str
    about: str
    cells: dict[str, CellEntry]


@dataclass(frozen=True)
class TableFile:
    """The file."""

    libraries: tuple[Library, ...]
    features: tuple[FeatureEntry, ...]


def feature_table() -> FeatureTable:
    """Return the table of docs/libraries.yaml."""
    return parse_feature_table(TABLE.read_text(encoding="utf-8"), TABLE.name)


def parse_feature_table(text: str, source: str) -> FeatureTable:
    """Read a table.

    Args:
        text: YAML of the form of libraries.yaml.
        source: place of the text, for messages.

    Raises:
        FileError: the text is no strict YAML, has unknown, missing or empty fields, names a feature
            or library twice, or a feature has no cell for a library or a cell for an unknown one.
    """
    content = parse_yaml(text, TableFile, source, kind="feature table")
    check_names(source, "library", [library.name for library in content.libraries])
    check_names(source, "feature", [entry.name for entry in content.features])
    features = tuple(feature_of(entry, content.libraries, source) for entry in content.features)
    return FeatureTable(content.libraries, features)


def check_names(source: str, kind: str, names: list[str]) -> None:
    """Refuse a name that occurs twice."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise FileError(f"{source} has the {kind} {name!r} twice: remove one")


def feature_of(entry: FeatureEntry, libraries: tuple[Library, ...], source: str) -> Feature:
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


def cell_text(value: object) -> str:
    """Return a value as text that does not end a cell."""
    return str(value).replace("|", "\\|")


def markdown_rows(rows: list[tuple[object, ...]]) -> str:
    """Return a Markdown table; the first row is the head."""
    lines = ["| " + " | ".join(map(cell_text, row)) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def counts() -> str:
    """Return the table of lines per program."""
    counter = runpy.run_path(str(PROGRAMS / "count_lines.py"))
    rows: list[tuple[object, ...]] = [("program", "lines", "of these imports", "not in plain")]
    for name, count in counter["count_programs"]().items():
        link = f"[{name}](../examples/libraries/{counter['PROGRAMS'][name]})"
        rows.append((link, count.code, count.imports, count.new))
    return markdown_rows(rows)


def programs() -> str:
    """Return the programs, each under its library's name."""
    counter = runpy.run_path(str(PROGRAMS / "count_lines.py"))
    parts = []
    for name, file in counter["PROGRAMS"].items():
        text = (PROGRAMS / file).read_text(encoding="utf-8").strip()
        comment = f"<!-- not run: tests/test_library_programs.py runs {file} -->"
        parts.append(f"### {name}\n\n{comment}\n```python\n{text}\n```")
    return "\n\n".join(parts)


def features(table: FeatureTable) -> str:
    """Return the values of all features: a table of the study's libraries, and one of the others.

    One table of all would be wider than a page. Penstock is in both.
    """
    rows: list[tuple[Any, ...]] = [("feature", *(library.name for library in table.libraries))]
    for feature in table.features:
        rows.append((feature.title, *(cell.value for cell in feature.cells)))
    last = len(table.libraries)
    parts = []
    for title, columns in (
        ("The study's libraries", [0, *range(1, STUDY + 1), last]),
        ("Later libraries", [0, *range(STUDY + 1, last + 1)]),
    ):
        part = [tuple(row[column] for column in columns) for row in rows]
        parts.append(f"### {title}\n\n{markdown_rows(part)}")
    return "\n\n".join(parts)


def places(table: FeatureTable) -> str:
    """Return per library the place where each value is seen."""
    parts = []
    for index, library in enumerate(table.libraries):
        lines = [f"### {library.name}, {library.version}", ""]
        for feature in table.features:
            cell = feature.cells[index]
            address = library.address(cell.where)
            link = address if address.startswith("https://") else f"../{address}"
            name = cell.where.removeprefix("./")
            phrase = " ".join(cell.evidence.split())
            seen = f": `` {phrase} ``" if phrase else ""
            lines.append(f"- {feature.title}: [{name}]({link}){seen}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def written(text: str) -> str:
    """Return the page with new content between its marks."""
    table = feature_table()
    content = {
        "lines": counts(),
        "programs": programs(),
        "features": features(table),
        "places": places(table),
    }
    for name, part in content.items():
        start, end = START.format(name), END.format(name)
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n\n{part}\n\n{end}{tail}"
    return text


def missing_places(table: FeatureTable, name: str, folder: Path) -> list[str]:
    """Return what a library's folder does not have of the files and phrases of its cells.

    Raises:
        KeyError: the table has no such library.
    """
    names = [library.name for library in table.libraries]
    if name not in names:
        raise KeyError(f"no library {name!r}; there are {', '.join(names)}")
    missing = []
    for feature in table.features:
        cell = feature.cells[names.index(name)]
        if cell.where.startswith(("https://", "./")):
            continue
        file = folder / cell.where
        if not file.is_file():
            missing.append(f"{name}, {feature.name}: no file {cell.where}")
        elif cell.evidence not in file.read_text(encoding="utf-8"):
            missing.append(f"{name}, {feature.name}: {cell.where} has no {cell.evidence!r}")
    return missing


def main() -> None:
    """Write the page, or check places."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", nargs="+", metavar="LIBRARY=FOLDER", default=[])
    missing: list[str] = []
    folders = parser.parse_args().check
    for assignment in folders:
        name, _, folder = assignment.partition("=")
        missing += missing_places(feature_table(), name, Path(folder))
    if missing:
        sys.exit("\n".join(missing))
    if folders:
        print("all files have the phrases of their cells")
        return
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
    print(PAGE)


if __name__ == "__main__":
    main()
