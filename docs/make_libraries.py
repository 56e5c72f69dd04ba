"""Write the tables and programs of docs/libraries.md: python docs/make_libraries.py.

They come from the package's table of features and from the programs in examples/libraries.

    python docs/make_libraries.py --check DeepSpeed=/path/to/DeepSpeed torchtitan=/path/to/torchtitan

checks instead that the files of these libraries have the phrases of their cells, in checkouts of the
versions that the table names, or in folders that packages are installed in.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from penstock.study.feature_table import FeatureTable, feature_table, overview

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "libraries.md"
PROGRAMS = DOCS.parent / "examples" / "libraries"
#: Libraries that the study compares; they come first in the table.
STUDY = 3
START, END = "<!-- {0}, written by make_libraries.py -->", "<!-- end of {0} -->"


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
    values = overview(table)
    rows: list[tuple[Any, ...]] = [tuple(column.title for column in values.columns), *values.rows]
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
