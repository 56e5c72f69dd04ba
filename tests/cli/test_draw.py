"""`penstock draw`: schedules on one time scale, plans and runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import penstock as ps
from penstock.cluster.write import yaml_of
from penstock.report.timeline_file import save_timeline

SMALL = ("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)


def test_against_draws_another_schedule_below(penstock, tmp_path):
    """The same model, ranks and micro-batches, in every format that draws one."""
    out = penstock("draw", *SMALL, "--against", "zb-h1").out
    assert sum(line.startswith("rank ") for line in out.splitlines()) == 8
    assert "zb-h1 takes 27, 18.2 % less than 1f1b (33)" in " ".join(out.split())
    for suffix in ("svg", "html", "json", "txt"):
        target = tmp_path / f"two.{suffix}"
        assert (
            penstock("draw", target, *SMALL, "--against", "zb-h1", "--against", "gpipe").status == 0
        )
        assert all(name in target.read_text() for name in ("1f1b", "zb-h1", "gpipe"))


def test_against_takes_a_schedule_that_is_computed_from_the_costs(penstock):
    """It has one stage per rank, of the costs that the flags give."""
    out = penstock("draw", *SMALL, "--forward", "1,1.2,1,1", "--against", "synthesised").out
    assert sum(line.startswith("rank ") for line in out.splitlines()) == 8
    assert "synthesised takes " in out
    out = penstock(
        *("draw", "--schedule", "interleaved", "--stages", 4, "--micro-batches", 4),
        *("--against", "zb-auto"),
    ).out
    assert sum(line.startswith("rank ") for line in out.splitlines()) == 4


def test_another_number_of_stages_shares_out_the_same_costs(penstock):
    """ZB-V has two stages on a rank, of half a rank's layers each."""
    out = penstock("draw", *SMALL, "--against", "zb-v").out
    assert "zb-v takes 25.5, 22.7 % less than 1f1b (33)" in " ".join(out.split())


def test_costs_per_stage_cannot_be_shared_out(penstock):
    """How a stage of 1F1B falls apart into two is the layers' business; a guess would draw a lie."""
    result = penstock("draw", *SMALL, "--forward", "1,2,1,1", "--against", "zb-v")
    assert (result.status, "forward has 4 entries, the schedule needs 8" in result.err) == (2, True)


def test_bytes_draw_what_the_ranks_hold(penstock, tmp_path):
    """Memory decides between schedules as often as time."""
    target = tmp_path / "out.svg"
    assert (
        penstock(
            "draw", target, *SMALL, "--activation-bytes", "1GiB", "--weight-bytes", "2GiB"
        ).status
        == 0
    )
    assert "peak 6.0 GiB at 3: activations 4.0 GiB, weights 2.0 GiB" in target.read_text()


def test_a_png_is_written_by_its_suffix(penstock, tmp_path):
    """For slides and papers that take no SVG."""
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.png"
    assert penstock("draw", target, *SMALL).status == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_schedule_to_compare_with_is_named(penstock):
    """The same words as for the first."""
    result = penstock("draw", *SMALL, "--against", "zb-h3")
    assert (
        result.status,
        "Did you mean 'zb-h2'" in result.err or "Did you mean 'zb-h1'" in result.err,
    ) == (
        2,
        True,
    )


@pytest.fixture
def plan_file(profile_file, tmp_path):
    """A plan of two stages for the five layers."""
    path = tmp_path / "plan.json"
    profile = ps.Profile.load(profile_file)
    ps.plan(profile, ps.cluster("2xV100-NVLink"), 8, schedules="1f1b", stages=2).save(path)
    return path


def test_a_plan_is_drawn_and_not_replaced(penstock, plan_file, tmp_path):
    """Its name used to be taken for that of the output."""
    before = plan_file.read_bytes()
    drawn = penstock("draw", plan_file)
    assert drawn.status == 0, drawn.err
    assert sum(line.startswith("rank ") for line in drawn.out.splitlines()) == 2
    assert "not with the times that the plan predicts: add --profile" in drawn.err
    for words in ((plan_file, tmp_path / "a.svg"), (plan_file, "--out", tmp_path / "b.svg")):
        assert penstock("draw", *words).status == 0
        assert words[-1].read_text().startswith("<svg")
    assert plan_file.read_bytes() == before


def test_a_plan_is_drawn_with_the_times_that_it_predicts(
    penstock, plan_file, profile_file, tmp_path
):
    """The makespan is the step of the plan."""
    target = tmp_path / "trace.json"
    drawn = penstock("draw", plan_file, target, "--profile", profile_file)
    assert (drawn.status, drawn.err) == (0, f"wrote {target}\n")
    (summary,) = json.loads(target.read_text())["otherData"]["penstock"]
    assert summary["makespan_s"] == pytest.approx(ps.Plan.load(plan_file).predicted.step_s)


def test_a_run_is_drawn_with_its_prediction(penstock, plan_file, profile_file, tmp_path):
    """The measured timeline stands below the predicted one; before the end there is only one."""
    profile, devices = ps.Profile.load(profile_file), ps.cluster("2xV100-NVLink")
    (tmp_path / "config.yaml").write_text("model: mlp\n")
    (tmp_path / "cluster.yaml").write_text(yaml_of(devices))
    drawn = penstock("draw", tmp_path)
    assert (drawn.status, drawn.out.count("rank 0 |")) == (0, 1), drawn.err
    timeline = ps.simulate(ps.Plan.load(plan_file), profile, devices)
    save_timeline(replace(timeline, source="measured"), tmp_path / "measured-timeline.json")
    assert penstock("draw", tmp_path, tmp_path / "run.txt").status == 0
    text = (tmp_path / "run.txt").read_text()
    assert text.index("1f1b, simulated") < text.index("1f1b, measured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name what to draw"),
        (("1f1b",), "1f1b is the name of a schedule: penstock draw --schedule 1f1b"),
        (("no.json",), "no.json does not exist: name the file of a plan"),
        (("no.csv",), "no.csv is drawn as a schedule: penstock draw --csv no.csv"),
        (("plan.json", "--stages", 4), "--stages describes a schedule, and plan.json has its own"),
        (("plan.json", "--forward", 4), "--forward describes a schedule"),
        (("plan.json", "plan.json"), "plan.json would be replaced by its drawing"),
        (("plan.json", "a.svg", "--out", "b.svg"), "2 output files: a.svg, b.svg. Name one"),
        (("plan.json", "--cluster", "local:2"), "--cluster local:2 needs --profile"),
        (("plan.json", *SMALL), "plan.json is a plan, and would be replaced"),
        (
            ("a.svg", "--profile", "profile.json", *SMALL),
            "--profile and --cluster belong to a plan",
        ),
        (("profile.json",), "profile.json is a profile, not a plan"),
        ((".",), "holds no run"),
    ],
)
def test_a_mistake_in_what_to_draw_is_one_line(
    penstock, plan_file, profile_file, monkeypatch, words, message
):
    """The line says what to write, and no file changes."""
    monkeypatch.chdir(plan_file.parent)
    before = plan_file.read_bytes()
    result = penstock("draw", *words)
    assert result.status == 2, result
    assert message in result.err
    assert result.err.count("\n") == 1
    assert plan_file.read_bytes() == before
