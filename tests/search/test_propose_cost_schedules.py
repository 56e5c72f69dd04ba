"""Programs made to measure for what a search has found."""

from dataclasses import replace

import pytest

from penstock.cluster.cluster import cluster
from penstock.search import propose_cost_schedules as module
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
from penstock.search.propose_cost_schedules import SEARCHED_FROM_S, cost_schedules
from penstock.search.request import PlanRequest


def proposals(profile_of, *ways, memory_limit=None, **options):
    """What is proposed for these ways on four devices."""
    request = PlanRequest(
        profile_of([1.0, 2.0, 1.0, 1.0]),
        cluster("4xV100-NVLink"),
        8,
        memory_limit=memory_limit,
        **options,
    )
    proposed = [evaluate(instantiate(request, way))[-1] for way in ways]
    return list(cost_schedules(request, proposed)), request


PLAIN = Proposal((2, 2), "1f1b", 4)


def test_the_same_cut_gets_programs_of_its_own(profile_of):
    """On the same devices, with the same recomputation; and they can be made."""
    proposed, request = proposals(
        profile_of, PLAIN, Proposal((1, 3), "gpipe", 8, devices=(3, 1), recompute="always")
    )
    assert [
        (
            proposal.schedule,
            proposal.lengths,
            proposal.micro_batches,
            proposal.devices,
            proposal.recompute,
        )
        for proposal in proposed
    ] == [
        ("zb-auto", (2, 2), 4, (), "never"),
        ("zb-1p", (2, 2), 4, (), "never"),
        ("zb-auto", (1, 3), 8, (3, 1), "always"),
        ("zb-1p", (1, 3), 8, (3, 1), "always"),
    ]
    hunt = PlanSearch(request)
    assert all(hunt.evaluate(proposal, force=True) for proposal in proposed)


@pytest.mark.parametrize(
    "way",
    [
        Proposal((4,), "1f1b", 4),
        Proposal((2, 2), "1f1b", 4, (("replicas", 2),)),
        Proposal((1,) * 4, "interleaved", 4, (("chunks", 2),)),
        Proposal((2, 2), "autopipe", 4, (("sliced", 1),)),
        Proposal((2, 2), "chimera", 4),
    ],
    ids=["one stage", "copies", "several stages on a rank", "slices", "both directions"],
)
def test_other_ways_get_none(profile_of, way):
    """The makers take one stage on every rank."""
    assert proposals(profile_of, way)[0] == []


def test_named_schedules_and_weights_are_left_at_that(profile_of):
    """A flush by name is what they are made for."""
    assert proposals(profile_of, PLAIN, schedules=("1f1b",))[0] == []
    assert proposals(profile_of, PLAIN, weights="flush")[0]


def test_with_time_enough_the_order_of_the_best_is_searched_within_its_memory(profile_of):
    """Activations get the memory that weights leave; with recompute that amount is unknown."""
    proposed, _ = proposals(
        profile_of,
        PLAIN,
        Proposal((1, 3), "1f1b", 4),
        memory_limit=30_000,
        budget_s=SEARCHED_FROM_S,
    )
    (searched,) = (proposal for proposal in proposed if proposal.schedule == "synthesised")
    assert searched.lengths == (2, 2)
    assert dict(searched.options)["memory_limit"] == (30_000 - 6000,) * 2
    again, _ = proposals(
        profile_of, Proposal((2, 2), "1f1b", 4, recompute="always"), budget_s=SEARCHED_FROM_S
    )
    assert {proposal.schedule for proposal in again} == {"zb-auto", "zb-1p"}


def test_a_search_over_orders_is_proposed_only_where_it_can_explore_them(profile_of, monkeypatch):
    """For the fastest candidate, with time enough, not too many ops, and memory on all ranks."""

    def searched(way=PLAIN, **options):
        result, _ = proposals(profile_of, way, **{"budget_s": SEARCHED_FROM_S, **options})
        return [expected for expected in result if expected.schedule == "synthesised"]

    (proposal,) = searched()
    assert proposal.recompute == "never"
    room = dict(proposal.options)
    assert (room["budget_s"], room["max_rounds"]) == (module.SECONDS, module.ROUNDS)
    assert searched(budget_s=SEARCHED_FROM_S - 0.1) == []
    ops = 2 * 4
    for most, count in ((ops, 1), (ops - 1, 0)):
        monkeypatch.setattr(module, "MOST_OPS", most)
        assert len(searched()) == count
    monkeypatch.setattr(module, "MOST_OPS", 400)
    # 3 of 4 layers have 9,000 bytes of weights on rank 1: what is left is for activations.
    request = PlanRequest(
        profile_of([1.0, 2.0, 1.0, 1.0]), cluster("4xV100-NVLink"), 8, budget_s=SEARCHED_FROM_S
    )
    uneven = evaluate(instantiate(request, Proposal((1, 3), "1f1b", 4)))[-1]
    for limit, room in ((9001, (6001, 1)), (9000, None)):
        tight = replace(uneven.placed, request=replace(uneven.placed.request, memory_limit=limit))
        result = list(cost_schedules(request, [replace(uneven, placed=tight)]))
        searched_rooms = [
            dict(expected.options)["memory_limit"]
            for expected in result
            if expected.schedule == "synthesised"
        ]
        assert searched_rooms == ([room] if room else [])


def test_stages_in_another_order_on_the_ranks_are_not_plain(profile_of):
    """Programs made from costs have stage r on rank r."""
    request = PlanRequest(profile_of([1.0] * 4), cluster("4xV100-NVLink"), 8)
    plain = evaluate(instantiate(request, PLAIN))[-1]
    assert module.is_plain(plain)
    programs = plain.placed.schedule.programs[::-1]
    swapped = replace(
        plain,
        placed=replace(plain.placed, schedule=replace(plain.placed.schedule, programs=programs)),
    )
    assert not module.is_plain(swapped)
    stream = replace(request, asynchronous=True)
    assert not module.is_plain(evaluate(instantiate(stream, Proposal((2, 2), "pipedream", 1)))[-1])
