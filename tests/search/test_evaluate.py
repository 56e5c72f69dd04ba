"""Memory and time of placed schedules: which recompute is tried, and the error if nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.schedule.recompute import Recompute
from penstock.search.evaluate import INFEASIBLE_ROWS, evaluate, infeasible_error, refine_recompute
from penstock.search.instantiate import PlacedSchedule, instantiate
from penstock.search.proposal import Proposal
from penstock.search.recompute.min_time_recompute import FINE
from penstock.search.recompute.selective_recompute import select_recompute
from penstock.search.request import PlanRequest
from penstock.simulate.steady_state import steady

LINK = Link(0.0, 1e12)


def placed(profile, room, proposal, batch=8, **options) -> PlacedSchedule:
    """A proposal on as many equal devices as it has stages."""
    devices = (Device("d", room),) * proposal.stages
    cluster = Cluster("box", devices, len(devices), LINK, LINK)
    return instantiate(PlanRequest(profile, cluster, batch, **options), proposal)


def tried(variants) -> list[tuple[str, bool]]:
    """The recompute of every variant, and whether it fits."""
    return [(variant.recompute.value, not variant.memory_shortfall) for variant in variants]


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        # 8 micro-batches of 2 layers with 100 bytes each.
        (1600, [("never", True)]),
        (1599, [("never", False), ("selective", True)]),
        # The last micro-batch is recomputed as well.
        (250, [("never", False), ("except_last", False), ("selective", True)]),
        (100, [("never", False), ("selective", False), ("except_last", False), ("always", False)]),
    ],
)
def test_no_more_is_recomputed_than_fits_and_variants_that_do_not_fit_come_first(
    profile_of, room, expected
):
    """The last variant is the one to run; the others say what they would need."""
    profile = profile_of([1.0] * 4, parameters=0, activation=100.0)
    variants = evaluate(placed(profile, room, Proposal((2, 2), "gpipe", 8)))
    assert tried(variants) == expected
    for variant in variants:
        assert (variant.steady_state is None) == bool(variant.memory_shortfall)
        assert variant.memory_ratio == max(variant.memory) / room


def test_of_several_kinds_of_recompute_that_fit_only_the_fastest_is_left(profile_of):
    """Each kind is evaluated alone as the reference. The others that fit would only be slower."""
    profile = profile_of([1.0, 1.0, 1.0, 1.0], parameters=0, activation=100.0)
    fastest = set()
    for room in range(300, 1600, 50):
        cell = placed(profile, room, Proposal((2, 2), "gpipe", 8))
        times = {}
        for recompute in ("selective", "except_last", "always"):
            request = replace(cell.request, recompute=recompute)
            (variant,) = evaluate(replace(cell, request=request))
            if not variant.memory_shortfall:
                times[recompute] = variant.step_s
        chosen = evaluate(cell)[-1]
        assert bool(chosen.memory_shortfall) == (not times)
        if times:
            assert chosen.step_s == pytest.approx(min(times.values()))
            fastest.add(chosen.recompute.value)
        assert sum(not variant.memory_shortfall for variant in evaluate(cell)) <= 1
    assert "selective" in fastest


@pytest.mark.parametrize("recompute", tuple(Recompute))
def test_a_named_recompute_is_the_only_one_that_is_tried(profile_of, recompute):
    """Whether it fits or not; the request's word counts before the proposal's."""
    profile = profile_of([1.0] * 4, parameters=0)
    for room in (10, 10**6):
        proposal = Proposal((2, 2), "gpipe", 8, recompute=recompute)
        (variant,) = evaluate(placed(profile, room, proposal))
        assert variant.recompute is recompute
        request_names = placed(
            profile, room, Proposal((2, 2), "gpipe", 8), recompute=recompute.value
        )
        (again,) = evaluate(request_names)
        assert (again.recompute, again.memory) == (recompute, variant.memory)
        other = replace(request_names.proposal, recompute=Recompute.NEVER)
        (third,) = evaluate(replace(request_names, proposal=other))
        assert third.recompute is recompute


def test_what_certainly_takes_longer_than_the_cutoff_is_left_out(profile_of):
    """All kinds of recompute take time: with a cutoff below that of any selection only the variant
    without is tried. A named recompute is always evaluated.
    """
    profile = profile_of([1.0] * 4, parameters=0)
    cell = placed(profile, 300, Proposal((2, 2), "gpipe", 8))
    step_s = evaluate(cell)[-1].step_s
    assert tried(evaluate(cell, cutoff_s=1.0)) == [("never", False)]
    assert tried(evaluate(cell, cutoff_s=step_s)) == tried(evaluate(cell))
    named = replace(cell, proposal=replace(cell.proposal, recompute=Recompute.SELECTIVE))
    assert tried(evaluate(named, cutoff_s=1.0)) == tried(evaluate(named))
    roomy = placed(profile, 10**6, Proposal((2, 2), "gpipe", 8))
    assert tried(evaluate(roomy, cutoff_s=1e-9)) == [("never", True)]


def test_without_a_selection_the_other_kinds_are_tried_and_a_named_selection_gives_nothing(
    profile_of,
):
    """BPipe moves activations to another rank: the stages of its ranks overlap."""
    profile = profile_of([1.0] * 4, parameters=0)
    cell = placed(profile, 10, Proposal((1,) * 4, "bpipe", 8))
    never, except_last, always = evaluate(cell)
    assert tried((never, except_last, always)) == [
        ("never", False),
        ("except_last", False),
        ("always", False),
    ]
    for variant, number in ((never, 1), (except_last, 2), (always, 3)):
        room = max(variant.memory)
        fitting = evaluate(placed(profile, room, Proposal((1,) * 4, "bpipe", 8)))
        assert (len(fitting), fitting[-1].recompute) == (number, variant.recompute)
        assert [bool(variant.memory_shortfall) for variant in fitting] == [True] * (number - 1) + [
            False
        ]
    named = replace(cell, proposal=replace(cell.proposal, recompute=Recompute.SELECTIVE))
    assert evaluate(named) == []


def test_the_chosen_selection_is_searched_again_at_fine_precision(profile_of):
    """The search of all candidates is coarse. What does not become faster stays as it is."""
    seconds = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07]
    profile = profile_of(seconds, parameters=0, activation=100.0, output=1.0)
    improved = 0
    for room in range(2000, 6400, 400):
        cell = placed(profile, room, Proposal((8,), "gpipe", 8), recompute="selective")
        (coarse,) = evaluate(replace(cell, request=replace(cell.request, recompute="auto")))[-1:]
        if coarse.memory_shortfall or coarse.recompute is not Recompute.SELECTIVE:
            assert refine_recompute(coarse) is coarse
            continue
        fine = refine_recompute(coarse)
        best = select_recompute(cell, FINE)
        best_s = steady(best.schedule, best.costs, Recompute.SELECTIVE).seconds_per_batch
        assert fine.step_s == pytest.approx(min(best_s, coarse.step_s))
        assert (fine is coarse) == (best_s >= coarse.step_s)
        assert not fine.memory_shortfall
        assert refine_recompute(fine) is fine
        improved += fine is not coarse
    assert improved


def test_nothing_fits_shows_the_nearest_of_each_kind_and_what_would_help(profile_of):
    """At most four rows, nearest first; with the numbers that the user can change."""
    profile = profile_of([1.0] * 4, parameters=0, activation=100.0)
    variants = []
    for name, lengths in (
        ("gpipe", (2, 2)),
        ("1f1b", (2, 2)),
        ("1f1b", (1, 1, 2)),
        ("gpipe", (1, 1, 2)),
        ("zb-h1", (2, 2)),
    ):
        cell = placed(profile, 20, Proposal(lengths, name, 8, recompute="never"))
        variants += evaluate(cell)
    request = variants[0].placed.request
    lines = str(infeasible_error(request, variants, ["not shown"], "the clock ended it")).split(
        "\n"
    )
    assert lines[0] == "nothing fits the memory of box at batch 8; nearest first"
    rows = sorted(variants, key=lambda variant: variant.memory_ratio)
    assert len(lines) == 1 + INFEASIBLE_ROWS + 2
    for line, variant in zip(lines[1:-2], rows, strict=False):
        lengths = ", ".join(map(str, variant.placed.proposal.lengths))
        assert line == (
            f"  {variant.placed.schedule.name}, {len(variant.placed.proposal.lengths)} stages of "
            f"{lengths} layers, 8 micro-batches, recompute never: {variant.memory_shortfall}"
        )
    assert lines[-2] == "  the clock ended it"
    advice = "  Use more ranks, or ranks with more memory, or a smaller batch"
    assert lines[-1] == advice
    for fixed in ({"recompute": "never"}, {"stages": 2}, {"micro_batches": 8}):
        text = str(infeasible_error(replace(request, **fixed), variants, []))
        assert text.endswith(
            f"\n{advice}, or leave recompute, stages and micro_batches to the planner"
        )


def test_without_any_candidate_the_reasons_are_given_up_to_twelve(profile_of):
    """The note about the clock comes last."""
    request = placed(profile_of([1.0]), 10, Proposal((1,), "gpipe", 1)).request
    reasons = [f"reason {number}" for number in range(13)]
    text = str(infeasible_error(request, [], reasons, "cut short"))
    assert text.split("\n  ") == [
        "no schedule can be made for these numbers",
        *reasons[:12],
        "cut short",
    ]


def test_configurations_that_differ_by_their_replicas_have_different_lines(profile_of):
    """Equal lines would not say what was tried."""
    profile = profile_of([1.0] * 2, parameters=0, activation=100.0)
    on = Cluster("box", (Device("d", 20),) * 3, 3, LINK, LINK)
    variants = []
    for lengths, count, replicas in (((1, 1), 8, 1), ((1, 1), 8, (2, 1)), ((2,), 1, 1)):
        way = Proposal(
            lengths, "1f1b", count, (("replicas", replicas),) * (replicas != 1), recompute="never"
        )
        variants += evaluate(instantiate(PlanRequest(profile, on, 8), way))
    text = str(infeasible_error(variants[0].placed.request, variants, []))
    for line in (
        "1f1b, 2 stages of 1, 1 layers, 8 micro-batches, recompute never: needs",
        "1f1b, 2 stages of 1, 1 layers with 2, 1 replicas, 8 micro-batches, recompute never: needs",
        "1f1b, 1 stage of 2 layers, 1 micro-batch, recompute never: needs",
    ):
        assert f"  {line}" in text
