"""Costs of a rank's host: gradient accumulation, and moving messages on CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.profile.profile import Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs, PerStage

#: CPU seconds per message on the sending and on the receiving rank, in addition to the transfer of
#: its bytes: Penstock's and gloo's bookkeeping around the call. Measured with every rank on its own
#: core: 0.28 ms between the end of an op and the beginning of the next when 100 KB were sent, of
#: which 0.16 ms inside gloo; 0.1 ms to post a receive (benchmarks/fidelity).
SEND_S = 1e-4
RECEIVE_S = 1e-4


def with_host_work(
    costs: Costs, schedule: Schedule, profiles: Sequence[Profile], cluster: Cluster
) -> Costs:
    """Add the work of the hosts to the ops with which it runs.

    The first micro-batch of a batch writes the gradients of a rank's weights, every other one adds
    its own; costs are the mean over micro-batches. On CPUs, ranks move messages themselves: an op
    whose result goes to another rank takes longer by the time of the message, which is then only
    delayed by the link's latency. A GPU's messages move in parallel with its ops.

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
    forward_messages, backward_messages = _message_seconds(costs, schedule, cluster)
    backward_work = [
        accumulation_s + message_s
        for accumulation_s, message_s in zip(accumulation, backward_messages, strict=True)
    ]
    return replace(
        costs,
        forward=_add(costs.forward, forward_messages),
        backward=_add(costs.backward, backward_work),
        input_grad=_add(costs.input_grad, backward_messages),
        weight_grad=_add(costs.weight_grad, accumulation),
        transfer=_flight_seconds(schedule, cluster),
    )


def _add(seconds: PerStage, extra: Sequence[float]) -> PerStage:
    """Return the seconds of every stage plus its extra seconds; unchanged if not per stage."""
    if not isinstance(seconds, tuple):
        return seconds
    total: list[float | list[float]] = []
    for entry, stage_extra in zip(seconds, extra, strict=True):
        if isinstance(entry, tuple):
            total.append([value + stage_extra for value in entry])
        else:
            total.append(entry + stage_extra)
    return total


def _accumulation_seconds(
    costs: Costs, schedule: Schedule, profiles: Sequence[Profile]
) -> list[float]:
    """Return per stage the seconds of gradient accumulation, per micro-batch on average."""
    gradients = costs.spread("gradient_bytes", schedule.stages) or (0.0,) * schedule.stages
    seconds = []
    for ranks, gradient_bytes in zip(schedule.ranks_of_stage, gradients, strict=True):
        # The first slice of every batch on every replica writes instead of adding.
        additions = max(schedule.slices - len(ranks) * schedule.batches, 0)
        per_micro_batch = additions / _total_micro_batches(schedule)
        slowest = max(profiles[rank].accumulate_s_per_byte for rank in ranks)
        seconds.append(per_micro_batch * gradient_bytes * slowest)
    return seconds


def _message_seconds(
    costs: Costs, schedule: Schedule, cluster: Cluster
) -> tuple[list[float], list[float]]:
    """Return per stage the host seconds of messages in forward and in backward.

    They are per micro-batch, on average over its ranks and micro-batches.
    """
    crossing = costs.spread("boundary_bytes", schedule.stages - 1) or (0.0,) * (schedule.stages - 1)
    forward, backward = [0.0] * schedule.stages, [0.0] * schedule.stages
    share = 1 / _total_micro_batches(schedule)
    for stage, boundary_bytes in enumerate(crossing):
        slices_per_micro_batch = schedule.slices * share
        for pair, messages in _pairs(schedule, stage).items():
            message_bytes = boundary_bytes / slices_per_micro_batch
            send_s = SEND_S + cluster.transfer_seconds(message_bytes, *pair)
            forward[stage] += share * messages * send_s
            forward[stage + 1] += share * messages * RECEIVE_S
            backward[stage + 1] += share * messages * send_s
            backward[stage] += share * messages * RECEIVE_S
    return forward, backward


def _flight_seconds(schedule: Schedule, cluster: Cluster) -> list[float]:
    """Return per boundary how long a message travels after the sender has done its part."""
    # Costs are for whole micro-batches and a slice takes its share: scale up to undo that.
    slices = schedule.slices / _total_micro_batches(schedule)
    seconds = []
    for stage in range(schedule.stages - 1):
        latencies = [cluster.link(*pair).latency_s for pair in _pairs(schedule, stage)]
        seconds.append(slices * max(latencies, default=0.0))
    return seconds


def _pairs(schedule: Schedule, stage: int) -> Counter[tuple[int, int]]:
    """Return the pairs of ranks of a boundary, with the number of messages from first to second."""
    pairs = Counter(
        (schedule.placement[stage, number], schedule.placement[stage + 1, number])
        for number in range(schedule.slices)
    )
    return Counter({pair: crossings for pair, crossings in pairs.items() if pair[0] != pair[1]})


def _total_micro_batches(schedule: Schedule) -> int:
    """Return the number of (unsliced) micro-batches of all batches."""
    return schedule.micro_batches * schedule.batches
