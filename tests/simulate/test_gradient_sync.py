"""All-reduces of gradients: which pieces go where, and which link is the slowest."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.schedule.catalogue import schedule
from penstock.simulate.gradient_sync import (
    BOTH_WAYS,
    BOTH_WAYS_S_PER_BYTE,
    COLLISIONS,
    SUM_S_PER_BYTE,
    all_reduce_seconds,
    in_buckets,
    least_sum_seconds,
    processor_seconds,
    sum_copies,
    sum_memory_copies,
)


def random_cluster(seed: int, kind: str) -> Cluster:
    """Ranks of two or more nodes in any order, each node with its own link, few numbers alike."""
    rng = random.Random(seed)

    def link() -> Link:
        shared = rng.random() < 0.5
        cpu = rng.choice([None, 3e-9])
        return Link(rng.choice([0.0, 0.5]), rng.choice([3.0, 7.0, 1e9, 1e11]), "", shared, cpu)

    nodes = rng.randint(1, 3)
    node_of = [*range(nodes), *(rng.randrange(nodes) for _ in range(rng.randint(0, 4)))]
    rng.shuffle(node_of)
    insides = tuple((node, link()) for node in range(nodes))
    devices = (Device("d", 10**9, kind),) * len(node_of)
    return Cluster("c", devices, 1, link(), link(), tuple(node_of), insides)


def slow_all_reduce(ranks, gradient_bytes, cluster) -> float:
    """Message by message: every replica sends its piece to every other one, in each phase."""
    count = len(ranks)
    phases, piece = (1, gradient_bytes) if count == 2 else (2, gradient_bytes / count)
    within = [
        pair for pair in combinations(ranks, 2) if cluster.node(pair[0]) == cluster.node(pair[1])
    ]
    crosses = len({cluster.node(rank) for rank in ranks}) > 1
    if cluster.devices[ranks[0]].kind == "cpu":
        seconds = [0.0]
        for a, b in within:
            peers = sum(cluster.node(rank) == cluster.node(a) for rank in ranks) - 1
            message_s = max(
                cluster.link(a, b).transfer_seconds(BOTH_WAYS * piece), BOTH_WAYS_S_PER_BYTE * piece
            )
            seconds.append(phases * peers * message_s)
        if not crosses:
            return max(seconds)
        sent = Counter(
            cluster.node(a) for a in ranks for b in ranks if cluster.node(a) != cluster.node(b)
        )
        link = cluster.between
        messages = sum(sent.values()) if link.shared else max(sent.values())
        collides = len(sent) > 2 and not link.shared
        factor = COLLISIONS if collides else 1.0
        seconds.append(factor * phases * link.transfer_seconds(messages * piece))
        return max(seconds) + SUM_S_PER_BYTE * gradient_bytes
    rounds = 1 if count == 2 else 2 * (count - 1)
    node_sizes = Counter(cluster.node(rank) for rank in ranks)
    seconds = [
        cluster.link(a, b).transfer_seconds(
            piece * (node_sizes[cluster.node(a)] if cluster.link(a, b).shared else 1)
        )
        for a, b in within
    ]
    if crosses:
        users = max(node_sizes.values()) if cluster.between.shared else 1
        seconds.append(cluster.between.transfer_seconds(piece * users))
    return rounds * max(seconds)


def close_to(seconds):
    """Within rounding: some parts are a billionth of others."""
    return pytest.approx(seconds, rel=1e-13, abs=0)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_an_all_reduce_takes_as_long_as_its_messages_on_the_slowest_link(kind, seed):
    """Shared links carry the pieces of all ranks of a node; two replicas exchange all at once."""
    for number in range(seed, seed + 100):
        cluster = random_cluster(number, kind)
        rng = random.Random(number)
        ranks = rng.sample(range(cluster.ranks), rng.randint(1, min(6, cluster.ranks)))
        check_all_reduce(ranks, cluster, kind)


def check_all_reduce(ranks, cluster, kind):
    """The figures of one all-reduce are those of its messages."""
    if len(ranks) == 1:
        assert all_reduce_seconds(ranks, 6e3, cluster) == 0.0
        assert least_sum_seconds(ranks, 6e3, cluster) == 0.0
        assert sum_memory_copies(ranks, cluster) == 0
        return
    expected = slow_all_reduce(ranks, 6e3, cluster)
    assert all_reduce_seconds(ranks, 6e3, cluster) == close_to(expected)
    crosses = len({cluster.node(rank) for rank in ranks}) > 1
    assert in_buckets(ranks, cluster) == (kind == "cpu" and crosses)
    least = least_sum_seconds(ranks, 6e3, cluster)
    count = len(ranks)
    sent = 6e3 if count == 2 else 2 * (count - 1) * 6e3 / count
    per_byte = cluster.between.cpu_s_per_byte
    if per_byte is not None:
        assert processor_seconds(ranks, 6e3, cluster) == close_to(2 * sent * per_byte)
    if in_buckets(ranks, cluster):
        alone = processor_seconds(ranks, 6e3, cluster) + SUM_S_PER_BYTE * 6e3
        assert least == close_to(min(expected, alone))
    else:
        assert least == close_to(expected)
    copies = 0 if kind == "gpu" else 2 if crosses and count > 2 else 1
    assert sum_memory_copies(ranks, cluster) == copies


def test_one_gpu_among_cpus_ends_buckets_and_copies_but_not_the_hosts_figures():
    """Devices may differ: buckets need the CPU on all ranks, the card is shared from the first."""
    cpu, gpu, link = Device("c", 10**9, "cpu"), Device("g", 10**9), Link(0.0, 10.0)
    mixed = Cluster("m", (cpu, gpu), 1, link, link)
    assert not in_buckets((0, 1), mixed)
    assert sum_memory_copies((0, 1), mixed) == 0
    assert all_reduce_seconds((0, 1), 30.0, mixed) == close_to(3.0 + 30 * SUM_S_PER_BYTE)
    assert least_sum_seconds((0, 1), 30.0, mixed) == all_reduce_seconds((0, 1), 30.0, mixed)


@pytest.mark.parametrize("kinds", [("cpu", "cpu", "gpu"), ("gpu", "gpu", "cpu")])
def test_devices_of_other_stages_do_not_count(kinds):
    """The third rank holds no replica of the stage."""
    links = Link(0.0, 10.0), Link(0.5, 10.0)
    both = Cluster("c", tuple(Device(kind, 10**9, kind) for kind in kinds), 1, *links)
    alone = both.on((0, 1))
    assert in_buckets((0, 1), both) == in_buckets((0, 1), alone) == (kinds[0] == "cpu")
    assert sum_memory_copies((0, 1), both) == sum_memory_copies((0, 1), alone)
    for size in (0.0, 30.0):
        assert all_reduce_seconds((0, 1), size, both) == all_reduce_seconds((0, 1), size, alone)


def test_copies_of_gradients_are_by_stage_and_none_in_waves():
    """Replicas of a wave average weights, which needs no copy of a gradient."""
    cpus = Cluster("c", (Device("c", 10**9, "cpu"),) * 4, 4, Link(0.0, 1.0), Link(0.0, 1.0))
    assert sum_copies(schedule("chimera", 4, 4), cpus) == [1] * 4
    assert sum_copies(schedule("1f1b", 4, 4), cpus) == [0] * 4
    stream = schedule("pipedream", 2, 2, replicas=(2, 1))
    assert sum_copies(stream, cpus) == [1, 0], "these add up gradients"
    waves = schedule("hetpipe", 2, 2)
    assert sum_copies(waves, cpus) == [0] * waves.stages
