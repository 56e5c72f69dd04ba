"""Seconds of the all-reduce of a stage's gradients, see `penstock.stage.replicas`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.schedule.op import Schedule
from penstock.simulate.host_costs import network_s_per_byte

#: On CPUs the core that sends gradients to another replica also receives that replica's and adds
#: them, through memory that is in no cache: that takes this many times as long as one direction of
#: the link, and at least this many seconds per byte. Measured on two cores, sums included: VGG-11,
#: 114 MB, 87 ms; ResNet-18, 45 MB, 27; an MLP, 36 MB, 23; GPT, 11 MB, 10; where the link was
#: measured at 2 to 4.5 GB/s (benchmarks/fidelity).
BOTH_WAYS, BOTH_WAYS_S_PER_BYTE = 1.4, 7e-10

#: Pieces of three or more hosts take longer than their bytes on the busiest card: ranks get out of
#: step, so that two of them send to one card while another card waits. Four buckets of 4 MB, medians
#: of 7: on 4 hosts 1.22 to 1.25 times as long at 100 Mbit/s and 1.14 to 1.29 at 300, on 3 hosts 1.13
#: at 100 Mbit/s. (Waiting for each piece before the next one is sent made single buckets faster by
#: 1.1 and four buckets slower by 1.4.)
COLLISIONS = 1.2

#: Seconds per byte of the gradients that two replicas on different hosts take to pack and to add
#: them, before the first byte leaves and after the last one has come.
SUM_S_PER_BYTE = 7e-10


def all_reduce_seconds(ranks: Sequence[int], gradient_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of the all-reduce of a stage's gradients, over the slowest of its links.

    On CPUs ranks of one host share its network card, and send beside each other what goes to ranks
    of the same host. On other devices every rank has a card; if all ranks of a node share the link
    to other nodes, all of their pieces use it.

    Args:
        ranks: of the stage's replicas; 0 s for a single one.
        gradient_bytes: of the stage.
        cluster: of the ranks.
    """
    if len(ranks) < 2:
        return 0.0
    if any(cluster.devices[rank].kind == "cpu" for rank in ranks):
        return _on_hosts(ranks, gradient_bytes, cluster)
    rounds, piece = _rounds(len(ranks)), _piece(gradient_bytes, len(ranks))
    slowest = 0.0
    for link, users in _links_among(ranks, cluster):
        message_bytes = piece * (users if link.shared else 1)
        slowest = max(slowest, link.transfer_seconds(message_bytes))
    return rounds * slowest


def in_buckets(ranks: Sequence[int], cluster: Cluster) -> bool:
    """Whether a stage's gradients are summed in buckets, which leave during its last backward.

    Args:
        ranks: of the stage's replicas.
        cluster: of the ranks.
    """
    on_cpus = all(cluster.devices[rank].kind == "cpu" for rank in ranks)
    return on_cpus and len({cluster.node(rank) for rank in ranks}) > 1


def processor_seconds(ranks: Sequence[int], gradient_bytes: float, cluster: Cluster) -> float:
    """Return the CPU seconds in which a replica sends and receives buckets: they overlap no op."""
    count = len(ranks)
    bytes_sent = _rounds(count) * _piece(gradient_bytes, count)
    return 2 * bytes_sent * network_s_per_byte(cluster.between)  # it sends and receives them


def least_sum_seconds(ranks: Sequence[int], gradient_bytes: float, cluster: Cluster) -> float:
    """Return a lower bound of the seconds that the all-reduce adds to a step, however much of it
    runs beside backwards; arguments as for `all_reduce_seconds`.
    """
    whole_s = all_reduce_seconds(ranks, gradient_bytes, cluster)
    if len(ranks) < 2 or not in_buckets(ranks, cluster):
        return whole_s
    cpu_s = processor_seconds(ranks, gradient_bytes, cluster) + SUM_S_PER_BYTE * gradient_bytes
    return min(whole_s, cpu_s)


def sum_memory_copies(ranks: Sequence[int], cluster: Cluster) -> int:
    """Return how many copies of a stage's gradients each replica stores for their sum.

    One in shared memory, or for two replicas in buckets (see `penstock.stage.gradients`). Three or
    more replicas on several hosts store what they send and what they receive.

    Args:
        ranks: of the stage's replicas.
        cluster: of the ranks.
    """
    if len(ranks) < 2 or any(cluster.devices[rank].kind != "cpu" for rank in ranks):
        return 0
    on_one_host = len(cluster.by_node(ranks)) == 1
    return 1 if on_one_host or len(ranks) == 2 else 2


def sum_copies(schedule: Schedule, cluster: Cluster) -> list[int]:
    """Return per stage how many copies of its gradients each replica stores for their sum.

    None in waves, where replicas average weights.
    """
    in_waves = schedule.stream is not None and schedule.stream.waves is not None
    if in_waves:
        return [0] * schedule.stages
    return [sum_memory_copies(ranks, cluster) for ranks in schedule.ranks_of_stage]


def _rounds(replicas: int) -> int:
    """Return how many pieces a replica sends, one after the other.

    Two replicas send each other all; more send a piece to every other one, twice.
    """
    return 1 if replicas == 2 else 2 * (replicas - 1)


def _piece(gradient_bytes: float, replicas: int) -> float:
    """Return the bytes that a replica sends to another one in one round."""
    return gradient_bytes if replicas == 2 else gradient_bytes / replicas


def _on_hosts(ranks: Sequence[int], gradient_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce of CPUs: those of the busiest host or card."""
    piece = _piece(gradient_bytes, len(ranks))
    phases = 1 if len(ranks) == 2 else 2
    slowest = 0.0
    members_of = cluster.by_node(ranks)
    for members in members_of:
        if len(members) > 1:
            link = cluster.link(*members[:2])
            message_s = link.transfer_seconds(BOTH_WAYS * piece)
            message_s = max(message_s, BOTH_WAYS_S_PER_BYTE * piece)
            slowest = max(slowest, phases * (len(members) - 1) * message_s)
    if len(members_of) == 1:
        return slowest
    link = cluster.between
    most_messages = max(len(members) * (len(ranks) - len(members)) for members in members_of)
    if link.shared:
        most_messages = sum(len(members) * (len(ranks) - len(members)) for members in members_of)
    network_s = phases * link.transfer_seconds(most_messages * piece)
    if len(members_of) > 2 and not link.shared:
        network_s *= COLLISIONS
    return max(slowest, network_s) + SUM_S_PER_BYTE * gradient_bytes


def _links_among(ranks: Sequence[int], cluster: Cluster) -> list[tuple[Link, int]]:
    """Return the links between these ranks, with the number of ranks of a node that use each."""
    nodes = cluster.by_node(ranks)
    links = [(cluster.link(*members[:2]), len(members)) for members in nodes if len(members) > 1]
    firsts = [members[0] for members in nodes]
    if len(firsts) > 1:
        links.append((cluster.link(*firsts[:2]), max(map(len, nodes))))
    return links
