"""The page in a browser: inputs change figures, links hold the state, problems have messages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from tests.devtools import Browser

from penstock.explore.evaluate import evaluate
from penstock.explore.state import parse_state
from penstock.store import to_json

pytest.importorskip("uvicorn", reason="needs the extra explore")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

#: The page shows the answer to everything that was typed.
SETTLED = "document.getElementById('milliseconds').textContent"


@pytest.fixture(scope="module")
def address():
    """The address of a running page, on a port that the system chose."""
    command = [sys.executable, "-m", "penstock", "explore", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    yield server.stdout.readline().strip().partition("?")[0]
    server.terminate()
    server.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless browser."""
    browser = Browser(CHROMIUM, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def summary(browser):
    """The key figures that are announced."""
    return browser.evaluate("document.getElementById('summary').textContent.trim()")


def set_field(browser, name, text):
    """Type into a field."""
    browser.evaluate(
        f"(() => {{ const field = document.getElementById({json.dumps(name)}); "
        f"field.value = {json.dumps(text)}; "
        "field.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def bubbles(query):
    """The expected key figures of a state."""
    return [
        f"bubble {100 * panel.result.timeline.bubble_ratio:.1f} %"
        for panel in evaluate(parse_state(query))
    ]


def test_an_input_changes_the_figures_and_the_link(address, browser):
    """The number typed, the timeline, and the link are of one state; the link opens it again."""
    browser.open(address + "?ranks=4&micro_batches=8&a=1f1b&b=zb-h1")
    browser.wait_for(SETTLED)
    assert all(text in summary(browser) for text in bubbles("micro_batches=8&a=1f1b&b=zb-h1"))
    before = browser.evaluate("document.querySelector('canvas').toDataURL()")
    set_field(browser, "micro_batches", "20")
    browser.wait_for("location.search.includes('micro_batches=20')")
    assert all(text in summary(browser) for text in bubbles("micro_batches=20&a=1f1b&b=zb-h1"))
    browser.wait_for(f"document.querySelector('canvas').toDataURL() !== {json.dumps(before)}")
    assert browser.evaluate("document.querySelector('[data-for=micro_batches]').value") == "20"
    shown = summary(browser)
    link = browser.evaluate("location.href")
    browser.open(address)
    browser.open(link)
    browser.wait_for(SETTLED)
    assert summary(browser) == shown
    assert browser.evaluate("document.getElementById('micro_batches').value") == "20"


def test_a_slider_and_a_schedule_change_the_figures(address, browser):
    """By the same way as typing; options appear with their schedule."""
    browser.open(address + "?a=1f1b")
    browser.wait_for(SETTLED)
    browser.evaluate(
        "(() => { const slider = document.querySelector('[data-for=ranks]'); slider.value = 6; "
        "slider.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    browser.wait_for("location.search.includes('ranks=6')")
    set_field(browser, "b", "interleaved")
    browser.wait_for("document.getElementById('b.chunks')")
    set_field(browser, "b.chunks", "3")
    browser.wait_for("location.search.includes('b.chunks=3')")
    assert bubbles("ranks=6&a=1f1b&b=interleaved&b.chunks=3")[1] in summary(browser)


def test_a_bad_value_is_marked_and_the_figures_stay(address, browser):
    """While the user types, values are incomplete."""
    browser.open(address + "?a=1f1b")
    browser.wait_for(SETTLED)
    shown = summary(browser)
    set_field(browser, "forward", "1,x")
    browser.wait_for("document.getElementById('forward').getAttribute('aria-invalid')")
    assert "is not a quantity" in browser.evaluate(
        "document.getElementById('problem-forward').textContent"
    )
    assert summary(browser) == shown
    set_field(browser, "forward", "2")
    browser.wait_for("!document.getElementById('forward').hasAttribute('aria-invalid')")


def test_a_file_becomes_costs_and_is_cut_again(address, browser, tmp_path):
    """With the number of ranks; a bad file has a message, and the fields stay."""
    from tests.explore.test_uploads import made_up_profile

    path = tmp_path / "profile.json"
    path.write_text(to_json(made_up_profile()))
    bad = tmp_path / "bad.json"
    bad.write_text('{"<img src=x>": 1}')
    browser.open(address + "?ranks=2&micro_batches=4&a=1f1b")
    browser.wait_for(SETTLED)
    browser.choose_files("#files", [bad])
    browser.wait_for(
        "document.getElementById('file-message').textContent.includes('neither a profile')"
    )
    assert browser.evaluate("document.getElementById('forward').value") == "1"
    browser.choose_files("#files", [path])
    browser.wait_for("document.getElementById('forward').value.split(',').length === 2")
    set_field(browser, "ranks", "3")
    browser.wait_for("document.getElementById('forward').value.split(',').length === 3")
    browser.wait_for("location.search.includes('ranks=3')")


def test_an_idle_rank_says_what_it_waits_for(address, browser):
    """Rank 0 of 1F1B waits for the first gradient of rank 1."""
    browser.open(address + "?ranks=4&micro_batches=8&a=1f1b")
    browser.wait_for(SETTLED)
    browser.evaluate(
        "(() => { const canvas = document.querySelector('canvas'), box = canvas.getBoundingClientRect(); "
        "canvas.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, "
        "clientX: box.left + 80 + 0.2 * (box.width - 80), clientY: box.top + 20 })); })()"
    )
    text = browser.wait_for("document.querySelector('.tip').textContent")
    assert text.splitlines() == [
        "rank 0 idle for 6",
        "0B0 waits for 1B0 of rank 1",
        "which ends at 10",
    ]


@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_fits_its_window(address, browser, width):
    """Nothing but tables and figures scrolls sideways."""
    browser.open(address + "?ranks=8&a=1f1b&b=zb-v&activation_bytes=1MiB&memory_limit=3MiB", width)
    browser.wait_for("document.querySelector('.chart')")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_the_browser_has_nothing_to_complain_about(address, browser):
    """No error in a script, and nothing that the policy blocks."""
    browser.call("Runtime.enable")
    browser.call("Log.enable")
    browser.problems.clear()
    browser.open(address + "?ranks=32&micro_batches=64&a=1f1b&b=zb-h1")
    browser.wait_for("document.querySelector('.chart')")
    assert browser.problems == []
