"""Every verb: right words, wrong words, JSON for machines."""

from __future__ import annotations

import json

import pytest

SMALL = ("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)


def test_simulate_prints_the_contract_s_json(penstock):
    """docs/design.md promises these fields to scripts."""
    ran = penstock("simulate", *SMALL, "--forward", 1, "--backward", 2, "--json")
    facts = json.loads(ran.out)
    assert ran.status == 0
    assert facts["makespan"] == 33
    assert facts["bubble_ratio"] == pytest.approx(3 / 11)
    assert facts["peak_in_flight"] == [4, 3, 2, 1]


def test_simulate_takes_costs_per_stage_and_per_boundary_with_units(penstock):
    """Real stages are never equal."""
    ran = penstock(
        "simulate",
        "--schedule",
        "gpipe",
        "--stages",
        2,
        "--micro-batches",
        1,
        "--forward",
        "1s,2000ms",
        "--backward",
        "2,4",
        "--transfer",
        "500ms",
        "--json",
    )
    assert json.loads(ran.out)["makespan"] == pytest.approx(1 + 0.5 + 2 + 4 + 0.5 + 2)


def test_simulate_without_json_is_for_people_and_draws_on_request(penstock):
    """The first thing that somebody tries."""
    plain = penstock("simulate", *SMALL)
    assert "27.27%" in plain.out
    assert "4 3 2 1" in plain.out
    assert "rank 3 |" in penstock("simulate", *SMALL, "--draw").out


def test_simulate_takes_the_network_as_it_is_measured(penstock):
    """Latency, bytes over bandwidth, and a medium that all share: 1 + (0.5 + 2) + 2 + 4 + (0.5 + 2)
    + 2.
    """
    words = (
        "simulate",
        "--schedule",
        "gpipe",
        "--stages",
        2,
        "--micro-batches",
        1,
        "--forward",
        "1,2",
        "--backward",
        "2,4",
        "--latency",
        "500ms",
        "--bandwidth",
        "1KiB/s",
        "--boundary-bytes",
        "2KiB",
    )
    assert json.loads(penstock(*words, "--json").out)["makespan"] == pytest.approx(14)
    words = ("simulate", *SMALL, "--transfer", "1", "--json")
    duplex, shared = (
        json.loads(penstock(*words, "--links", links).out)["makespan"]
        for links in ("duplex", "shared")
    )
    assert duplex == 49
    assert shared > duplex


def test_simulate_tells_who_holds_the_memory_at_its_peak(penstock):
    """A number of bytes alone does not say what to change."""
    words = (
        "simulate",
        *SMALL,
        "--activation-bytes",
        "1GiB",
        "--weight-bytes",
        "2GiB,2GiB,2GiB,9GiB",
    )
    plain = penstock(*words).out
    assert "peak memory     6.0 GiB, 5.0 GiB, 4.0 GiB, 10.0 GiB" in plain
    assert "of rank 3     weights 9.0 GiB + activations 1.0 GiB" in plain
    facts = json.loads(penstock(*words, "--json").out)
    assert facts["peak_memory"] == [n * 2**30 for n in (6, 5, 4, 10)]
    assert facts["memory_holders"][0]["activations"] == 4 * 2**30
    assert facts["peak_on_rank"] == [4, 3, 2, 1]


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
    ran = penstock("verify", "--csv", path)
    assert ran.status == 1
    assert "rank 1 cannot start 1B0: it needs 1F0 on rank 1" in ran.err
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
    ran = penstock("plan", profile_file, "--cluster", "local:2", "--batch", 8, "--out", target)
    assert ran.status == 0
    assert "candidates, best first" in ran.out
    assert json.loads(target.read_text())["batch"] == 8


def test_profile_measures_and_writes(penstock, tmp_path):
    """The file is what `partition` and `plan` take."""
    target = tmp_path / "mlp.json"
    ran = penstock(
        "profile", "--model", "mlp", "--image", 8, "--batch", 8, "--repeats", 1, "--out", target
    )
    assert ran.status == 0
    assert "fc1" in ran.out
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
    ran = penstock(*words)
    assert ran.status == 2
    assert message in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


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
    ran = penstock(verb, "--help")
    assert ran.status == 0
    assert f"Example: penstock {verb}" in " ".join(ran.out.replace("│", " ").split())


def test_train_under_a_launcher_without_an_address_says_what_is_missing(penstock, monkeypatch):
    """RANK alone, left from another program, is no launcher."""
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ran = penstock("train", "--model", "mlp")
    assert ran.status == 1
    assert "RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in ran.err


@pytest.mark.parametrize(
    ("words", "makespan"),
    [
        (
            ("--schedule", "seq1f1b", "--stages", 4, "--micro-batches", 8, "--option", "slices=4"),
            8 * 3 + 3 * 3 / 4,
        ),
        (
            ("--schedule", "1f1b", "--stages", 2, "--micro-batches", 8, "--option", "replicas=2"),
            (4 + 1) * 3,
        ),
        (
            (
                "--schedule",
                "1f1b",
                "--stages",
                2,
                "--micro-batches",
                4,
                "--option",
                "warm_up=[4, 1]",
            ),
            (4 + 1) * 3,
        ),
        (
            ("--schedule", "zb-2p", "--forward", "1,1", "--backward", "2,2", "--micro-batches", 4),
            13,
        ),
    ],
)
def test_a_schedule_takes_options_and_if_it_is_made_to_measure_the_costs(penstock, words, makespan):
    """All that Python can ask for."""
    assert json.loads(penstock("simulate", *words, "--json").out)["makespan"] == pytest.approx(
        makespan
    )


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
    ran = penstock(verb, "--schedule", "1f1b", "--stages", 2, "--micro-batches", 4, *rest)
    assert ran.status in (1, 2)
    assert message in ran.err


def test_a_schedule_made_to_measure_is_not_verified_without_costs(penstock):
    """`verify` has no flags for them; it says who has."""
    ran = penstock("verify", "--schedule", "zb-1p", "--stages", 2)
    assert ran.status in (1, 2)
    assert "penstock simulate" in ran.err


def test_long_rows_are_cut_in_the_middle(penstock):
    """A thousand numbers in a terminal help nobody."""
    out = penstock("simulate", "--schedule", "gpipe", "--stages", 50, "--micro-batches", 2).out
    assert "peak in flight  2 2 2 2 2 2 … 41 more … 2 2 2" in out


STREAM = ("--schedule", "pipedream", "--stages", 4, "--micro-batches", 1)


def test_simulate_says_what_a_stream_takes_once_it_is_full(penstock):
    """The makespan of some batches has filling and draining in it, and depends on how many they
    are.
    """
    facts = json.loads(penstock("simulate", *STREAM, "--update", 1, "--json").out)
    assert (facts["seconds_per_batch"], facts["steady_bubble_ratio"]) == (4, 0)
    assert facts["makespan"] > facts["batches"] * 4
    assert (facts["weights"], facts["staleness_max"], facts["versions"]) == (
        "stash",
        [3, 2, 1, 0],
        [4, 3, 2, 1],
    )
    out = penstock("simulate", *STREAM).out
    assert "1 micro-batch per batch, 8 batches shown" in out
    assert "steady state    3 s per batch (3.0 s), bubble ratio 0.00%" in out
    assert "staleness     at most 3 2 1 0 updates" in out
    assert "versions      4 3 2 1\n" in out


def test_simulate_says_the_same_of_a_synchronous_schedule_to_scripts(penstock):
    """So that both kinds can be compared without asking which it is."""
    facts = json.loads(penstock("simulate", *SMALL, "--json").out)
    assert (facts["batches"], facts["seconds_per_batch"], facts["steady_bubble_ratio"]) == (
        1,
        33,
        facts["bubble_ratio"],
    )
    assert (facts["weights"], facts["staleness_max"], facts["versions"]) == (
        "flush",
        [0] * 4,
        [1] * 4,
    )
    assert "steady state" not in penstock("simulate", *SMALL).out


def test_simulate_shows_as_many_batches_as_asked_for(penstock):
    """What a batch takes once full is the same."""
    for batches, makespan in ((1, 12), (2, 15), (20, 12 + 19 * 3)):
        facts = json.loads(penstock("simulate", *STREAM, "--batches", batches, "--json").out)
        assert (facts["batches"], facts["makespan"], facts["seconds_per_batch"]) == (
            batches,
            makespan,
            3,
        )


def test_simulate_takes_a_weight_rule_alone_or_beside_a_schedule(penstock):
    """The rule decides what is kept, and so what memory it takes."""
    facts = json.loads(
        penstock(
            "simulate", "--weights", "double-buffer", "--stages", 2, "--micro-batches", 2, "--json"
        ).out
    )
    assert (facts["schedule"], facts["versions"]) == ("2bw", [2, 2])
    words = ("simulate", *STREAM, "--weight-bytes", 100, "--json")
    assert json.loads(penstock(*words).out)["peak_memory"] == [400, 300, 200, 100]
    assert json.loads(penstock(*words, "--batches", 2).out)["peak_memory"] == [400, 300, 200, 100]
    assert json.loads(penstock(*words, "--weights", "none").out)["peak_memory"] == [100] * 4
    assert (
        "versions      1 1 1 1, plus extra state of 2 times the weights"
        in penstock("simulate", *STREAM, "--weights", "pipemare").out
    )


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
    """The first thing that somebody asks of a schedule without a flush."""
    rows = [line.split() for line in penstock("schedules").out.splitlines()]
    assert next(row[1:3] for row in rows if row[0] == "pipedream") == ["no", "stash"]
    assert next(row[1:3] for row in rows if row[0] == "1f1b") == ["yes", "flush"]
    facts = json.loads(penstock("schedules", "--json").out)
    assert (facts["2bw"]["weights"], facts["gpipe"]["weights"]) == ("double-buffer", "flush")
