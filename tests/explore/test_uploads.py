"""Profiles and plans on the page."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.cluster.cluster import cluster
from penstock.errors import FileError, PenstockError
from penstock.explore.evaluate import evaluate
from penstock.explore.state import State, parse_state
from penstock.explore.uploads import state_of_files
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.simulate.plan_costs import stage_costs
from penstock.store import to_json


def timing(seconds):
    """A time that grows with the samples."""
    return Timing((1, 8), (seconds, 8 * seconds))


def made_up_profile():
    """A profile of six layers."""
    layers = tuple(
        LayerProfile(
            f"layer{i}",
            "Linear",
            timing(s),
            timing(2 * s),
            timing(s),
            timing(s),
            10,
            40,
            0,
            100.0,
            50.0,
        )
        for i, s in enumerate([0.003, 0.001, 0.002, 0.001, 0.005, 0.002])
    )
    return Profile(layers, "0123456789ab", 12.0, 8)


@pytest.fixture(scope="module")
def profile():
    """A profile of six layers."""
    return made_up_profile()


@pytest.fixture(scope="module")
def plan(profile):
    """A plan for it."""
    return ps.plan(profile, ps.cluster("local:2"), 8, planner="gpipe", stages=2, micro_batches=4)


def test_a_profile_becomes_costs_per_rank(profile):
    """Cut by time into one part per rank; seconds are those of its layers for a micro-batch."""
    state = parse_state("ranks=2&micro_batches=4&b=zb-v")
    upload = state_of_files(state, [("p.json", to_json(profile))])
    expected = stage_costs(profile, [4, 2], 2.0, cluster("local:2"), micro_batches=4)
    assert upload.state.forward == pytest.approx(expected.forward, rel=1e-4)
    assert upload.state.weight_bytes == expected.weight_bytes
    assert upload.state.activation_bytes == expected.activation_bytes
    assert upload.state.boundary_bytes == expected.boundary_bytes
    assert upload.state.b == state.b
    assert "6 layers in 2 parts of 4, 2 layers, with 2 of 8 samples" in upload.message
    assert parse_state(upload.state.query) == upload.state
    assert all(panel.result is not None for panel in evaluate(upload.state))


def test_a_plan_sets_the_schedule(plan):
    """Ranks, micro-batches and schedule; costs that were one per rank of others are dropped."""
    state = parse_state("ranks=3&forward=1,2,3&backward=1,1,1&update=2")
    upload = state_of_files(state, [("plan.json", to_json(plan))])
    assert (upload.state.ranks, upload.state.a.schedule) == (2, plan.schedule_name)
    assert upload.state.micro_batches == plan.micro_batches
    assert upload.state.forward == (1.0,)
    assert upload.state.backward is None
    assert upload.state.update == (2.0,)
    assert "open its profile too" in upload.message
    assert evaluate(upload.state)[0].result.whole.programs == plan.schedule.programs


def test_a_plan_with_its_profile_is_cut_as_the_plan_says(profile, plan):
    """In either order of files."""
    files = [("profile.json", to_json(profile)), ("plan.json", to_json(plan))]
    upload = state_of_files(State(), files)
    assert upload == state_of_files(State(), files[::-1])
    micro_batch = plan.batch / plan.micro_batches
    expected = stage_costs(
        profile, plan.lengths, micro_batch, cluster("local:2"), micro_batches=plan.micro_batches
    )
    assert upload.state.forward == pytest.approx(expected.forward, rel=1e-4)


def test_a_schedule_with_other_stages_than_the_plan_is_left_out(profile):
    """Costs are one per stage of the plan then, and beside its schedule there would be an error."""
    plan = ps.plan(
        profile, ps.cluster("local:2"), 8, stages=4, micro_batches=4, schedules="interleaved"
    )
    files = [("profile.json", to_json(profile)), ("plan.json", to_json(plan))]
    upload = state_of_files(parse_state("a=1f1b&b=zb-h1"), files)
    assert upload.state.b is None
    assert "zb-h1 has another number of stages, and is left out" in upload.message
    assert [panel.error for panel in evaluate(upload.state)] == [""]
    beside = state_of_files(parse_state("a=1f1b&b=zb-v"), files)
    assert beside.state.b.schedule == "zb-v"
    assert [panel.error for panel in evaluate(beside.state)] == ["", ""]


def test_a_plan_whose_programs_are_its_own_is_said_to_be(plan):
    """A name does not hold what a planner has changed."""
    content = json.loads(to_json(plan))
    content["schedule_name"] = "1f1b"
    upload = state_of_files(State(), [("plan.json", json.dumps(content))])
    assert "not those that the name" in upload.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1, 2", "is not JSON"),
        ("[]", "neither a profile nor a plan"),
        ('{"a": 1, "a": 2}', "duplicate key"),
        ('{"layers": []}', "schema"),
        ('{"programs": ["0F0"], "schema": 3}', "is no plan"),
        ('{"programs": ["0F0"], "schema": 99}', "schema"),
        ('{"layers": NaN}', "not a finite number"),
        ("[" * 100_000, "nesting|recursion|values"),
        ("\0", "NUL"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(text, message):
    """By the strict readers of files."""
    with pytest.raises(FileError, match=message) as refused:
        state_of_files(State(), [("bad<b>.json", text)])
    assert "bad<b>.json" in str(refused.value)


def test_a_profile_with_fewer_layers_than_ranks_is_refused(profile):
    """Each rank holds a layer at least."""
    with pytest.raises(FileError, match="choose at most 6 ranks"):
        state_of_files(parse_state("ranks=7"), [("p.json", to_json(profile))])


def test_a_profile_of_another_model_is_refused(profile, plan):
    """Its layers cannot be cut as the plan says."""
    shorter = json.loads(to_json(profile))
    del shorter["layers"][0]
    files = [("plan.json", to_json(plan)), ("profile.json", json.dumps(shorter))]
    with pytest.raises(PenstockError, match="6 layers and the profile has 5"):
        state_of_files(State(), files)


def test_a_plan_beyond_the_page_is_refused(plan):
    """The page has limits that a plan has not."""
    content = json.loads(to_json(plan))
    content["schedule_options"] = [["replicas", 99]]
    with pytest.raises(FileError, match="cannot show"):
        state_of_files(State(), [("plan.json", json.dumps(content))])


def test_links_of_another_number_of_ranks_are_left_out_with_a_plan(plan):
    """They are one per boundary: three of four ranks used to stay, and nothing was drawn."""
    state = parse_state("ranks=4&boundary_bytes=8&bandwidth=1GB,2GB,3GB&latency=1ms,2ms,3ms")
    new_state = state_of_files(state, [("plan.json", to_json(plan))]).state
    assert (new_state.bandwidth, new_state.latency) == (None, None)
    assert new_state.boundary_bytes == (8.0,)
    assert evaluate(new_state)[0].error == ""
