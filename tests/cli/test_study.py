"""`penstock study`: right words, wrong words, and going on where it stopped."""

from __future__ import annotations

import json

import pytest


def test_a_quick_study_of_two_rules_writes_everything_and_is_not_run_twice(penstock, tmp_path):
    """The whole way from the words to the figures; the second time nothing is left to do."""
    words = (
        "study",
        "convergence",
        "--quick",
        "--tasks",
        "digits",
        "--rules",
        "stash",
        "--seeds",
        1,
        "--epochs",
        0.04,
        "--jobs",
        1,
        "--out",
        tmp_path,
    )
    first = penstock(*words, "--json")
    assert first.status == 0, first.err
    content = json.loads(first.out)
    assert {record["rule"] for record in content["records"]} == {"flush", "stash"}
    assert {record["batches"] for record in content["records"]} == {2}
    by_rule = {pace["rule"]: pace for pace in content["paces"]}
    assert by_rule["stash"]["staleness"] == [1, 0]
    assert by_rule["stash"]["versions"] == [2, 1]
    assert all(pace["simulated_s"] > 0 for pace in content["paces"])
    for name in (
        "study.json",
        "study.md",
        "digits-samples.png",
        "digits-final.svg",
        "digits-profile.json",
    ):
        assert (tmp_path / name).exists()
    second = penstock(*words)
    assert "2 of 2 cases are in" in second.err
    assert "One seed: differences are shown" in second.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("speed",), "no study called 'speed'"),
        (("convergence", "--rules", "stach"), "Did you mean 'stash'?"),
        (("convergence", "--depths", "0"), "depth 0: must be at least 1"),
        (("convergence", "--depths", "two"), "--depths two: write numbers of stages with commas"),
        (("convergence", "--tasks", "mnist"), "no study task called 'mnist'"),
        (("convergence", "--jobs", "0"), "--jobs 0: must be at least 1"),
        (
            ("convergence", "--micro-batches", "4"),
            "micro-batches must be 'least' or 'stages', not '4'",
        ),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(penstock, tmp_path, words, message):
    """Exit status 2, one message, no folder."""
    result = penstock("study", *words, "--out", tmp_path / "new")
    assert result.status == 2
    assert message in result.err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_said_at_once(penstock, tmp_path):
    """Before the first case, not after it."""
    (tmp_path / "file").write_text("")
    result = penstock("study", "convergence", "--quick", "--out", tmp_path / "file")
    assert result.status == 2
    assert "cannot store records in" in result.err
