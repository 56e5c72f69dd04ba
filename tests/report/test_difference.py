"""The explanation of a difference between predicted and measured step: only what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from penstock.draw.draw import unit_timeline
from penstock.event import Timeline
from penstock.profile.conditions import Conditions
from penstock.report.cells import blocks_of
from penstock.report.difference import explain_difference
from penstock.report.document import Text
from penstock.report.run_report import run_report
from penstock.schedule.catalogue import schedule

#: Two ranks alone on two cores.
QUIET = Conditions(
    seconds=10.0,
    cores=2,
    processes=2,
    own_cores=1.8,
    other_cores=0.0,
    stolen_cores=0.0,
    core_wait=0.01,
    clock_hz=3e9,
    heat_throttles_per_s=0.0,
    quota_throttled=0.0,
    memory_stall=0.0,
    swap_bytes_per_s=0.0,
    page_faults_per_s=100.0,
    disk_faults_per_s=0.0,
    page_fault_s=1e-6,
    product_s=1e-3,
    copy_s=4e-3,
)

#: What differs, the text that names it, and the estimated change of the step.
CAUSES = {
    "other programs": (
        {"other_cores": 0.8, "core_wait": 0.3},
        "other programs used 0.8 of 2 cores, 0.0 of 2 when profiled",
        0.29,
    ),
    "other programs, no waiting reported": (
        {"other_cores": 0.5, "core_wait": None},
        "other programs used 0.5 of 2 cores",
        0.33,
    ),
    "waiting": ({"core_wait": 0.35}, "ranks waited 0.35 s for a core", 0.34),
    "hypervisor": (
        {"stolen_cores": 0.5},
        "the hypervisor gave 25% of the cores to other virtual machines, 0% when profiled",
        0.33,
    ),
    "clock": (
        {"clock_hz": 2.4e9, "heat_throttles_per_s": 3.0},
        "the cores ran at 2.40 GHz, at 3.00 GHz when profiled, and heat slowed them down 3.0 times",
        0.25,
    ),
    "quota": (
        {"quota_throttled": 0.2},
        "the CPU quota of the container stopped the ranks for 20% of the time, 0% when profiled",
        0.25,
    ),
    "memory": (
        {"memory_stall": 0.2, "swap_bytes_per_s": 2e6},
        "tasks waited for memory 20% of the time, 0% when profiled, and 1.9 MiB a second were",
        0.25,
    ),
    "the time of a matrix product": (
        {"product_s": 1.25e-3},
        "a product of matrices of the same size took 1.2 ms, 1.0 ms when profiled",
        0.25,
    ),
    "the time of a copy in memory": (
        {"copy_s": 5e-3},
        "a copy in memory of the same size took 5.0 ms, 4.0 ms when profiled",
        0.25,
    ),
    "page faults": (
        {"page_faults_per_s": 200_100.0},
        "a rank had 200,100 page faults a second, 100 when profiled, of 1.0 us each",
        0.2,
    ),
}


def explained(change, run, profile=QUIET, timelines=(None, None)):
    """The explanation of a step that differs by `change` from a predicted second."""
    return explain_difference(1.0, 1.0 + change, timelines, (profile, run))


@pytest.mark.parametrize("name", CAUSES)
def test_a_condition_that_differs_is_named_with_its_figures(name):
    """With an estimate of its effect, which follows from the figures."""
    changes, text, effect = CAUSES[name]
    difference = explained(0.3, replace(QUIET, **changes))
    assert text in str(difference)
    assert max(cause.effect for cause in difference.causes) == pytest.approx(effect, abs=0.01)


@pytest.mark.parametrize("name", CAUSES)
def test_a_condition_that_was_worse_when_profiled_explains_a_shorter_step(name):
    """And does not explain a longer one."""
    changes, _, _ = CAUSES[name]
    if changes.get("core_wait", 0) is None:
        changes = {**changes, "core_wait": None}
    profile = replace(QUIET, **changes)
    assert explained(-0.2, QUIET, profile).causes
    assert not explained(0.3, QUIET, profile).causes


def test_without_a_difference_in_the_conditions_no_cause_is_claimed():
    """The text says so, and what was compared."""
    text = str(explained(0.3, QUIET))
    assert "30% longer than predicted: 1.3 s instead of 1.0 s" in text
    assert "No cause was measured" in text
    assert "other programs, waiting for a core" in text
    assert "Measured cause" not in text


def test_a_condition_that_explains_little_is_no_cause():
    """4 % of stolen cores do not explain 30 %."""
    assert not explained(0.3, replace(QUIET, stolen_cores=0.08)).causes


def test_a_condition_that_the_system_does_not_report_is_not_compared():
    """A virtual machine has no clock frequency."""
    difference = explained(0.3, replace(QUIET, clock_hz=None))
    assert "clock and heat" not in difference.compared
    assert "page faults" in difference.compared


@pytest.mark.parametrize("missing", ["profile", "run"])
def test_conditions_that_were_not_recorded_are_said_to_be_missing(missing):
    """As in a run of an older version."""
    profile, run = (None, QUIET) if missing == "profile" else (QUIET, None)
    assert "were not recorded" in str(explained(0.3, run, profile))


@pytest.mark.parametrize("change", [0.0, 0.09, -0.09])
def test_a_small_difference_is_not_explained(change):
    """Up to 10 %, repeated runs differ as much."""
    assert explained(change, replace(QUIET, other_cores=2.0)) is None


def test_ranks_beyond_the_cores_are_no_cause():
    """The plan counts that they share cores."""
    run = replace(QUIET, processes=4, core_wait=1.02)
    assert not explained(0.3, run).causes


def test_more_busy_ranks_than_when_profiled_are_named():
    """They share caches and memory: there are figures, and no estimate."""
    difference = explained(0.3, QUIET, replace(QUIET, processes=1))
    assert "2 ranks shared the host's caches and memory, 1 when profiled" in str(difference)
    assert difference.causes[0].effect is None


def test_the_time_is_divided_into_ops_waiting_and_the_rest():
    """Of the rank whose ops differ most."""
    predicted = unit_timeline(schedule("gpipe", 2, 2))
    rows = [
        (event.rank, event.op, 2 * event.start, 2 * event.end, 0, None)
        for event in predicted.compute
    ]
    measured = Timeline.of(rows, 2, 2, None, "measured", "gpipe")
    timelines, conditions = (predicted, measured), (QUIET, QUIET)
    median_s, step_s = measured.makespan + 5.0, measured.makespan + 3.0
    difference = explain_difference(predicted.makespan, median_s, timelines, conditions, step_s)
    busy, idle = predicted.busy[0], predicted.makespan - predicted.busy[0]
    assert f"the ops of rank 0 took {2 * busy:.1f} s (predicted {busy:.1f} s)" in difference.parts
    assert f"it was idle for {2 * idle:.1f} s (predicted {idle:.1f} s)" in difference.parts
    assert "In a recorded step of 21.0 s, " in difference.parts
    assert "3.0 s were outside all ops" in difference.parts
    older = explain_difference(predicted.makespan, median_s, timelines, conditions)
    assert "outside" not in older.parts, "the median step is not the one that was recorded"


def test_the_report_of_a_run_has_the_explanation(run_folder):
    """From the conditions in its profile and its outcome."""
    profile_path, outcome_path = run_folder / "profile.json", run_folder / "outcome.json"
    profile, outcome = json.loads(profile_path.read_text()), json.loads(outcome_path.read_text())
    profile["conditions"] = asdict(QUIET)
    outcome["conditions"] = asdict(replace(QUIET, quota_throttled=0.15))
    outcome["predicted_step_quartiles_s"] = [1.0, 2.0]
    outcome["measured_step_quartiles_s"] = [3.0, 4.0]
    profile_path.write_text(json.dumps(profile))
    outcome_path.write_text(json.dumps(outcome))
    blocks = list(blocks_of(run_report(run_folder)))
    texts = [block.text for block in blocks if isinstance(block, Text)]
    assert any("CPU quota of the container stopped the ranks for 15%" in text for text in texts)
    rows = next(block.rows for block in blocks if getattr(block, "name", "") == "time")
    assert rows[1][:3] == ("lower quartile", 1.0, 3.0)
    assert rows[2][:3] == ("upper quartile", 2.0, 4.0)
