"""What a rank does besides the layers: adding up gradients, and handing messages to the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.profile.profile import Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs, PerStage

#: Seconds that a message costs the CPU of the rank that sends it, besides the time its bytes take,
#: and of the one that takes it: ours
#: and gloo's bookkeeping around the call. Measured with every rank at work on a core of its own:
#: 0.28 ms between the end of an op and the
#: beginning of the next where 100 KB were sent, of which 0.16 ms inside gloo; 0.1 ms for a receive
#: that is posted
#: (benchmarks/fidelity).
SEND_S = 1e-4
RECEIVE_S = 1e-4


def with_host_work(
    costs: Costs, schedule: Schedule, profiles: Sequence[Profile], cluster: Cluster
) -> Costs:
    """`costs` with that work, in the ops that it stands beside.

    A rank's first micro-batch of a batch makes the gradients of its weights, every other adds its
    own to them; the mean is taken. On CPUs, ranks move messages themselves: an op whose result goes
    to another rank takes as long longer as the message does, which then only has the link's latency
    to wait. A GPU's messages move beside its ops.

    Args:
        costs: placed, of the schedule's stages.
        schedule: says what crosses ranks, and how many micro-batches each has.
        profiles: per rank.
        cluster: rank r of the schedule is its rank r.
    """
    sums = _adding_up(costs, schedule, profiles)
    if any(device.kind != "cpu" for device in cluster.devices[: schedule.ranks]):
        return replace(
            costs, backward=_with(costs.backward, sums), weight_grad=_with(costs.weight_grad, sums)
        )
    down, up = _messages(costs, schedule, cluster)
    return replace(
        costs,
        forward=_with(costs.forward, down),
        backward=_with(costs.backward, [own + more for own, more in zip(sums, up, strict=True)]),
        input_grad=_with(costs.input_grad, up),
        weight_grad=_with(costs.weight_grad, sums),
        transfer=_flights(schedule, cluster),
    )


def _with(given: PerStage, more: Sequence[float]) -> PerStage:
    """The seconds of every stage with some more."""
    if not isinstance(given, tuple):
        return given
    return [
        [each + extra for each in entry] if isinstance(entry, tuple) else entry + extra
        for entry, extra in zip(given, more, strict=True)
    ]


def _adding_up(costs: Costs, schedule: Schedule, profiles: Sequence[Profile]) -> list[float]:
    """Per stage, what a micro-batch's gradients take to be added to the others', in the mean of a
    batch.
    """
    gradients = costs.spread("gradient_bytes", schedule.stages) or (0.0,) * schedule.stages
    found = []
    for ranks, held in zip(schedule.ranks_of_stage, gradients, strict=True):
        added = max(schedule.slices - len(ranks) * schedule.batches, 0) / _whole(schedule)
        found.append(added * held * max(profiles[rank].accumulate_s_per_byte for rank in ranks))
    return found


def _messages(
    costs: Costs, schedule: Schedule, cluster: Cluster
) -> tuple[list[float], list[float]]:
    """Per stage, what the messages of its forward and those of its backward cost its ranks, for a
    micro-batch in the mean.
    """
    crossing = costs.spread("boundary_bytes", schedule.stages - 1) or (0.0,) * (schedule.stages - 1)
    forward, backward = ([0.0] * schedule.stages for _ in range(2))
    share = 1 / _whole(schedule)
    for stage, count in enumerate(crossing):
        parts = schedule.slices * share
        for pair, times in _pairs(schedule, stage).items():
            seconds = SEND_S + cluster.transfer_seconds(count / parts, *pair)
            for found, sender, taker in ((forward, stage, stage + 1), (backward, stage + 1, stage)):
                found[sender] += share * times * seconds
                found[taker] += share * times * RECEIVE_S
    return forward, backward


def _flights(schedule: Schedule, cluster: Cluster) -> list[float]:
    """Per boundary, how long a message is under way when the sender has done its part."""
    slices = schedule.slices / _whole(
        schedule
    )  # what stands here is of a whole micro-batch: a slice takes its share
    return [
        slices
        * max((cluster.link(*pair).latency_s for pair in _pairs(schedule, stage)), default=0.0)
        for stage in range(schedule.stages - 1)
    ]


def _pairs(schedule: Schedule, stage: int) -> Counter[tuple[int, int]]:
    """The ranks of a boundary, and how many micro-batches or slices cross there."""
    pairs = Counter(
        (schedule.placement[stage, n], schedule.placement[stage + 1, n])
        for n in range(schedule.slices)
    )
    return Counter({pair: times for pair, times in pairs.items() if pair[0] != pair[1]})


def _whole(schedule: Schedule) -> int:
    """Micro-batches of all batches, uncut."""
    return schedule.micro_batches * schedule.batches
