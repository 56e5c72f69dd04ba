"""Every verb: right words, wrong words, JSON for machines."""

from __future__ import annotations

import json

import pytest

SMALL = ("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)


def test_draw_prints_here_or_writes_a_file(penstock, tmp_path):
    """A picture on the terminal needs no file name."""
    assert "rank 0 |" in penstock("draw", *SMALL).out
    target = tmp_path / "out.svg"
    assert penstock("draw", target, *SMALL).status == 0
    assert target.read_text().startswith("<svg")


def test_verify_proves_a_named_schedule(penstock):
    """In-flight peaks and staleness are what one asks for."""
    facts = json.loads(penstock("verify", *SMALL, "--json").out)
    assert facts["sound"] is True
    assert facts["staleness_max"] == [0, 0, 0, 0]
    assert facts["peak_in_flight"] == [4, 3, 2, 1]


def test_verify_says_what_is_wrong_with_a_csv_and_fails(penstock, tmp_path):
    """An unsound schedule is failed work (1), not wrong words (2)."""
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n")
    result = penstock("verify", "--csv", path)
    assert result.status == 1
    assert "rank 1 cannot start 1B0: it needs 1F0 on rank 1" in result.err
    facts = json.loads(penstock("verify", "--csv", path, "--json").out)
    assert facts["sound"] is False
    assert facts["findings"][0]["rule"] == "no cycle"


def test_schedules_lists_all_with_their_sources(penstock):
    """What there is, and where it comes from."""
    facts = json.loads(penstock("schedules", "--json").out)
    assert {"naive", "gpipe", "1f1b"} <= set(facts)
    assert "DAPPLE" in penstock("schedules").out


def test_partition_cuts_a_profile(penstock, profile_file):
    """Method names, regular expressions and lengths all go through one flag."""
    assert json.loads(penstock("partition", profile_file, "--stages", 2, "--json").out) == [3, 2]
    assert json.loads(
        penstock("partition", profile_file, "--stages", 2, "--by", "type:conv", "--json").out
    ) == [2, 3]
    assert json.loads(penstock("partition", profile_file, "--by", "1,4", "--json").out) == [1, 4]
    assert "layer0" in penstock("partition", profile_file, "--stages", 2).out
    assert "bottleneck" in penstock("partition", "--list").out


def test_plan_explains_itself_and_writes_what_it_found(penstock, profile_file, tmp_path):
    """A plan is to be read, kept and used."""
    target = tmp_path / "plan.json"
    result = penstock("plan", profile_file, "--cluster", "local:2", "--batch", 8, "--out", target)
    assert result.status == 0
    assert "candidates, best first" in result.out
    assert json.loads(target.read_text())["batch"] == 8


def test_profile_measures_and_writes(penstock, tmp_path):
    """The file is what `partition` and `plan` take."""
    target = tmp_path / "mlp.json"
    result = penstock(
        "profile", "--model", "mlp", "--image", 8, "--batch", 8, "--repeats", 1, "--out", target
    )
    assert result.status == 0
    assert "fc1" in result.out
    assert json.loads(penstock("partition", target, "--stages", 3, "--json").out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", "--schedule", "1f1c", "--stages", 2), "Did you mean '1f1b'"),
        (("simulate",), "name a schedule"),
        (("simulate", "--schedule", "1f1b"), "name a schedule"),
        (("simulate", *SMALL, "--forward", "1,2"), "forward has 2 entries, the schedule needs 4"),
        (("simulate", *SMALL, "--forward", "fast"), "--forward fast"),
        (("simulate", *SMALL, "--forward", "1", "--backward", "-1"), "--backward"),
        (
            ("simulate", "--schedule", "1f1b", "--stages", 0, "--micro-batches", 2),
            "at least 1 of stages",
        ),
        (("simulate", *SMALL, "--recompute", "maybe"), "recompute is one of never"),
        (("simulate", *SMALL, "--transfer", 1, "--latency", 1), "give one of the two"),
        (
            ("simulate", *SMALL, "--bandwidth", "10GB"),
            "bandwidth has no effect without boundary_bytes",
        ),
        (("simulate", *SMALL, "--links", "fast"), "links are one of duplex"),
        (
            ("simulate", *SMALL, "--boundary-bytes", "1,2"),
            "boundary_bytes has 2 entries, the schedule needs 3",
        ),
        (("simulate", *SMALL, "--activation-bytes", "much"), "--activation-bytes much"),
        (("simulate", "--csv", "nowhere.csv"), "cannot read the schedule nowhere.csv"),
        (("simulate", "--csv", "x.csv", "--stages", 2), "--csv holds the whole schedule"),
        (("draw", *SMALL, "out.bmp"), "no drawing format"),
        (("draw", *SMALL, "no/such/folder/out.svg"), "the folder no/such/folder does not exist"),
        (("partition",), "name a profile"),
        (("partition", "nowhere.json", "--stages", 2), "cannot read the profile nowhere.json"),
        (("plan", "nowhere.json"), "cannot read the profile nowhere.json"),
        (("profile", "--model", "vgg12"), "no model called 'vgg12'"),
        (("profile", "--sizes", "four"), "--sizes four"),
        (("train", "nowhere.yaml"), "cannot read the configuration nowhere.yaml"),
        (("train", "--model", "vgg11", "--data", "text"), "takes images"),
        (("train", "--model", "mlp", "--schedule", "zigzag"), "no schedule called 'zigzag'"),
        (("train", "--model", "mlp", "--partition", "3,4"), "sums to 7, but the model has 15"),
        (("train", "--model", "mlp", "--partition", "hand"), "no partition method called 'hand'"),
        (("train", "--model", "mlp", "--stages", 99), "cannot make 99 stages from 15 layers"),
        (("train", "--micro-batches", 65), "a batch of 64 cannot be cut into 65"),
        (("train", "--model-option", "layers"), "write name=value"),
        (("train", "--memory-limit", "some", "--model", "mlp"), "'some' is not a quantity"),
        (
            ("train", "--model", "mlp", "--weights", "stash", "--schedule", "1f1b"),
            "'stash' does not go with 1f1b",
        ),
        (
            ("train", "--model", "mlp", "--weights", "spectrain", "--optimizer", "adam"),
            "no formula for Adam",
        ),
        (
            ("train", "--weights", "pipemare", "--weights-option", "decay=high"),
            "--weights-option decay=high: write a number",
        ),
        (("simulate", "--weights", "stash", *SMALL), "'stash' does not go with 1f1b"),
        (
            ("simulate", "--schedule", "2bw", "--stages", 4, "--micro-batches", 2),
            "4 or more micro-batches",
        ),
        (
            ("simulate", "--batches", 3, *SMALL),
            "1f1b is synchronous, so all its batches are alike",
        ),
        (
            ("simulate", "--batches", 0, "--schedule", "pipedream", "--stages", 2),
            "--batches 0: must be at least 1",
        ),
        (("draw", "--batches", 3, *SMALL), "1f1b is synchronous"),
        (
            ("draw", "--weights", "flush", "--schedule", "pipedream", "--stages", 2),
            "'flush' does not go with pipedream",
        ),
    ],
)
def test_wrong_words_get_one_message_and_exit_status_2(penstock, words, message):
    """No traceback, nothing measured, nothing started."""
    result = penstock(*words)
    assert result.status == 2
    assert message in " ".join(result.err.split())
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "words", [("simulat",), ("simulate", "--stage", 2), ("train", "--epochs", "x")]
)
def test_words_that_the_parser_refuses_exit_with_2(penstock, words):
    """The parser's own errors keep the same status."""
    assert penstock(*words).status == 2


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "profile",
        "partition",
        "plan",
        "simulate",
        "draw",
        "verify",
        "schedules",
        "export",
        "doctor",
    ],
)
def test_every_verb_has_help_with_an_example(penstock, verb):
    """An example says more than a list of flags."""
    result = penstock(verb, "--help")
    assert result.status == 0
    assert f"Example: penstock {verb}" in " ".join(result.out.replace("│", " ").split())


def test_train_under_a_launcher_without_an_address_says_what_is_missing(penstock, monkeypatch):
    """RANK alone, left from another program, is no launcher."""
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = penstock("train", "--model", "mlp")
    assert result.status == 1
    assert "RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", "--option", "slices"), "--option slices: write name=value"),
        (("simulate", "--option", "slice=4"), "1f1b does not take slice"),
        (("verify", "--option", "replicas=0"), "replicas"),
        (("export", "--option", "replicas=2"), "copies"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(penstock, words, message):
    """By its name, with what to write instead."""
    verb, *rest = words
    result = penstock(verb, "--schedule", "1f1b", "--stages", 2, "--micro-batches", 4, *rest)
    assert result.status in (1, 2)
    assert message in result.err


def test_a_schedule_made_to_measure_is_not_verified_without_costs(penstock):
    """`verify` has no flags for them; it says who has."""
    result = penstock("verify", "--schedule", "zb-1p", "--stages", 2)
    assert result.status in (1, 2)
    assert "penstock simulate" in result.err


STREAM = ("--schedule", "pipedream", "--stages", 4, "--micro-batches", 1)


def test_draw_shows_as_many_batches_as_asked_for_and_a_stream_against_another_schedule(penstock):
    """A stream beside one with a flush is the picture of what asynchrony buys."""
    out = penstock("draw", *STREAM, "--batches", 3, "--against", "1f1b").out
    assert "B2" in out
    assert "B3" not in out
    assert "1f1b" in out


def test_plan_takes_a_weight_rule_and_weighs_asynchronous_schedules_on_request(
    penstock, profile_file
):
    """As Python does."""
    words = ("plan", profile_file, "--cluster", "local:2", "--batch", 8, "--stages", 2)
    facts = json.loads(
        penstock(*words, "--weights", "pipemare", "--weights-option", "decay=0.25", "--json").out
    )
    assert (facts["schedule_name"], facts["weights"], facts["weights_options"]) == (
        "pipedream",
        "pipemare",
        [["decay", 0.25]],
    )
    assert facts["stream"]["batches"] > 1
    assert (
        "asynchronous: weights stash, staleness at most 1"
        in penstock(*words, "--schedule", "pipedream").out
    )
    both = penstock(*words, "--asynchronous").out
    assert "stash" in both
    assert "flush" in both


def test_schedules_says_which_are_asynchronous_and_with_which_rule(penstock):
    """Asynchronous schedules must be recognisable in the list."""
    rows = [line.split() for line in penstock("schedules").out.splitlines()]
    assert next(row[1:3] for row in rows if row[0] == "pipedream") == ["no", "stash"]
    assert next(row[1:3] for row in rows if row[0] == "1f1b") == ["yes", "flush"]
    facts = json.loads(penstock("schedules", "--json").out)
    assert (facts["2bw"]["weights"], facts["gpipe"]["weights"]) == ("double-buffer", "flush")
