"""Costs of a rank's host: gradient accumulation, and moving messages on CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.profile.profile import Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs, PerStage
from penstock.simulate.network import Network

#: CPU seconds per message on the sending and on the receiving rank, in addition to the transfer of
#: its bytes: Penstock's bookkeeping around a send, and that of a receive with gloo's part. Measured
#: with every rank on its own core: 0.28 ms between the end of an op and the beginning of the next
#: when 100 KB were sent, of which 0.16 ms inside gloo; 0.1 ms to post a receive
#: (benchmarks/fidelity).
SEND_S = 1e-4
RECEIVE_S = 1e-4

#: Seconds of gloo's part of a send between hosts, where the link does not say
#: (`Link.cpu_s_per_message`): 0.20 to 0.27 ms after some ms of computing or waiting, for 1 kB
#: between two network namespaces (`penstock.measure.busy_messages`).
NETWORK_SEND_S = 2e-4

#: CPU seconds per byte of a message between hosts, on the sending and on the receiving rank each,
#: where the link does not say (`Link.cpu_s_per_byte`): gloo's copies into and out of the kernel.
#: Measured as the CPU time of a process that sends and receives messages of 1 to 16 MiB by gloo at
#: 10 Gbit/s between two network namespaces: 0.32 to 0.89 ns per byte for both together
#: (benchmarks/hosts).
NETWORK_S_PER_BYTE = 2.5e-10

#: Seconds of a stage: one number, or one per micro-batch.
Entry = float | Sequence[float]


def with_host_work(
    costs: Costs, schedule: Schedule, profiles: Sequence[Profile], cluster: Cluster
) -> Costs:
    """Add the work of the hosts to the ops with which it runs.

    The first micro-batch of a batch writes the gradients of a rank's weights, every other one adds
    its own; costs are the mean over micro-batches. On CPUs, ranks of one host move messages
    themselves: an op whose result goes to another rank takes longer by the time of the message,
    which is then only delayed by the link's latency. Between hosts a message moves in parallel with
    the ops, through the cards of both hosts (see `Network`), and costs its two ranks some CPU time.
    A GPU's messages move in parallel with its ops.

    Args:
        costs: placed, of the schedule's stages.
        schedule: defines what crosses ranks, and the number of micro-batches of each.
        profiles: per rank.
        cluster: rank r of the schedule is its rank r.
    """
    accumulation = _accumulation_seconds(costs, schedule, profiles)
    if any(device.kind != "cpu" for device in cluster.devices[: schedule.ranks]):
        return replace(
            costs,
            backward=_add(costs.backward, accumulation),
            weight_grad=_add(costs.weight_grad, accumulation),
        )
    busy_shares = [busy_share(profile) for profile in profiles]
    forward_messages, backward_messages = _message_seconds(costs, schedule, cluster, busy_shares)
    backward_work = [
        _plus(message_s, accumulation_s)
        for accumulation_s, message_s in zip(accumulation, backward_messages, strict=True)
    ]
    return replace(
        costs,
        forward=_add(costs.forward, forward_messages),
        backward=_add(costs.backward, backward_work),
        input_grad=_add(costs.input_grad, backward_messages),
        weight_grad=_add(costs.weight_grad, accumulation),
        transfer=_flight_seconds(costs, schedule, cluster),
        network=_network(costs, schedule, cluster),
    )


def _network(costs: Costs, schedule: Schedule, cluster: Cluster) -> Network | None:
    """Return the network of the ranks; None if no message uses it, or a shared medium carries
    it.
    """
    pairs = [pair for stage in range(schedule.stages - 1) for pair in _pairs(schedule, stage)]
    if costs.links != "duplex" or not any(_crosses_hosts(cluster, pair) for pair in pairs):
        return None
    hosts = tuple(cluster.node(rank) for rank in range(schedule.ranks))
    return Network(hosts, cluster.between.latency_s)


def _crosses_hosts(cluster: Cluster, pair: tuple[int, int]) -> bool:
    """Return whether two ranks are on different hosts."""
    return cluster.node(pair[0]) != cluster.node(pair[1])


def _add(seconds: PerStage, extra: Sequence[Entry]) -> PerStage:
    """Return the seconds of every stage plus its extra seconds; unchanged if not per stage."""
    if not isinstance(seconds, tuple):
        return seconds
    return [_plus(entry, more) for entry, more in zip(seconds, extra, strict=True)]


def _plus(entry: Entry, extra: Entry) -> Entry:
    """Return the sum of one stage's seconds and its extra seconds; each of them may be a list by
    micro-batch.
    """
    if isinstance(entry, Sequence):
        more = extra if isinstance(extra, Sequence) else [extra] * len(entry)
        return [value + second for value, second in zip(entry, more, strict=True)]
    if isinstance(extra, Sequence):
        return [entry + second for second in extra]
    return entry + extra


def _accumulation_seconds(
    costs: Costs, schedule: Schedule, profiles: Sequence[Profile]
) -> list[float]:
    """Return per stage the seconds of gradient accumulation, per micro-batch on average."""
    gradients = costs.spread("gradient_bytes", schedule.stages) or (0.0,) * schedule.stages
    in_waves = schedule.stream is not None and schedule.stream.waves is not None
    seconds = []
    for ranks, gradient_bytes in zip(schedule.ranks_of_stage, gradients, strict=True):
        # The first slice of every batch on every replica writes instead of adding. In waves a
        # batch is on one replica.
        replicas_of_batch = 1 if in_waves else len(ranks)
        additions = max(schedule.slices - replicas_of_batch * schedule.batches, 0)
        per_micro_batch = additions / schedule.total_micro_batches
        slowest = max(profiles[rank].accumulate_s_per_byte for rank in ranks)
        seconds.append(per_micro_batch * gradient_bytes * slowest)
    return seconds


def _message_seconds(
    costs: Costs, schedule: Schedule, cluster: Cluster, busy_shares: Sequence[float]
) -> tuple[list[Entry], list[Entry]]:
    """Return per stage the host seconds of messages in forward and in backward.

    `busy_shares` are those of the ranks, see `busy_share`. The seconds are per micro-batch: on average over its ranks and micro-batches, or, where a boundary is
    crossed both inside hosts and between them, for every one of them.
    """
    crossing = costs.spread("boundary_bytes", schedule.stages - 1) or (0.0,) * (schedule.stages - 1)
    forward: list[Entry] = [0.0] * schedule.stages
    backward: list[Entry] = [0.0] * schedule.stages
    share = 1 / schedule.total_micro_batches

    def add(stage: int, sends: Entry, receives: Entry) -> None:
        """Add the messages from a stage to the next one, and those of the gradients back."""
        forward[stage] = _plus(forward[stage], sends)
        forward[stage + 1] = _plus(forward[stage + 1], receives)
        backward[stage + 1] = _plus(backward[stage + 1], sends)
        backward[stage] = _plus(backward[stage], receives)

    for stage, boundary_bytes in enumerate(crossing):
        message_bytes = boundary_bytes / schedule.slices_per_micro_batch
        pairs = _pairs(schedule, stage)
        seconds_of = {}
        for pair in pairs:
            seconds_of[pair] = _rank_seconds(message_bytes, pair, cluster, busy_shares)
        if len(set(seconds_of.values())) > 1:
            # A mean over micro-batches would slow down those that stay inside of a host.
            rows = [
                [seconds_of[pair] for pair in row if pair in seconds_of]
                for row in _pairs_of_micro_batches(schedule, stage)
            ]
            sends = [sum(send_s for send_s, _ in row) for row in rows]
            receives = [sum(receive_s for _, receive_s in row) for row in rows]
            add(stage, sends, receives)
            continue
        for pair, messages in pairs.items():
            send_s, receive_s = seconds_of[pair]
            add(stage, share * messages * send_s, share * messages * receive_s)
    return forward, backward


def _rank_seconds(
    message_bytes: float, pair: tuple[int, int], cluster: Cluster, busy_shares: Sequence[float]
) -> tuple[float, float]:
    """Return the seconds that a message takes of its sender's and of its receiver's time."""
    if _crosses_hosts(cluster, pair):
        sender, receiver = pair
        return _network_cpu_seconds(
            message_bytes, cluster.link(*pair), (busy_shares[sender], busy_shares[receiver])
        )
    return SEND_S + cluster.transfer_seconds(message_bytes, *pair), RECEIVE_S


def network_s_per_byte(link: Link) -> float:
    """Return the CPU seconds per byte that each of two hosts spends on a message between them."""
    return NETWORK_S_PER_BYTE if link.cpu_s_per_byte is None else link.cpu_s_per_byte


def busy_share(profile: Profile) -> float:
    """Return the part of an op's time in which it uses a core, 0 to 1; 1 if that is not known.

    An op that waits, for a disk or a sleep, loses nothing to what else the core does.
    """
    conditions = profile.conditions
    if conditions is None or conditions.own_cores is None:
        return 1.0
    return min(1.0, conditions.own_cores / conditions.processes)


def _network_cpu_seconds(
    message_bytes: float, link: Link, busy_shares: tuple[float, float]
) -> tuple[float, float]:
    """Return the seconds that ops take longer by a message between hosts, those of its sender and
    those of its receiver, which compute for these parts of their time.
    """
    network_send_s = NETWORK_SEND_S if link.cpu_s_per_message is None else link.cpu_s_per_message
    process_s = network_s_per_byte(link)
    # The loss contains the CPU time of the process.
    send_s, receive_s = (
        max(process_s, share * (link.busy_s_per_byte or 0.0)) for share in busy_shares
    )
    return (
        SEND_S + network_send_s + message_bytes * send_s,
        RECEIVE_S + message_bytes * receive_s,
    )


def _flight_seconds(costs: Costs, schedule: Schedule, cluster: Cluster) -> PerStage:
    """Return per boundary how long a message travels after the sender has done its part; per
    micro-batch where that differs.
    """
    crossing = costs.spread("boundary_bytes", schedule.stages - 1) or (0.0,) * (schedule.stages - 1)
    # Costs are for whole micro-batches and a slice takes its share: scale up to undo that.
    slices = schedule.slices_per_micro_batch
    seconds: list[float | list[float]] = []
    for stage, boundary_bytes in enumerate(crossing):
        flight_of_pair = {
            pair: slices * _flight(boundary_bytes / slices, pair, cluster)
            for pair in _pairs(schedule, stage)
        }
        longest = max(flight_of_pair.values(), default=0.0)
        if len(set(flight_of_pair.values())) <= 1:
            seconds.append(longest)
            continue
        row = []
        for pairs in _pairs_of_micro_batches(schedule, stage):
            row.append(max(flight_of_pair.get(pair, 0.0) for pair in pairs))
        seconds.append(row)
    return seconds


def _flight(message_bytes: float, pair: tuple[int, int], cluster: Cluster) -> float:
    """Return the seconds from a message's departure to its arrival, while its sender goes on."""
    if _crosses_hosts(cluster, pair):
        return cluster.transfer_seconds(message_bytes, *pair)
    return cluster.link(*pair).latency_s


def _pairs_of_micro_batches(schedule: Schedule, stage: int) -> list[list[tuple[int, int]]]:
    """Return per micro-batch the ranks of a stage and of the next one, for each of its slices."""
    pairs = [
        (schedule.placement[stage, number], schedule.placement[stage + 1, number])
        for number in range(schedule.slices)
    ]
    if schedule.slicing is None:
        return [[pair] for pair in pairs]
    rows = zip(schedule.slicing.first_of, schedule.slicing.shares, strict=True)
    return [pairs[first : first + len(shares)] for first, shares in rows]


def _pairs(schedule: Schedule, stage: int) -> Counter[tuple[int, int]]:
    """Return the pairs of ranks of a boundary, with the number of messages from first to second."""
    pairs = Counter(
        (schedule.placement[stage, number], schedule.placement[stage + 1, number])
        for number in range(schedule.slices)
    )
    return Counter({pair: crossings for pair, crossings in pairs.items() if pair[0] != pair[1]})
