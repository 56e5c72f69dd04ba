"""The description of the package for an index, see setup.py."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import penstock

ROOT = Path(__file__).parents[1]
description = runpy.run_path(str(ROOT / "setup.py"))["description"]


def test_links_to_files_become_their_text_and_others_stay():
    """A package index has no files for them to lead to."""
    page = "# A\n\n![picture](docs/a.svg)\n\nRead [`b`](docs/b.md#c),\n[c](d) and [web](https://e.f).\n"
    assert description(page) == "# A\n\nRead `b`,\nc and [web](https://e.f).\n"


def test_the_description_has_every_section_of_the_readme_and_no_dead_link():
    """What a reader sees on an index before the first installation."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = description(readme)
    for unchanged in (r"^#.*", r"^```.*?^```"):
        pattern = re.compile(
            unchanged, re.MULTILINE | re.DOTALL if "`" in unchanged else re.MULTILINE
        )
        assert pattern.findall(text) == pattern.findall(readme)
    assert re.findall(r"\]\((?!https?://)", text) == []


def test_the_version_stands_in_one_place_and_has_a_section_of_the_changelog():
    """The build reads it from the package, and a reader of the changelog looks it up."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "penstock.__version__"}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert newest[1] == penstock.__version__
