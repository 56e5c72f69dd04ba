"""What the documentation says is run: its Python, the output it shows, and the way every link goes."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Run block by block. CONTRIBUTING.md is followed in tests/architecture/test_contributing.py.
RUN = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()
]
LINKED = [
    *RUN,
    *(path for path in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md") if path.exists()),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "src").rglob("*.md")),
]

FENCE = re.compile(
    r"^(?P<bars>`{3,})(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=bars)[ ]*$", re.MULTILINE | re.DOTALL
)
GOLDEN = re.compile(r"<!--\s*golden:.*?-->\s*\Z", re.DOTALL)
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.*?)\s*-->\s*\Z", re.DOTALL)


def named(paths):
    """Parametrisation by file."""
    return pytest.mark.parametrize(
        "path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]
    )


@dataclass
class Block:
    """A fenced Python block: its line, its code, and what the page shows of its output.

    A ```text block right behind it is all that it prints; a block behind `<!-- golden: ... -->` is
    a part of that.
    """

    line: int
    code: str
    output: str | None = None
    excerpt: str | None = None


def blocks_of(text: str) -> list[Block]:
    """The Python blocks that are to be run, in order."""
    blocks: list[Block] = []
    end = None  # of the last of them
    for fence in FENCE.finditer(text):
        language, before = fence["language"].strip(), text[: fence.start()]
        skipped = NOT_RUN.search(before)
        if language == "python" and skipped:
            assert skipped["reason"], (
                f"say why the block in line {before.count(chr(10)) + 1} is not run"
            )
        elif language == "python":
            blocks.append(Block(before.count("\n") + 2, fence["body"]))
            end = fence.end()
        elif language == "text" and end is not None and not text[end : fence.start()].strip():
            blocks[-1].output = fence["body"]
        elif GOLDEN.search(before):
            assert blocks, "golden is what a block above prints, and there is none"
            blocks[-1].excerpt = fence["body"]
    return blocks


def tidy(text: str) -> str:
    """Without spaces at the ends of lines, and with one newline at the end."""
    return re.sub(r"[ ]+$", "", text, flags=re.MULTILINE).rstrip("\n") + "\n"


def play(path: Path, blocks: list[Block]) -> None:
    """Run the blocks in one namespace, and hold what each prints against what the page shows.

    `...` stands for anything, as in doctests; spaces at the ends of lines do not count.
    """
    space: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, space)
        output = tidy(printed.getvalue())
        for shown, pattern in ((block.output, "{}"), (block.excerpt, "...{}...")):
            if shown is not None and not doctest.OutputChecker().check_output(
                pattern.format(tidy(shown)), output, doctest.ELLIPSIS
            ):
                pytest.fail(
                    f"{path.name}:{block.line} prints\n{output}\nand the page shows\n{shown}"
                )


def outside_fences(text: str) -> str:
    """The page without its code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "``", FENCE.sub("", text))


def links_of(text: str) -> list[str]:
    """Targets of links and pictures that are files here."""
    prose = outside_fences(text)
    links = re.findall(r"\]\(\s*<?([^)>\s]+)", prose) + re.findall(
        r"(?:src|href)=\"([^\"]+)\"", prose
    )
    return [link for link in links if not re.match(r"[a-z][a-z+.-]*:", link)]


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    counts: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        anchors.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return anchors


@named(RUN)
def test_python_on_the_page_runs_and_prints_what_the_page_shows(path, tmp_path, monkeypatch):
    """A page that is not run is wrong within a month. Paths are read from the root of the
    repository, of which this is a copy.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    play(path, blocks_of(path.read_text(encoding="utf-8")))


@named(LINKED)
def test_links_lead_to_files_and_headings_that_exist(path):
    """A reader who meets a dead link stops reading."""
    dead = []
    for link in links_of(path.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        exists = target.exists()
        if exists and anchor and target.suffix == ".md":
            exists = anchor in anchors_of(target.read_text(encoding="utf-8"))
        if not exists:
            dead.append(link)
    assert dead == []


@named(LINKED)
def test_paths_that_the_page_names_exist(path):
    """Files are renamed, and pages are not told."""
    text = path.read_text(encoding="utf-8")
    if path.name == "CONTRIBUTING.md":  # its files to write are not there yet
        text = re.sub(r"^Write `[^`]+`", "", text, flags=re.MULTILINE)
    named_there = re.findall(r"`((?:src|tests|docs|examples|benchmarks|\.ci)/[\w./-]+)`", text)
    assert [name for name in named_there if not (ROOT / name).exists()] == []


def test_the_story_walks_the_rooms_in_the_order_of_imports():
    """The sentence that names the rooms, the story and the import rule are one thing told three
    times.
    """
    source = (ROOT / "tests" / "architecture" / "test_imports.py").read_text(encoding="utf-8")
    listed = re.search(r"^ORDER = \[(.*?)\]", source, re.MULTILINE | re.DOTALL)
    order = re.findall(r'"(\w+)"', listed[1])
    rooms = re.findall(
        r"^## .*?`(\w+)/?`", (ROOT / "docs" / "story.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rooms == [room for room in order if room in rooms]
    assert len(rooms) > 10


PAGE = """
Text with `[no](link)`, [a link](one.md#two-words), ![a picture](p.svg) and [the web](https://example.org).

```python
x = 1
print(x, "and more")
```

```text
1 and ...
```

<!-- not run: it takes an hour -->

```python
x = 3
```

```python
assert x == 1
```

## Two words

```python
print("3 lines\\nof which\\n2 are shown")
```

<!-- golden: a part of it -->
```
of which
2 are shown
```
"""


def test_the_page_reader_reads_pages():
    """The keeper itself: a block that is overlooked is a claim that nobody checks."""
    first, second, third = blocks_of(PAGE)
    assert (first.line, first.code, first.output) == (
        5,
        'x = 1\nprint(x, "and more")\n',
        "1 and ...\n",
    )
    assert (second.code, second.output, second.excerpt) == ("assert x == 1\n", None, None)
    assert (third.output, third.excerpt) == (None, "of which\n2 are shown\n")
    assert links_of(PAGE) == ["one.md#two-words", "p.svg"]
    assert anchors_of(PAGE) == {"two-words"}
    play(Path("page.md"), [first, second, third])


@pytest.mark.parametrize("wrong", ["1 and ...", "2 are shown"])
def test_output_that_differs_from_the_page_is_shown_beside_it(wrong):
    """Both texts, or the writer of the page has to run it by hand."""
    page = PAGE.replace(f"{wrong}\n```", f"5 {wrong}\n```")
    with pytest.raises(
        pytest.fail.Exception,
        match=rf"page\.md:\d+ prints\n[^5]+and the page shows\n(of which\n)?5 {re.escape(wrong)}",
    ):
        play(Path("page.md"), blocks_of(page))


def test_everything_that_is_found_by_name_stands_in_the_list_of_papers():
    """Whoever meets a name in a plan wants to know whose idea it is, and what holds it to that."""
    from penstock.partition.catalogue import PARTITIONERS
    from penstock.schedule.catalogue import FAMILIES
    from penstock.search.catalogue import PLANNERS
    from penstock.search.schedules import COST_SCHEDULES
    from penstock.weights.catalogue import WEIGHT_RULES
    from penstock.zoo.catalogue import MODELS

    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w-]+)(?::[^`]*)?`", page))
    kinds = FAMILIES, COST_SCHEDULES, PARTITIONERS, WEIGHT_RULES, PLANNERS, MODELS
    names = {name.removesuffix("_bn") for kind in kinds for name in kind.entries()}
    assert names - listed == set(), "add a row with these names in backticks to docs/papers.md"
