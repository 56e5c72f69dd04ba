"""Devices of a candidate that are exchanged while the simulated time decreases."""

from itertools import permutations

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.search.cut_search.refine_devices import refine_devices
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.plan_search import PlanSearch
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

#: Five devices on three hosts: more than those whose placements are all searched.
HOSTS = (0, 0, 1, 1, 2)


def cluster_on(hosts: tuple[int, ...]) -> Cluster:
    """Return equal devices on these hosts, with slow links between them."""
    devices = (Device("d", 10**12),) * len(hosts)
    return Cluster("c", devices, 1, Link(0.0, 1e12), Link(1e-3, 1e5), node_of=hosts)


def test_exchanges_reach_the_order_with_fewest_hops_between_hosts(profile_of):
    """Stages in the order of hosts 0, 1, 0, 1, 2 cross at each boundary; the best order only twice."""
    request = PlanRequest(profile_of([1e-3] * 5), cluster_on(HOSTS), 8, max_replicas=1)
    search = PlanSearch(request)
    start = Proposal((1,) * 5, "1f1b", 4, devices=(0, 2, 1, 3, 4))
    candidate = search.evaluate(start)
    assert candidate is not None
    reached = refine_devices(search, candidate)
    fastest = min(
        evaluate(instantiate(request, Proposal((1,) * 5, "1f1b", 4, devices=devices)))[-1].step_s
        for devices in permutations(range(5))
    )
    assert reached.step_s <= fastest * (1 + 1e-9) < candidate.step_s


def test_an_unused_device_takes_the_place_of_a_slower_one(profile_of):
    """Rank 0 is on the slow device although a fast one is free."""
    profile = profile_of([1e-3] * 2)
    slow = profile_of([4e-3] * 2)
    devices = (Device("slow", 10**12), Device("fast", 10**12), Device("fast", 10**12))
    cluster = Cluster("c", devices, 3, Link(0.0, 1e12), Link(0.0, 1e12))
    request = PlanRequest({"fast": profile, "slow": slow}, cluster, 8, max_replicas=1)
    search = PlanSearch(request)
    candidate = search.evaluate(Proposal((1, 1), "1f1b", 4, devices=(0, 1)))
    assert candidate is not None
    assert set(refine_devices(search, candidate).placed.proposal.devices) == {1, 2}


def mixed_request(profile_of, **options):
    """A slow device on one host and two fast ones on another."""
    devices = (Device("slow", 10**12), Device("fast", 10**12), Device("fast", 10**12))
    link = Link(0.0, 1e12)
    cluster = Cluster("c", devices, 1, link, Link(2e-3, 1e12), node_of=(0, 1, 1))
    profiles = {"slow": profile_of([3e-3] * 7), "fast": profile_of([1e-3] * 7)}
    return PlanRequest(profiles, cluster, 4, max_replicas=1, **options)


def test_exchanged_devices_take_their_numbers_of_layers_with_them(profile_of):
    """The slow device has one layer and stands between the fast ones, so that two boundaries cross
    hosts. At the end of the pipeline only one does; with another device's three layers it would be
    three times as slow there, so that no exchange of devices alone helps.
    """
    search = PlanSearch(mixed_request(profile_of))
    start = Proposal((3, 1, 3), "1f1b", 4, devices=(1, 0, 2))
    candidate = search.evaluate(start)
    reached = refine_devices(search, candidate).placed.proposal
    assert (reached.devices, reached.lengths) in (
        ((0, 1, 2), (1, 3, 3)),
        ((1, 2, 0), (3, 3, 1)),
        ((0, 2, 1), (1, 3, 3)),
        ((2, 1, 0), (3, 3, 1)),
    )


def test_a_cut_that_was_requested_stays_where_devices_are_exchanged(profile_of):
    """Only the devices change then."""
    search = PlanSearch(mixed_request(profile_of, by=(3, 1, 3)))
    candidate = search.evaluate(Proposal((3, 1, 3), "1f1b", 4, devices=(0, 1, 2)))
    reached = refine_devices(search, candidate).placed.proposal
    assert reached.lengths == (3, 1, 3)
    assert reached.devices[1] == 0


def test_one_device_has_nothing_to_exchange(profile_of):
    """Nor is anything simulated for it."""
    request = PlanRequest(profile_of([1e-3] * 2), cluster_on((0,)), 4)
    search = PlanSearch(request)
    candidate = search.evaluate(Proposal((2,), "1f1b", 4))
    evaluated = search.evaluated
    assert refine_devices(search, candidate) is candidate
    assert search.evaluated == evaluated


def test_candidates_on_many_ranks_stay_as_they_are(profile_of):
    """The number of exchanges grows with the square of the ranks."""
    hosts = tuple(range(17))
    request = PlanRequest(profile_of([1e-3] * 17), cluster_on(hosts), 4, max_replicas=1)
    search = PlanSearch(request)
    candidate = search.evaluate(Proposal((1,) * 17, "1f1b", 4))
    assert candidate is not None
    assert refine_devices(search, candidate) is candidate
