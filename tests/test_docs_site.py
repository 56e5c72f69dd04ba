"""The documentation as a site: its navigation, reference, quoted messages and links."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import penstock as ps

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Pages of the site that are written for it, in addition to those that were there before.
PAGES = ("extend", "hang", "index", "install", "memory", "pipelines", "troubleshooting", "tutorial")


def messages() -> list[str]:
    """Every text in the source, with … for each value in an f-string."""
    texts = []
    for path in (ROOT / "src" / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def occurs(quoted: str, texts: list[str]) -> bool:
    """Whether one text has the words of a quoted message, in order; … stands for anything."""
    words = [re.escape(part) for part in quoted.split("…")]
    pattern = re.compile(".*".join(words), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_every_message_of_the_troubleshooting_page_is_in_the_source():
    """A message is changed, and the page that explains it would no longer be found."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    texts = messages()
    assert len(quoted) >= 15
    assert [message for message in quoted if not occurs(message, texts)] == []


def test_a_message_that_no_source_has_is_noticed():
    """The check itself: words in another order, or of two messages, are not one message."""
    texts = ["the plan is for … layers", "and a rank"]
    assert occurs("plan is for … layers", texts)
    assert not occurs("layers … plan", texts)
    assert not occurs("the plan … a rank", texts)


def test_every_message_has_a_cause_and_a_remedy():
    """A message without a remedy is not explained."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    incomplete = [
        section.partition("\n")[0]
        for section in sections
        if "**Cause.**" not in section or "**Remedy.**" not in section
    ]
    assert incomplete == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_with_what_the_reader_will_be_able_to_do(name):
    """A reader decides by the first sentence whether to go on."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    first = text.split("\n\n")[1]
    assert re.match(r"After this page you can ", first), first


def test_the_reference_has_every_public_name_at_its_place():
    """A public name that is missing there is known to readers of the source only."""
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    assert listed == {f"penstock.{module}.{name}" for name, module in ps._MODULES.items()}


def test_every_public_function_has_an_example_in_its_docstring():
    """An example says more than a list of arguments. Cheap ones run as doctests of the package."""
    lacking = [
        name
        for name in ps.__all__
        if not (inspect.isclass(value := getattr(ps, name)) and issubclass(value, BaseException))
        and not has_example(inspect.getdoc(value) or "")
    ]
    assert lacking == []


def has_example(docstring: str) -> bool:
    """Whether a docstring has a doctest, or an example that is a block of code."""
    return (
        ">>>" in docstring or re.search(r"^Examples?:\n+ +\S", docstring, re.MULTILINE) is not None
    )


def test_the_navigation_names_pages_that_exist_and_each_once():
    """Also checked by the build of the site, which needs MkDocs; this does not."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(r"^\s+- (\S+\.md)$", text, re.MULTILINE)
    assert [page for page in pages if not (DOCS / page).is_file()] == []
    assert len(pages) == len(set(pages))


def test_the_search_of_the_site_works_from_a_folder_and_loads_nothing_from_elsewhere():
    """The index is a script, and the polyfill for web workers is a file of the site."""
    configuration = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  - offline$", configuration, re.MULTILINE)
    polyfills = re.search(r"^  polyfills: \[(.*)\]$", configuration, re.MULTILINE)
    assert polyfills is not None
    # The plugin adds its own address unless one of the names has this word.
    assert "iframe-worker" in polyfills[1]
    assert (DOCS / polyfills[1]).is_file()
