"""The report of a training run."""

from __future__ import annotations

import json

import pytest

from penstock.errors import FileError
from penstock.report.cells import blocks_of
from penstock.report.csv import write_csv
from penstock.report.document import Chart, Code, Table, TimelineFigure
from penstock.report.html import html_page
from penstock.report.markdown import markdown_page
from penstock.report.run_folder import read_run
from penstock.report.run_report import plan_report, run_report


def tables_of(report):
    return {block.name: block for block in blocks_of(report) if isinstance(block, Table)}


def charts_of(report):
    return {block.name: block for block in blocks_of(report) if isinstance(block, Chart)}


def test_the_report_compares_the_prediction_with_the_run(run_folder, planned):
    """Its values are those of the files."""
    report = run_report(run_folder)
    time = tables_of(report)["time"].rows[0]
    assert time[1:3] == (planned.predicted.step_s, 1.2 * planned.predicted.step_s)
    assert time[3] == pytest.approx(0.2)
    ranks = tables_of(report)["ranks"]
    assert [column.title for column in ranks.columns] == [
        "rank",
        "predicted busy",
        "measured busy",
        "predicted memory",
        "whole process",
    ]
    for row in ranks.rows:
        assert row[1] == pytest.approx(row[2])
    summary = report.pages[0].summary
    assert summary[0].startswith("Test accuracy 50.00%")
    assert "20% more than predicted" in summary[1]


def test_the_timelines_are_the_predicted_and_the_measured_one(run_folder, planned):
    """One above the other, on a common time scale."""
    figure = next(b for b in blocks_of(run_report(run_folder)) if isinstance(b, TimelineFigure))
    predicted, measured = figure.timelines
    assert (predicted.source, measured.source) == ("simulated", "measured")
    assert predicted.makespan == pytest.approx(planned.predicted.step_s)
    assert measured.makespan == pytest.approx(1.2 * predicted.makespan)


def test_curves_have_every_step_and_the_prediction_as_a_line(run_folder, planned):
    """A constant learning rate has no curve."""
    charts = charts_of(run_report(run_folder))
    assert list(charts)[:5] == ["loss", "accuracy", "step-time", "busy", "peak-memory"]
    loss, test = charts["loss"].series
    assert (len(loss.x), test.x) == (40, (20.0, 40.0))
    predicted = charts["step-time"].series[1]
    assert predicted.y == (pytest.approx(planned.predicted.step_s),) * 2


def test_the_plan_is_explained(run_folder, planned):
    """Candidates best first, what limits them, the bound, and what would help."""
    report = run_report(run_folder)
    tables = tables_of(report)
    assert len(tables["candidates"].rows) == len(planned.candidates)
    assert tables["candidates"].rows[0][0] == planned.schedule_name
    assert [row[0] for row in tables["suggestions"].rows] == [r.change for r in planned.remedies]
    memory = tables["memory-by-holder"]
    for row, peak in zip(memory.rows, planned.predicted.peak_memory, strict=True):
        assert row[-1] == peak
    commands = [block.text for block in blocks_of(report) if isinstance(block, Code)]
    assert commands == [f"penstock train {run_folder}/config.yaml --out {run_folder}-again"]


def test_every_format_can_be_written(run_folder, tmp_path):
    """With hostile names of model and layers."""
    report = run_report(run_folder)
    page = html_page(report)
    assert "<script>document" not in page
    assert "<img" not in page
    assert "\n#### Ranks\n" in markdown_page(report)
    assert len(write_csv(report, tmp_path / "csv")) > 8


@pytest.mark.parametrize(
    "missing",
    [
        ("outcome.json", "measured-timeline.json"),
        ("cluster.yaml",),
        ("measured-timeline.json",),
        ("metrics.jsonl", "outcome.json", "measured-timeline.json", "cluster.yaml"),
    ],
)
def test_a_run_without_some_files_has_a_report(run_folder, missing):
    """One that still trains, was killed, or is of an older version."""
    for name in missing:
        (run_folder / name).unlink()
    report = run_report(run_folder)
    assert "Why this plan" in html_page(report)
    if "outcome.json" in missing:
        assert "no outcome yet" in report.pages[0].summary[0]


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "plan.json",
        "profile.json",
        "metrics.jsonl",
        "outcome.json",
        "cluster.yaml",
        "measured-timeline.json",
    ],
)
@pytest.mark.parametrize("content", ["\0", "]\n", "{\n", "- 1\n"])
def test_a_damaged_file_is_one_message_with_its_name(run_folder, name, content):
    """The error must name the damaged file."""
    (run_folder / name).write_text(content)
    with pytest.raises(FileError, match=name.replace(".", r"\.")) as caught:
        run_report(run_folder)
    assert "\n" not in str(caught.value)


def test_files_of_different_runs_are_refused(run_folder):
    """A prediction for another model would be believed."""
    content = json.loads((run_folder / "profile.json").read_text())
    (run_folder / "profile.json").write_text(json.dumps({**content, "fingerprint": "other"}))
    with pytest.raises(FileError, match="do not belong together"):
        run_report(run_folder)


def test_a_folder_without_a_run_is_refused(tmp_path):
    """The message says what a run's folder is."""
    with pytest.raises(FileError, match=r"holds no run: there is no config\.yaml"):
        read_run(tmp_path)


def test_a_resumed_run_has_the_command_that_continues_it(run_folder):
    """Its configuration cannot start a run."""
    settings = {"model": "mlp", "out": str(run_folder), "resume": True}
    (run_folder / "config.yaml").write_text(json.dumps(settings))
    commands = [b.text for b in blocks_of(run_report(run_folder)) if isinstance(b, Code)]
    assert commands == [f"penstock train {run_folder} --resume"]


def test_a_plan_has_a_report_of_its_own(run_folder, planned):
    """Before anything is trained."""
    report = plan_report(run_folder / "plan.json")
    assert len(tables_of(report)["candidates"].rows) == len(planned.candidates)
    assert report.pages[0].summary[0].startswith(f"The plan is {planned.schedule_name} with")


def test_an_asynchronous_run_has_its_weight_versions(run_folder):
    """A batch of it is compared in the steady state."""
    path = run_folder / "outcome.json"
    content = json.loads(path.read_text())
    changes = {
        "synchronous": False,
        "predicted_weight_versions": [2, 1],
        "measured_weight_versions": [2],
    }
    path.write_text(json.dumps({**content, **changes}))
    tables = tables_of(run_report(run_folder))
    assert tables["weight-versions"].rows == ((0, 2, 2), (1, 1, None))
    assert tables["time"].rows[0][0] == "batch, steady state"


def test_ranks_that_share_a_process_have_no_process_memory(run_folder):
    """The memory of one process cannot be divided by rank."""
    path = run_folder / "outcome.json"
    content = json.loads(path.read_text())
    changes = {"measured_peak_rss": [10**9], "measured_peak_memory": [5000, 4000]}
    path.write_text(json.dumps({**content, **changes}))
    ranks = tables_of(run_report(run_folder))["ranks"]
    titles = [column.title for column in ranks.columns]
    assert "whole process" not in titles
    assert [row[titles.index("measured memory")] for row in ranks.rows] == [5000, 4000]
