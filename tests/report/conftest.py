"""Reports with every kind of block and hostile names, and the folder of a run."""

from __future__ import annotations

import json

import pytest

from penstock.cluster.cluster import cluster
from penstock.cluster.write import yaml_of
from penstock.draw.draw import unit_timeline
from penstock.event import Timeline
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.report.document import (
    Chart,
    Code,
    Column,
    Facts,
    Page,
    Report,
    Section,
    Series,
    Table,
    Text,
    TimelineFigure,
)
from penstock.report.timeline_file import save_timeline
from penstock.schedule.catalogue import schedule
from penstock.search.catalogue import plan
from penstock.simulate.plan_costs import simulate_plan

#: Names that run a script if they are ever taken for markup.
SCRIPT = "<script>document.title='changed'</script>"
IMAGE = '"><img src=x onerror="document.title=\'changed\'">'


def timing(seconds):
    return Timing((1, 16), (seconds, 16 * seconds))


def layer(name, seconds):
    return LayerProfile(
        name,
        "Linear",
        timing(seconds),
        timing(2 * seconds),
        timing(seconds),
        timing(seconds),
        1000,
        4000,
        0,
        100.0,
        50.0,
    )


@pytest.fixture(scope="session")
def profile():
    """Five layers, one with a hostile name."""
    names = ("embedding", SCRIPT, "block", "norm", "head")
    layers = tuple(
        layer(name, seconds) for name, seconds in zip(names, (3, 1, 2, 1, 5), strict=True)
    )
    return Profile(layers, "abc", 10.0, 16, {"device": "cpu: a processor", "cores": "2"}, "2.13.0")


@pytest.fixture(scope="session")
def two_ranks():
    """A cluster of two devices."""
    return cluster("2xV100-NVLink")


@pytest.fixture(scope="session")
def planned(profile, two_ranks):
    """A plan for the layers on two devices."""
    names = ["1f1b", "gpipe", "zb-h1"]
    return plan(profile, two_ranks, 16, micro_batches=4, stages=2, schedules=names)


@pytest.fixture
def run_folder(tmp_path, profile, two_ranks, planned):
    """The folder of a run of two epochs that has ended."""
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        json.dumps({"model": IMAGE, "data": "digits", "out": str(folder), "lr": 0.1})
    )
    planned.save(folder / "plan.json")
    profile.save(folder / "profile.json")
    (folder / "cluster.yaml").write_text(yaml_of(two_ranks))
    lines = []
    for step in range(1, 41):
        lines.append({"step": step, "loss": 3 / step, "step_s": 50.0 + step % 3, "lr": 0.1})
        if step % 20 == 0:
            shares = {"busy": [0.9, 0.8], "peak_memory": [5000, 4000]}
            lines.append(
                {
                    "step": step,
                    "epoch": step // 20,
                    "test_loss": 1.0,
                    "test_accuracy": 0.5,
                    **shares,
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = {
        "folder": str(folder),
        "steps": 40,
        "loss": 0.075,
        "test_loss": 1.0,
        "test_accuracy": 0.5,
        "predicted_step_s": planned.predicted.step_s,
        "measured_step_s": 1.2 * planned.predicted.step_s,
        "predicted_bubble_ratio": 0.2,
        "measured_bubble_ratio": 0.25,
        "predicted_peak_memory": list(planned.predicted.peak_memory),
        "measured_peak_rss": [10**9] * planned.ranks,
        "training_s": 100.0,
        "one_thread_step_s": 100.0,
        "speed_up": 1.5,
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))
    predicted = simulate_plan(planned, profile, two_ranks)
    rows = [
        (event.rank, event.op, 1.2 * event.start, 1.2 * event.end, 0, None)
        for event in predicted.compute
    ]
    measured = Timeline.of(
        rows, predicted.ranks, predicted.stages, None, "measured", planned.schedule_name
    )
    save_timeline(measured, folder / "measured-timeline.json")
    return folder


@pytest.fixture
def table():
    """A table with all kinds of columns, an empty cell, and rows enough for a filter."""
    columns = (
        Column("library", about=f"its name {IMAGE}"),
        Column("M", "number"),
        Column("step", "seconds"),
        Column("memory", "bytes"),
        Column("share", "percent", 1),
    )
    rows = [
        (SCRIPT, 2, 0.5, 2048, 0.25),
        ("b", None, 0.002, 10**9, 0.5),
        ("a", 30, 3.0, 12, 1.0),
        ("c", "failed", 1e-6, None, None),
    ]
    rows += [(f"row {number}", 5, 10.0 + number, 10**6, 0.1) for number in range(10)]
    return Table(
        "libraries",
        f"Libraries {SCRIPT}",
        columns,
        tuple(rows),
        caption=f"Lower is better {IMAGE}",
        source=("raw data/a.jsonl", "javascript:alert(1)", "/etc/passwd"),
        emphasis=(2,),
    )


@pytest.fixture
def charts():
    """A chart of each kind, with intervals, logarithmic axes, gaps and hostile names."""
    nan = float("nan")
    line = Series(SCRIPT, (1.0, 2.0, 3.0), (3.0, nan, 1.0), (2.0, nan, 0.5), (4.0, nan, 1.5))
    return (
        Chart(
            "loss",
            f"Loss {IMAGE}",
            "step",
            "loss",
            (line, Series("b", (1.0,), (2.0,))),
            source=("metrics.jsonl",),
        ),
        Chart(
            "bars",
            "Speed",
            "library",
            "times one device",
            (Series("measured", (0.0, 1.0), (1.5, 2.0), (1.4, 1.9), (1.6, 2.1)),),
            kind="bar",
            categories=(SCRIPT, "b"),
        ),
        Chart(
            "points",
            "Candidates",
            "memory",
            "step",
            (Series("a", (1.0, 100.0), (0.0, 10.0)), Series("b", (5.0,), (1e-3,))),
            kind="scatter",
            log_x=True,
            log_y=True,
        ),
    )


@pytest.fixture
def report(table, charts):
    """Two pages with the same names, all kinds of blocks, and markup in every text."""
    first = unit_timeline(schedule("1f1b", 3, 4))
    second = unit_timeline(schedule("zb-h1", 3, 4))
    named = Timeline.of(first.compute, 3, 3, None, "measured", SCRIPT)
    blocks = (
        Text(f"A text {IMAGE}"),
        Facts(((SCRIPT, IMAGE),)),
        Code(f"penstock study --name '{SCRIPT}'\n  second line"),
        table,
        *charts,
        TimelineFigure("steps", f"Steps {SCRIPT}", (first, second), "Zero bubble is shorter."),
        TimelineFigure("steps", "One", (named,)),
    )
    pages = tuple(
        Page(
            "page",
            f"Experiment {number} {SCRIPT}",
            (Section(f"Result {IMAGE}", blocks), Section("Result", (Text("second"),))),
            command=f"penstock study {SCRIPT}",
            summary=(f"A sentence {IMAGE}",),
        )
        for number in range(2)
    )
    return Report(f"A study {SCRIPT}", pages, Facts((("machine", IMAGE),)))
