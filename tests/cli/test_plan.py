"""`penstock plan`: planners by name, all of them compared, limits, several profiles, JSON."""

import json
from dataclasses import replace

import pytest

from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.search.catalogue import PLANNERS

MIXED = """
name: mixed
devices_per_node: 2
devices:
  - {name: quick, memory: 12 GB, kind: gpu, flops: {float32: 10 TFLOP/s}, count: 1}
  - {name: slow, memory: 12 GB, kind: gpu, flops: {float32: 5 TFLOP/s}, count: 1}
inside: {latency: 1 us, bandwidth: 10 GB/s}
"""


@pytest.fixture
def mixed(tmp_path, profile_file):
    """A cluster of two kinds, and a profile of each."""
    where = tmp_path / "mixed.yaml"
    where.write_text(MIXED)
    stored_profile = Profile.load(profile_file)
    paths = []
    for name in ("quick", "slow"):
        paths.append(tmp_path / f"{name}.json")
        replace(stored_profile, device=name).save(paths[-1])
    return where, *paths


def test_a_planner_by_name_makes_the_plan_and_says_so(penstock, profile_file):
    """With what its own paper makes least."""
    result = penstock("plan", profile_file, "--planner", "torchgpipe")
    assert result.status == 0
    assert "  by planner torchgpipe" in result.out
    assert (
        json.loads(penstock("plan", profile_file, "--planner", "torchgpipe", "--json").out)[
            "planner"
        ]
        == "torchgpipe"
    )
    assert json.loads(penstock("plan", profile_file, "--json").out)["planner"] == "auto"


def test_a_wrong_planner_s_name_is_answered_with_the_closest(penstock, profile_file):
    """Wrong words are status 2, before anything is read."""
    result = penstock("plan", profile_file.with_name("missing.json"), "--planner", "pipedreem")
    assert result.status == 2
    assert "no planner called 'pipedreem'. Did you mean 'pipedream'" in result.err


def test_compare_prints_a_row_for_each_planner_and_the_best_s_plan(
    penstock, profile_file, tmp_path
):
    """Fastest first; the one that is written and drawn is the first."""
    out = tmp_path / "best.json"
    result = penstock("plan", profile_file, "--compare", "--out", out)
    assert result.status == 0
    lines = result.out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["planner", "schedule"])
    rows = lines[head + 1 : lines.index("", head)]
    names = [line.split()[0] for line in rows]
    assert sorted(names) == sorted(PLANNERS.entries())
    best = Plan.load(out)
    assert best.planner == names[0]
    assert " 1.00x " in rows[0]
    assert f"{best.schedule_name} on {best.ranks} of 2 ranks" in result.out
    assert "rank 0 |" in result.out


def test_compare_as_json_has_every_plan_or_its_refusal(penstock, profile_file):
    """For scripts: one list, each plan as `--out` writes it."""
    result = penstock("plan", profile_file, "--compare", "--json", "--stages", 2)
    content = json.loads(result.out)
    assert {row["planner"] for row in content} == set(PLANNERS.entries())
    assert all((row["plan"] is None) == bool(row["refusal"]) for row in content)
    steps = [row["plan"]["predicted"]["step_s"] for row in content if row["plan"]]
    assert steps == sorted(steps)
    assert all(len(row["plan"]["lengths"]) == 2 for row in content if row["plan"])


def test_compare_without_any_plan_is_refused_with_auto_s_reason(penstock, profile_file):
    """Every planner says about the same; one is enough."""
    result = penstock("plan", profile_file, "--compare", "--memory-limit", "100 B")
    assert result.status == 2
    assert (
        "no planner has a plan. auto says: nothing fits the memory of local:2 at batch 8"
        in result.err
    )


def test_compare_and_a_planner_contradict_each_other(penstock, profile_file):
    """One of both would be ignored in silence."""
    result = penstock("plan", profile_file, "--compare", "--planner", "gpipe")
    assert (result.status, result.err) == (
        2,
        "error: --compare runs every planner: leave out --planner gpipe\n",
    )


@pytest.mark.parametrize("compare", [(), ("--compare",)])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-replicas", 0), "error: max_replicas is 0; it must be a whole number of 1 or more"),
        (("--batch", 0), "error: batch is 0; it must be a whole number of 1 or more"),
        (("--budget", -1), "error: budget_s is -1.0; it must be 0 s or more"),
        (
            ("--micro-batches", 9),
            "error: micro_batches is 9, but there are only 8 samples in the batch",
        ),
        (("--stages", 6), "error: stages is 6, but there are only 5 layers"),
        (
            ("--recompute", "some"),
            "error: --recompute must be auto, never, except_last, always or selective, not 'some'",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(
    penstock, profile_file, words, message, compare
):
    """Status 2, one line, nothing printed."""
    result = penstock("plan", profile_file, *words, *compare)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(message)


def test_no_copies_where_none_are_allowed(penstock, profile_file):
    """Free links would make it data-parallel."""
    free = json.loads(penstock("plan", profile_file, "--cluster", "2xV100-NVLink", "--json").out)
    assert free["candidates"][0]["replicas"] == 2
    bound = json.loads(
        penstock(
            "plan", profile_file, "--cluster", "2xV100-NVLink", "--max-replicas", 1, "--json"
        ).out
    )
    assert bound["candidates"][0]["replicas"] == 1


def test_a_spent_budget_still_gives_a_plan(penstock, profile_file):
    """The best so far."""
    result = penstock("plan", profile_file, "--budget", 0, "--json")
    assert result.status == 0
    assert json.loads(result.out)["predicted"]["step_s"] > 0


def test_a_mixed_cluster_takes_a_profile_for_every_kind(penstock, mixed):
    """Alike in all but the name here: then both devices take the same, whatever their peaks say."""
    where, quick, slow = mixed
    both = json.loads(
        penstock(
            "plan",
            quick,
            slow,
            "--cluster",
            where,
            "--json",
            "--schedule",
            "gpipe",
            "--micro-batches",
            2,
        ).out
    )
    alone = json.loads(
        penstock(
            "plan", quick, "--cluster", where, "--json", "--schedule", "gpipe", "--micro-batches", 2
        ).out
    )
    assert both["predicted"]["step_s"] < alone["predicted"]["step_s"]
    assert (
        "rank 1 |"
        in penstock("plan", quick, slow, "--cluster", where, "--stages", 2, "--max-replicas", 1).out
    )


def test_two_profiles_of_one_device_or_of_none_are_refused(penstock, mixed, profile_file):
    """It would be unclear which of them counts."""
    where, quick, slow = mixed
    result = penstock("plan", quick, quick, "--cluster", where)
    assert (result.status, result.err) == (
        2,
        "error: two profiles are of the same device: quick, quick\n",
    )
    result = penstock("plan", quick, profile_file, "--cluster", where)
    assert result.status == 2
    assert f"{profile_file} does not name its device" in result.err
    result = penstock("plan", quick, slow, "--cluster", "2xV100-NVLink")
    assert (result.status, result.err) == (
        2,
        (
            "error: there is no profile for V100 of 2xV100-NVLink, only for quick, slow: measure the model on that device (ps.profile, "
            "or penstock profile), and add the profile under the name 'V100'\n"
        ),
    )
