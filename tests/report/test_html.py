"""The HTML file, read by a parser and by a browser."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser

import pytest
from tests.devtools import Browser

from penstock.errors import FileError
from penstock.report.document import Page, Report, Section, Table
from penstock.report.html import html_page, write_html

VOID = {"meta", "input", "br", "img"}
#: Elements of HTML and SVG that load something, or run something.
FOREIGN = {"iframe", "object", "embed", "link", "img", "video", "audio", "base", "form", "image"}


class Reader(HTMLParser):
    """Reads a page, and checks that its elements are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.headings, self.addresses, self.tags = [], [], [], [], []
        self.scripts, self.text, self.handlers = [], "", []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.addresses += [values[name] for name in ("href", "src", "action") if name in values]
        self.handlers += [name for name in values if name.startswith("on")]
        if tag == "script":
            self.scripts.append(values.get("type", ""))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


@pytest.fixture
def page(report):
    return html_page(report)


@pytest.fixture
def reader(page):
    return Reader(page)


def test_elements_are_closed_in_order_and_ids_are_unique(reader):
    """Two pages have tables and figures of the same names."""
    assert len(set(reader.ids)) == len(reader.ids)
    assert "content" in reader.ids


def test_links_lead_to_places_of_the_file_or_to_raw_data(reader):
    """A report is sent to others: it must not depend on any server."""
    targets = {address[1:] for address in reader.addresses if address.startswith("#")}
    assert targets <= set(reader.ids)
    others = {address for address in reader.addresses if not address.startswith("#")}
    assert others == {
        "./raw%20data/a.jsonl",
        "./javascript%3Aalert%281%29",
        "./metrics.jsonl",
    }
    assert not FOREIGN & set(reader.tags)


def test_styles_load_nothing(page):
    """Neither fonts nor pictures come from the network."""
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    assert "@import" not in style
    assert "http" not in style
    assert set(re.findall(r"url\(([^)]*)\)", style)) == set()


def test_headings_go_down_one_level_at_a_time(reader):
    """Screen readers navigate by headings."""
    assert reader.headings[0] == 1
    assert reader.headings.count(1) == 1
    for first, second in zip(reader.headings, reader.headings[1:], strict=False):
        assert second <= first + 1


def test_names_are_shown_and_never_markup(reader, page):
    """A model called <script> is a model."""
    assert reader.handlers == []
    assert reader.scripts.count("") == 2
    assert set(reader.scripts) == {"", "application/json"}
    assert "<script>document.title='changed'</script>" in reader.text
    assert "<script>document" not in page


def test_control_characters_are_replaced():
    """HTML forbids them, and a terminal that prints the page would obey them."""
    table = Table("t", "a\x1b[31m\x00", (), ())
    page = html_page(Report("r\ud800", (Page("p", "p", (Section("s", (table,)),), "x\x07\ny"),)))
    assert not set(page) & {"\x1b", "\x00", "\x07", "\ud800"}
    assert "x\N{REPLACEMENT CHARACTER}\ny" in page


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(page):
    """A second barrier, should a name ever become markup."""
    import base64
    import hashlib

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src &#39;none&#39;; script-src")
    allowed = set(re.findall(r"sha256-([^&]*)&#39;", policy))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = {
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    }
    assert allowed == digests
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_without_scripts_everything_is_there(page, reader):
    """Tables, charts and static timelines stand in the file itself."""
    assert page.count('<div class="still"><svg') == 4
    assert reader.tags.count("table") == 2
    assert reader.tags.count("button") == 4 * 6


def test_a_file_that_cannot_be_written_is_an_error(report, tmp_path):
    """The message names the file."""
    with pytest.raises(FileError, match=r"cannot write the report .*missing"):
        write_html(report, tmp_path / "missing" / "report.html")


def test_an_empty_report_is_a_page():
    """A study may have no result yet."""
    assert Reader(html_page(Report("empty", ()))).headings == [1]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
#: Sorts by click, filters, and reports what the page shows.
PROBE = """
(() => {
  const result = {};
  const table = document.querySelector(".table table");
  const column = (index) => [...table.tBodies[0].rows].map((row) => row.cells[index].textContent);
  const buttons = [...table.querySelectorAll("th button")];
  buttons[2].click();
  result.ascending = column(2).slice(0, 4);
  result.sorted = buttons[2].closest("th").getAttribute("aria-sort");
  buttons[2].click();
  result.descending = column(2).slice(0, 2);
  buttons[1].click();
  result.mixed = column(1).slice(-2);
  buttons[1].focus();
  result.focus = document.activeElement === buttons[1];
  const input = document.querySelector(".filter input");
  input.value = "17.0 s";
  input.dispatchEvent(new Event("input"));
  result.shown = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
  result.count = document.querySelector(".filter [role=status]").textContent;
  result.live = document.querySelectorAll("figure.timeline.live").length;
  const root = document.documentElement;
  result.overflow = root.scrollWidth - root.clientWidth;
  result.title = document.title;
  result.images = document.images.length;
  return result;
})()
"""
#: The second timeline has more than one colour.
PAINTED = """(() => {
  const canvas = document.querySelectorAll("figure.timeline canvas")[1];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.some((value) => value !== data[0]);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless browser."""
    browser = Browser(CHROMIUM, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def address(page, tmp_path):
    """The address of the page in a file."""
    path = tmp_path / "page.html"
    path.write_text(page)
    return path.as_uri()


@needs_chromium
@pytest.mark.parametrize("width", [500, 1400])
def test_tables_sort_and_filter_and_timelines_start_in_a_browser(address, browser, width):
    """By value with units, empty and textual cells last; no name has run a script."""
    browser.open(address, width=width)
    browser.wait_for(PAINTED)
    result = browser.evaluate(PROBE)
    assert result["ascending"] == ["1.0 us", "2.0 ms", "500.0 ms", "3.0 s"]
    assert result["sorted"] == "ascending"
    assert result["descending"] == ["19.0 s", "18.0 s"]
    assert result["mixed"] == ["failed", ""]
    assert result["focus"]
    assert (result["shown"], result["count"]) == (1, "1 of 14 rows")
    assert result["live"] == 4
    assert result["overflow"] <= 0
    assert result["title"] == "A study <script>document.title='changed'</script>"
    assert result["images"] == 0


@needs_chromium
def test_the_policy_lets_the_scripts_of_the_page_run(address, browser):
    """A hash that does not fit would leave a page without sorting, silently."""
    browser.open("about:blank")
    browser.call("Log.enable")
    browser.problems.clear()
    browser.open(address)
    assert browser.evaluate("document.querySelectorAll('figure.timeline.live').length") == 4
    assert browser.evaluate("document.querySelectorAll('th[scope=col] button').length") > 0
    assert browser.problems == []
