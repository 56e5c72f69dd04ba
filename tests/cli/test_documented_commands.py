"""Commands in the documentation and in the examples of `--help` have verbs and flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from penstock.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    *sorted((ROOT / "src" / "penstock" / "cli").glob("*.py")),
]
COMMANDS = typer.main.get_command(app).commands

#: `penstock VERB WORDS` up to the end of the code, of the line or of the command.
COMMAND = re.compile(r"\bpenstock (?P<verbs>[a-z][a-z|-]*)(?P<words>(?: [^`\n#;)]+)?)")
#: A new line of a shell command, or of the docstring of a command.
CONTINUED = re.compile(r" ?\\\n\s*|(?<=\S)\n    (?=--)")
#: Words after the name in imports, sentences and tables of benchmarks.
OTHER_WORDS = {"as", "auto", "command", "graph", "import", "inline"}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def flags_of(verb: str) -> set[str]:
    """The flags of a command, with those of all commands."""
    names = {"--help"}
    for parameter in COMMANDS[verb].params:
        names.update((*parameter.opts, *parameter.secondary_opts))
    return names


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_documented_command_exists_with_its_flags(path):
    """A flag is renamed, and the page that names it fails at the reader's."""
    text = CONTINUED.sub(" ", path.read_text(encoding="utf-8"))
    unknown = []
    for command in COMMAND.finditer(text):
        verbs = command["verbs"].split("|")
        if command["verbs"] in OTHER_WORDS:
            continue
        flags = FLAG.findall(command["words"])
        if not all(verb in COMMANDS and flags_of(verb).issuperset(flags) for verb in verbs):
            unknown.append(command[0])
    assert unknown == []


def test_the_pages_name_every_command():
    """A command that no page names is not found."""
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES if path.suffix == ".md")
    assert [verb for verb in COMMANDS if f"penstock {verb}" not in text] == []
