"""Links to raw data from another folder."""

from __future__ import annotations

from penstock.report.cells import blocks_of
from penstock.report.document import Chart, Table
from penstock.report.run_report import run_report
from penstock.report.sources import move_sources


def links(report):
    return {
        path
        for block in blocks_of(report)
        if isinstance(block, Table | Chart)
        for path in block.source
    }


def test_links_lead_to_the_same_files_from_another_folder(run_folder, tmp_path):
    """A report may be written beside others."""
    report = run_report(run_folder)
    target = tmp_path / "reports"
    target.mkdir()
    moved = links(move_sources(report, run_folder, target))
    assert moved == {"../runs/x/outcome.json", "../runs/x/metrics.jsonl"}
    assert all((target / path).exists() for path in moved)


def test_links_stay_as_they_are_in_the_folder_itself(run_folder):
    """The usual case."""
    report = run_report(run_folder)
    assert move_sources(report, run_folder, run_folder) is report
    assert links(report) == {"outcome.json", "metrics.jsonl"}
