"""The report that `penstock train` leaves."""

from __future__ import annotations

from penstock.cli.train import _write_report
from penstock.report import html


def test_a_report_that_fails_is_one_line_and_no_error(tmp_path, monkeypatch):
    """A training of days must not end in an error because of its report."""
    assert _write_report(tmp_path).startswith("warning: there is no report of this run: ")

    def fail(report):
        raise ZeroDivisionError

    (tmp_path / "config.yaml").write_text("model: mlp")
    monkeypatch.setattr(html, "html_page", fail)
    line = _write_report(tmp_path)
    assert line.startswith("warning: there is no report of this run: ")
    assert "\n" not in line
