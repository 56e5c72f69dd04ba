"""Markdown and its figures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from markdown_it import MarkdownIt

from penstock.report.markdown import escape_markdown, fenced, markdown_page, write_markdown


class Rendered(HTMLParser):
    """The text and the tags of a rendered page."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags = "", []
        self.feed(MarkdownIt("commonmark").enable("table").enable("strikethrough").render(page))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "a_b_c *bold* `code` ~~gone~~ [link](javascript:alert) ![x](y)",
        "# heading",
        "- item",
        "+ item",
        "12. item",
        "1) item",
        "> quotation",
        "a | b | c",
        "&lt; &amp;",
        "back\\slash \\* ",
        "====",
        "$x$ #1 a@b",
    ],
)
def test_every_text_is_rendered_as_it_is(text):
    """Names of models come from files of others."""
    rendered = Rendered(escape_markdown(text) + "\n")
    assert rendered.text.strip() == text.strip()
    assert rendered.tags == ["p"]
    row = f"| a |\n| --- |\n| {escape_markdown(text)} |\n"
    assert Rendered(row).tags == ["table", "thead", "tr", "th", "tbody", "tr", "td"]


def test_code_cannot_end_its_own_block():
    """A fence within the text is shorter than the block's own."""
    rendered = Rendered(fenced("a\n```\n# b\n````\n<i>"))
    assert rendered.text.rstrip("\n") == "a\n```\n# b\n````\n<i>"
    assert rendered.tags == ["pre", "code"]


def test_a_report_has_all_pages_tables_and_figures(report, tmp_path):
    """Every figure that the page names exists and is well formed."""
    paths = write_markdown(report, tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    figures = re.findall(r"\]\((figures/[^)]*)\)", page)
    assert len(figures) == len(set(figures)) == 2 * 5
    assert len(paths) == 11
    for name in figures:
        ET.parse(tmp_path / "out" / name)
    rendered = Rendered(page)
    assert rendered.tags.count("table") == 2
    assert not {"script", "i"} & set(rendered.tags)
    assert rendered.tags.count("img") == 10


def test_emphasised_rows_are_bold(report):
    """As in the HTML file."""
    assert re.search(r"^\| \*\*a\*\* \| \*\*30\*\* ", markdown_page(report), re.MULTILINE)
