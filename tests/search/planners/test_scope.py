"""What the papers' planners can be asked, and what of their proposals is simulated."""

import pytest

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.errors import PlanError
from penstock.search.planners.scope import (
    SIMULATED,
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
