"""CONTRIBUTING.md is followed: each file that it gives is written into a copy of the package, and
must work with no other change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.time_limits import HANG_S

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A line that tells where the block below it goes.
PLACE = re.compile(r"^Write `((?:src/penstock|tests)/[\w/]+\.py)`:\s*\Z", re.MULTILINE)
#: A line that announces a row of the list of papers, and the section whose table it belongs to.
ROW = re.compile(r"^Add to `docs/papers\.md`, under \"([\w ]+)\":\s*\Z", re.MULTILINE)


def blocks() -> tuple[dict[str, str], str, str, dict[str, str]]:
    """The files by path, the code that uses them as one script, the output that the last block
    shows, and the rows of the list of papers by their section.
    """
    files: dict[str, str] = {}
    rows: dict[str, str] = {}
    script, shown = [], ""
    for fence in FENCE.finditer(GUIDE):
        place = PLACE.search(GUIDE[: fence.start()])
        section = ROW.search(GUIDE[: fence.start()])
        if place is not None:
            files[place[1]] = fence[2]
        elif section is not None:
            rows[section[1]] = fence[2]
        elif fence[1] == "python":
            script.append(fence[2])
        elif fence[1] == "text":
            shown += fence[2]
    return files, "\n".join(script), shown, rows


FILES, SCRIPT, SHOWN, ROWS = blocks()
SOURCES = [path for path in FILES if path.startswith("src/")]


def with_rows(page: str) -> str:
    """The list of papers with each row at the end of the table of its section."""
    for section, row in ROWS.items():
        start = page.index(f"## {section}\n")
        table = re.compile(r"^(\|.*\n)+", re.MULTILINE).search(page, start)
        assert table[0].splitlines()[0].count("|") == row.count("|"), (section, row)
        page = page[: table.end()] + row + page[table.end() :]
    return page


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the repository with the new files in their places."""
    folder = tmp_path_factory.mktemp("contributed")
    # Compiled files and Numba's kernels go along: they are valid for a copy with the same times.
    ignored = shutil.ignore_patterns("*.egg-info")
    for name in ("src", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    for path, text in FILES.items():
        (folder / path).write_text(text, encoding="utf-8")
    papers = folder / "docs" / "papers.md"
    papers.write_text(with_rows(papers.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def run(copy: Path, *command: str, cwd: Path) -> str:
    """What Python prints, given the copy of the package, once it has ended well."""
    result = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(copy / "src")},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def test_the_guide_gives_one_file_for_each_kind_and_none_is_taken():
    """An example whose name the package has would show how to change something, not how to add it."""
    assert [path.split("/")[2] for path in SOURCES] == [
        "schedule",
        "partition",
        "weights",
        "search",
        "zoo",
    ]
    assert [path for path in FILES if (ROOT / path).exists()] == []
    assert len(ROWS) == len(SOURCES)


#: Runs the doctests of modules, and prints only those that fail.
DOCTESTS = """
import doctest
import importlib

for name in {modules!r}:
    assert not doctest.testmod(importlib.import_module(name)).failed, name
"""


def test_what_the_guide_adds_works_with_no_other_change(copy, tmp_path):
    """Followed once by hand, a guide is right that day; followed by a test, it stays so. The drawing
    in a docstring is the first thing that its reader believes: doctests pass, too.
    """
    where = (
        f"import penstock\nassert penstock.__file__.startswith({str(copy)!r}), penstock.__file__\n"
    )
    modules = [path.removeprefix("src/").removesuffix(".py").replace("/", ".") for path in SOURCES]
    doctests = DOCTESTS.format(modules=modules)
    (tmp_path / "guide.py").write_text(where + SCRIPT + doctests, encoding="utf-8")
    assert run(copy, "guide.py", cwd=tmp_path) == SHOWN


def test_every_recipe_ends_in_a_check_that_passes(copy):
    """That nothing else needs to be told of a new entry is the design's main promise: its tests,
    and those of the catalogue that adopt it, are run by name.
    """
    names = re.findall(r"[Tt]hen `make check NAME=([\w-]+)`", GUIDE)
    assert len(names) == len(SOURCES)
    output = run(copy, "-m", "tests.check_entry", *names, cwd=copy)
    tests = dict(re.findall(r"^([\w-]+), [\w ]+: (\d+) tests", output, re.MULTILINE))
    assert list(tests) == names
    # The laws adopt each entry, beside the test of the recipe; most of all those of schedules.
    assert all(int(count) > 1 for count in tests.values()), tests
    assert int(tests["grouped-gpipe"]) > 50


def test_what_the_guide_adds_is_in_the_house_style(copy):
    """Whoever starts from a block should not be met by the linter."""
    run(copy, "-m", "ruff", "check", "--no-cache", *FILES, cwd=copy)
    run(copy, "-m", "ruff", "format", "--no-cache", "--check", *FILES, cwd=copy)


def test_the_guide_lists_every_room_in_order():
    """The list is how a newcomer finds the place of a change; a room that is not on it has no
    reader.
    """
    source = (ROOT / "tests" / "architecture" / "test_imports.py").read_text(encoding="utf-8")
    listed = re.search(r"^ORDER = \[(.*?)\]", source, re.MULTILINE | re.DOTALL)
    package = ROOT / "src" / "penstock"
    order = re.findall(r'"([a-z]\w*)"', listed[1])
    section = GUIDE.partition("\n## The rooms\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    rooms = [room for row in table for room in re.findall(r"`(\w+)`", row)]
    assert rooms == [
        room for room in order if (package / room).is_dir() or (package / f"{room}.py").exists()
    ]


def test_the_guide_has_ten_rules_of_style():
    """Eleven would not be read."""
    assert re.findall(r"^(\d+)\. ", GUIDE, re.MULTILINE) == [str(number) for number in range(1, 11)]
