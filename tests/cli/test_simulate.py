"""`penstock simulate`: figures for people, JSON for scripts, costs and streams."""

from __future__ import annotations

import json

import pytest

SMALL = ("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)
STREAM = ("--schedule", "pipedream", "--stages", 4, "--micro-batches", 1)


def test_simulate_prints_the_contract_s_json(penstock):
    """docs/design.md promises these fields to scripts."""
    result = penstock("simulate", *SMALL, "--forward", 1, "--backward", 2, "--json")
    facts = json.loads(result.out)
    assert result.status == 0
    assert facts["makespan"] == 33
    assert facts["bubble_ratio"] == pytest.approx(3 / 11)
    assert facts["peak_in_flight"] == [4, 3, 2, 1]


def test_simulate_takes_costs_per_stage_and_per_boundary_with_units(penstock):
    """Real stages are never equal."""
    result = penstock(
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
    assert json.loads(result.out)["makespan"] == pytest.approx(1 + 0.5 + 2 + 4 + 0.5 + 2)


def test_simulate_without_json_is_for_people_and_draws_on_request(penstock):
    """The plain command must be readable without knowledge of its flags."""
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
            ("--schedule", "1f1b", "--stages", 2, "--micro-batches", 8, "--option", "replicas=2,1"),
            1 + 8 * 3 + 2,
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


def test_long_rows_are_cut_in_the_middle(penstock):
    """A thousand numbers in a terminal cannot be read."""
    out = penstock("simulate", "--schedule", "gpipe", "--stages", 50, "--micro-batches", 2).out
    assert "peak in flight  2 2 2 2 2 2 … 41 more … 2 2 2" in out


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
