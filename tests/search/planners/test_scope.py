"""What the papers' planners can be asked, and what of their proposals is simulated."""

import pytest

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.planners.scope import (
    SIMULATED,
    SIMULATED_FORWARDS,
    check_alike,
    check_scope,
    likely,
    may_fit,
    quickest,
)
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest


def request_of(profile, memory=10**12, names=("d", "d"), **asked):
    """A question about two devices, one on each node."""
    devices = tuple(Device(name, memory, flops=(("float32", 1e12),)) for name in names)
    return PlanRequest(
        profile, Cluster("c", devices, 1, Link(0.0, 1e9), Link(0.0, 1e9)), 16, **asked
    )


def test_an_alias_of_an_own_schedule_is_the_planners_own(profile_of):
    """`pipedream-flush` is 1f1b by another name."""
    check_scope(request_of(profile_of([1.0]), schedules=("pipedream-flush",)), "p", "1f1b")


def test_another_schedule_or_a_cut_that_is_asked_for_is_refused(profile_of):
    """What comes out would not be the paper's."""
    with pytest.raises(PlanError, match="p runs 1f1b, and gpipe is requested"):
        check_scope(request_of(profile_of([1.0]), schedules=("gpipe",)), "p", "1f1b")
    with pytest.raises(
        PlanError, match=r"p cuts by its own method, and partition=\(1,\) is requested"
    ):
        check_scope(request_of(profile_of([1.0]), by=(1,)), "p", "1f1b")


def test_devices_of_different_kinds_are_refused_by_name(profile_of):
    """The message says which."""
    check_alike(request_of(profile_of([1.0])), "p")
    with pytest.raises(PlanError, match="p takes all devices for equal, and c has d, e"):
        check_alike(request_of(profile_of([1.0]), names=("d", "e")), "p")


@pytest.mark.parametrize("memory", [2_000, 5_000, 8_000, 11_000, 14_000, 40_000])
@pytest.mark.parametrize("lengths", [(4,), (2, 2), (1, 3)])
@pytest.mark.parametrize("micro_batches", [2, 4, 16])
def test_what_may_not_fit_at_a_glance_never_fits_in_full(
    profile_of, memory, lengths, micro_batches
):
    """The look leaves out only what `best_plan` would refuse after a simulation."""
    from penstock.search.best_plan import plan_proposal

    request = request_of(
        profile_of([1e-3] * 4, activation=300.0, parameters=500, output=20.0), memory
    )
    for replicas in (1,) if len(lengths) > 1 else (1, (2,)):
        options = () if replicas == 1 else (("replicas", replicas),)
        proposal = Proposal(lengths, "1f1b", micro_batches, options)
        if not may_fit(request, proposal):
            with pytest.raises(PlanError, match="nothing fits"):
                plan_proposal(request, proposal)


def test_where_nothing_may_fit_all_are_kept_so_that_the_message_has_what_they_need(profile_of):
    """An empty list would say nothing."""
    proposals = [Proposal((2, 2), "1f1b", count) for count in (2, 4)]
    assert likely(request_of(profile_of([1e-3] * 4), memory=10), proposals) == proposals


def test_few_proposals_are_simulated_and_of_large_ones_only_the_first():
    """A planner must be quick, also on a thousand devices."""
    small = [Proposal((1, 1), "1f1b", 2 + turn) for turn in range(10)]
    large = [Proposal((1,) * 50, "1f1b", 4096 + turn) for turn in range(10)]
    assert quickest(small) == small[:SIMULATED]
    assert quickest(large) == large[:1]


@pytest.mark.parametrize(
    ("options", "lengths", "micro_batches", "replicas", "needed"),
    [
        # Weights, gradients and momentum of 4 layers, 3 x 40 bytes each; 2 micro-batches of 8
        # samples, in flight on stage 0 both; 100 bytes per sample and layer.
        ({"recompute": "never"}, (2, 2), 2, (), 2 * 120 + 2 * 8 * 200),
        # Only the first micro-batch is in flight on the only stage.
        ({"recompute": "never"}, (4,), 2, (), 4 * 120 + 8 * 400),
        # No more than there are.
        ({"recompute": "never"}, (1, 1, 2), 1, (), 2 * 120 + 16 * 200),
        # Two ranks of stage 0 share the micro-batches.
        ({"recompute": "never"}, (2, 2), 2, (2, 1), 2 * 120 + 8 * 200),
        # The inputs of all but one: 10 bytes per sample.
        ({"recompute": "always"}, (2, 2), 2, (), 2 * 120 + 8 * 10 + 8 * 200),
        # A stage behind the first one has the output of the layer before as its input.
        ({"recompute": "always"}, (1, 2, 1), 4, (), 2 * 120 + 4 * 7 + 4 * 200),
        # Its largest layer alone is recomputed.
        ({}, (2, 2), 2, (), 2 * 120 + 8 * 10 + 8 * 100),
        # A batch of 16 in 3 micro-batches has some of 6 samples.
        ({"recompute": "never"}, (4,), 3, (), 4 * 120 + 6 * 400),
    ],
)
def test_a_look_counts_the_least_bytes_of_the_fullest_stage(
    profile_of, options, lengths, micro_batches, replicas, needed
):
    """What fits exactly may fit, and with a byte less it cannot."""
    profile = profile_of([1e-3] * 4, activation=100.0, parameters=40, output=7.0)
    proposal_options = (("replicas", replicas),) if replicas else ()
    proposal = Proposal(lengths, "1f1b", micro_batches, proposal_options)
    names = ("d",) * 3
    assert may_fit(request_of(profile, needed, names, **options), proposal)
    assert not may_fit(request_of(profile, needed - 1, names, **options), proposal)
    local = Proposal(
        lengths, "1f1b", micro_batches, proposal_options, recompute=options.get("recompute", "auto")
    )
    assert may_fit(request_of(profile, needed, names), local)
    assert not may_fit(request_of(profile, needed - 1, names), local)


def test_a_look_is_at_the_devices_that_a_proposal_names(profile_of):
    """Of the replicas of a stage the one with the least memory counts."""
    profile = profile_of([1e-3] * 2, activation=100.0, parameters=0, output=0.0)
    link = Link(0.0, 1e9)
    devices = (Device("d", 10), Device("e", 10**9), Device("e", 10**9))
    request = PlanRequest({"d": profile, "e": profile}, Cluster("c", devices, 1, link, link), 16)
    for chosen, expected in (((1, 2), True), ((0, 1), False), ((1, 0), False), ((), False)):
        assert may_fit(request, Proposal((1, 1), "1f1b", 4, devices=chosen)) == expected
    options = (("replicas", (1, 2)),)
    assert not may_fit(request, Proposal((1, 1), "1f1b", 4, options, devices=(1, 2, 0)))
    # A number of pipelines says nothing about the stages.
    proposals = [Proposal((1, 1), "1f1b", 4, devices=chosen) for chosen in ((0, 1), (1, 2))]
    assert likely(request, proposals) == proposals[1:]


def test_proposals_are_simulated_up_to_their_forwards_together():
    """The first always; those that reach the limit exactly are still simulated."""
    stages, count = 10, SIMULATED_FORWARDS // 20
    half = [Proposal((1,) * stages, "1f1b", count) for _ in range(4)]
    assert len(quickest(half)) == 2
    assert len(quickest([Proposal((1,) * stages, "1f1b", count + 1)] * 4)) == 1
    assert quickest([]) == []
    assert len(quickest(half, 1)) == 1
