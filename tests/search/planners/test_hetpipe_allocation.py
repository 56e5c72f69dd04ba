"""HetPipe's virtual workers: which devices form one, and their orders."""

from __future__ import annotations

from itertools import permutations

import pytest

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Device, Link
from penstock.search.planners.hetpipe_allocation import MOST_ORDERS, allocations, orders

LINK = Link(0.0, 1e9)
#: Seconds for the model, and bytes of memory, by kind.
SECONDS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
MEMORY = {"a": 20, "b": 40, "c": 30, "d": 10}


def cluster_of(kinds: str, node_of: tuple[int, ...] = ()) -> Cluster:
    """Devices of these kinds, in one node unless the nodes are given."""
    devices = tuple(Device(kind, MEMORY[kind]) for kind in kinds)
    return Cluster("c", devices, len(devices), LINK, LINK, node_of=node_of or (0,) * len(kinds))


def named(kinds: str, most_stages: int = 99, node_of: tuple[int, ...] = ()):
    """The allocations of these devices, by policy."""
    cluster = cluster_of(kinds, node_of)
    return allocations(cluster, [SECONDS[kind] for kind in kinds], most_stages)


@pytest.mark.parametrize(
    ("kinds", "node_of", "expected"),
    [
        # Numbers of workers that divide the devices of every kind, the most first. One node is the
        # worker with all devices: an equal allocation keeps the first name and the last place.
        (
            "aaaa",
            (),
            [
                ("equal distribution", ((0,), (1,), (2,), (3,))),
                ("equal distribution", ((0, 1), (2, 3))),
                ("node partition", ((0, 1, 2, 3),)),
            ],
        ),
        # Two a and four b: workers of one a and two b, the faster first.
        (
            "bbbbaa",
            (0, 0, 0, 0, 1, 1),
            [
                ("equal distribution", ((4, 0, 1), (5, 2, 3))),
                ("equal distribution", ((4, 5, 0, 1, 2, 3),)),
            ],
        ),
        # Equal nodes are workers of their own.
        (
            "abab",
            (0, 0, 1, 1),
            [
                ("node partition", ((0, 1), (2, 3))),
                ("equal distribution", ((0, 2, 1, 3),)),
            ],
        ),
    ],
)
def test_workers_have_equally_many_devices_of_every_kind(kinds, node_of, expected):
    """Else one of them would be slower than the others."""
    assert named(kinds, node_of=node_of) == expected


def test_the_fastest_kind_is_paired_with_the_slowest():
    """Half of each kind: a with d, b with c. It takes four kinds of as many devices each, which
    divide among the pairs.
    """
    pairs = dict(map(reversed, named("ddccbbaa")))
    assert pairs[((6, 7, 0, 1), (4, 5, 2, 3))] == "hybrid distribution"
    assert (
        dict(map(reversed, named("aaaabbbbccccdddd")))[
            ((0, 1, 12, 13), (2, 3, 14, 15), (4, 5, 8, 9), (6, 7, 10, 11))
        ]
        == "hybrid distribution"
    )
    for kinds in ("aabb", "aabbcc", "abcd", "aabbccd", "aaabbbcccddd"):
        assert "hybrid distribution" not in {policy for policy, _ in named(kinds)}


def test_no_worker_has_more_devices_than_the_model_has_layers():
    """Each device is a stage."""
    assert [allocation for _, allocation in named("aaaa", 2)] == [
        ((0,), (1,), (2,), (3,)),
        ((0, 1), (2, 3)),
    ]
    assert named("abcd", 3) == []


def orders_of(kinds: str, allocation):
    """All orders of an allocation."""
    return orders(cluster_of(kinds), allocation, [SECONDS[kind] for kind in kinds])


def test_workers_of_equal_devices_have_the_same_order_and_others_their_own():
    """They share one cut. Devices of one kind stay in their order."""
    assert orders_of("abab", ((0, 1), (2, 3))) == [((0, 1), (2, 3)), ((1, 0), (3, 2))]
    assert orders_of("aaaa", ((0, 1), (2, 3))) == [((0, 1), (2, 3))]
    result = orders_of("aabb", ((0, 1, 2, 3),))
    assert len(result) == len(set(permutations("aabb"))) == len(set(result))
    for (worker,) in result:
        assert worker.index(0) < worker.index(1)
        assert worker.index(2) < worker.index(3)
    unlike = orders_of("abcd", ((0, 1), (2, 3)))
    assert set(unlike) == {
        (first, second) for first in permutations((0, 1)) for second in permutations((2, 3))
    }


def test_too_many_orders_are_those_by_memory_and_by_speed():
    """Descending, then ascending, without duplicates."""
    kinds = "abcdabcdab"
    (most, least, slow, fast) = orders_of(kinds, (tuple(range(10)),))
    memory = [[MEMORY[kinds[rank]] for rank in workers[0]] for workers in (most, least)]
    seconds = [[SECONDS[kinds[rank]] for rank in workers[0]] for workers in (slow, fast)]
    for descending, ascending in (memory, seconds):
        assert descending == sorted(descending, reverse=True)
        assert ascending == sorted(ascending)
    # Two equal workers share their order; two unlike ones have 12 x 24 orders.
    assert len(orders_of("aabbccdd", ((0, 2, 4, 6), (1, 3, 5, 7)))) == 24
    mixed = orders_of("aaabccdd", ((0, 1, 4, 6), (2, 3, 5, 7)))
    assert len(mixed) <= 4
    assert MOST_ORDERS < 12 * 24
    assert len(orders_of("aabcd", (tuple(range(5)),))) == 60
