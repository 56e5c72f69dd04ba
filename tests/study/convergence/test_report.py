"""Tables for people."""

from __future__ import annotations

from dataclasses import replace

from penstock.study.convergence.experiment import Refused
from penstock.study.convergence.report import HEAD, markdown, page, rows, text


def test_a_row_has_what_was_run_what_came_of_it_and_the_verdict(results):
    """All columns of the rule that loses."""
    row_of = {
        (row[0], row[1]): dict(zip(HEAD, row, strict=True)) for row in rows(results, "digits")
    }
    row = row_of["stash", "4"]
    assert row["test"] == "91.0 %"
    assert row["range"] == "90.0 % to 92.0 %"
    assert row["to flush"] == "\N{MINUS SIGN}6.0"
    assert row["simulated"] == "100.0 ms"
    assert row["speed-up"] == "2.00 x"
    assert row["conclusion"] == "loses"
    assert row_of["none", "4"]["conclusion"] == "1 of 3 runs failed"
    assert row_of["none", "4"]["speed-up"] == "never"
    assert row_of["flush", "2"]["conclusion"] == "the baseline"


def test_flush_comes_first_and_rules_in_the_order_asked_for(results):
    """The baseline is what the eye looks for."""
    assert [row[0] for row in rows(results, "digits")] == ["flush"] * 2 + ["stash"] * 2 + [
        "none"
    ] * 2


def test_tables_are_lined_up_in_markdown():
    """Numbers to the right, words to the left."""
    assert markdown(("rule", "S"), [("stash", "2")]) == "| rule | S |\n| --- | --: |\n| stash | 2 |"


def test_what_was_left_out_or_failed_or_is_missing_is_said(results):
    """Silence would read as 'no difference'."""
    gaps = replace(
        results,
        refused=(Refused("digits", "wpipe", 2, "it needs 2 ranks"),),
        failed=(("a case", "no room"),),
        missing=3,
    )
    report = text(gaps)
    assert "Left out: wpipe at 2 stages on digits: it needs 2 ranks" in report
    assert "Failed: a case: no room" in report
    assert "Not finished: 3 cases have no record yet." in report


def test_the_page_shows_its_figures_and_conditions(results):
    """A figure without its conditions is an advertisement."""
    report = page(results, ["digits-final.png", "gpt-final.png"])
    assert "![digits-final.png](digits-final.png)" in report
    assert "gpt-final" not in report
    assert "vgg11_bn (width 8, dropout 0.0) on digits" in report
    assert "messages take no time" in report
