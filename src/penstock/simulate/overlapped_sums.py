"""Seconds of gradient sums in buckets beside backwards, see `penstock.stage.gradients.bucket_sum`.

Between CPU hosts a bucket of gradients leaves when the last backward before an update has computed
it, while that backward goes on to earlier layers, and other ops of the rank follow it:

    backward of stage 1   [ layer 3 | layer 2 | layer 1 | layer 0 ]  update
    network               .         [ 3       | 2 and 1     | 0       ]
                                                             └ exposed ┘

The network sends one bucket after the other. What the CPU does for them takes time of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.cluster.cluster import Cluster
from penstock.profile.profile import Profile
from penstock.schedule.op import BACKWARD_ENDS, Kind, Op, Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.gradient_sync import (
    SUM_S_PER_BYTE,
    all_reduce_seconds,
    in_buckets,
    processor_seconds,
)
from penstock.simulate.stage_seconds import PHASE_OF_KIND, parts_of, stage_seconds

#: Bytes of a bucket: small enough that the first one leaves early in the backward,
#: and large beside a message's fixed costs.
BUCKET_BYTES = 4 << 20


def with_overlapped_sums(
    costs: Costs,
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    samples: float,
    cluster: Cluster,
) -> Costs:
    """Return `costs` without the parts of gradient sums that run beside ops.

    Args:
        costs: with the whole sums in their updates.
        schedule, profiles, lengths, samples, cluster: as for `hidden_sum_seconds`; rank r of the
            schedule is that of the cluster.
    """
    hidden_s = hidden_sum_seconds(
        schedule, schedule.ranks_of_stage, profiles, lengths, samples, cluster
    )
    return with_shorter_updates(costs, hidden_s)


def with_shorter_updates(costs: Costs, hidden_s: Sequence[float]) -> Costs:
    """Return `costs` without the seconds of gradient sums that run beside ops, per stage."""
    updates = costs.spread("update", len(hidden_s))
    if updates is None or not any(hidden_s):
        return costs
    shorter = [max(0.0, whole - less) for whole, less in zip(updates, hidden_s, strict=True)]
    return replace(costs, update=shorter)


def hidden_sum_seconds(
    schedule: Schedule,
    replicas: Sequence[Sequence[int]],
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    samples: float,
    cluster: Cluster,
) -> list[float]:
    """Return per stage how many seconds of its `all_reduce_seconds` run beside ops.

    0 for stages whose gradients are not summed in buckets, and in streams. Idle time before an
    update is not counted, since it depends on other ranks: in truth more may be hidden.

    Args:
        schedule: with one stage per entry of `lengths`.
        replicas: per stage, the ranks of `cluster` that hold it.
        profiles: per rank of the schedule.
        lengths: layers in every stage.
        samples: of a micro-batch.
        cluster: of the replicas.
    """
    stages = {stage for stage, ranks in enumerate(replicas) if in_buckets(ranks, cluster)}
    hidden = [0.0] * len(lengths)
    if schedule.stream is not None or not stages:
        return hidden
    sums = {stage: _StageSum(replicas[stage], cluster) for stage in stages}
    least: dict[int, float] = {}
    for rank, program in enumerate(schedule.programs):
        walk = _Walk(profiles[rank], lengths, samples / schedule.slices_per_micro_batch, sums)
        for stage, seconds in walk.hidden(_tail(program, stages)).items():
            # All replicas wait for the one that hides least.
            least[stage] = min(least.get(stage, seconds), seconds)
    for stage, seconds in least.items():
        hidden[stage] = seconds
    return hidden


def _tail(program: Sequence[Op], stages: set[int]) -> tuple[Op, ...]:
    """Return the end of a program from the first op that completes the gradients of a stage."""
    first = len(program)
    for stage in stages:
        completing = [
            place
            for place, op in enumerate(program)
            if op.stage == stage and op.kind in BACKWARD_ENDS
        ]
        first = min(first, max(completing, default=first))
    return tuple(program[first:])


@dataclass(frozen=True)
class _StageSum:
    """The sum of a stage's gradients over its replicas.

    Attributes:
        ranks: of the replicas.
        cluster: of the ranks.
    """

    ranks: Sequence[int]
    cluster: Cluster

    def whole_s(self, gradient_bytes: float) -> float:
        """Return the seconds of the sum if nothing runs beside it."""
        return all_reduce_seconds(self.ranks, gradient_bytes, self.cluster)

    def wire_s(self, gradient_bytes: float) -> float:
        """Return the seconds for which a bucket occupies the network."""
        latency_s = self.whole_s(0.0)
        return self.whole_s(gradient_bytes) - SUM_S_PER_BYTE * gradient_bytes - latency_s

    def cpu_s(self, gradient_bytes: float) -> float:
        """Return the CPU seconds in which a replica sends and receives."""
        return processor_seconds(self.ranks, gradient_bytes, self.cluster)


class _Walk:
    """The last ops of a rank beside the network, from the first gradients that are complete.

    Args:
        profile: of the rank's device.
        lengths: layers in every stage.
        samples: of an op.
        sums: by stage; of those whose gradients are summed in buckets.
    """

    def __init__(
        self,
        profile: Profile,
        lengths: Sequence[int],
        samples: float,
        sums: dict[int, _StageSum],
    ) -> None:
        self._profile, self._samples, self._sums = profile, samples, sums
        self._parts = parts_of(lengths)
        self._op_seconds = stage_seconds(profile, lengths, samples)
        self._now_s = 0.0
        self._network_free_s = 0.0
        self._sent_s: dict[int, float] = {}

    def hidden(self, ops: Sequence[Op]) -> dict[int, float]:
        """Return by stage the seconds of its sum that run beside these ops."""
        last = {op.stage: op for op in ops if op.kind in BACKWARD_ENDS}
        seconds: dict[int, float] = {}
        for op in ops:
            if op.kind is Kind.U and op.stage in self._sent_s:
                seconds[op.stage] = self._update(op.stage)
            elif op.kind in PHASE_OF_KIND:
                # Earlier backwards only add to the gradients: the last one completes and sends
                # them.
                if op.stage in self._sums and last.get(op.stage) is op:
                    self._send_buckets(op)
                self._now_s += self._op_seconds[PHASE_OF_KIND[op.kind]][op.stage]
        return seconds

    def _send_buckets(self, op: Op) -> None:
        """Send the buckets of a stage while an op computes them."""
        part, phase = self._parts[op.stage], PHASE_OF_KIND[op.kind]
        if part.start == 0:
            phase = "backward"  # the W of the first stage does all that a B does
        layer_seconds = self._profile.seconds(phase, self._samples)[part]
        total = self._sums[op.stage]
        ready_s, waiting_bytes = self._now_s, 0.0
        for layer, layer_s in zip(
            reversed(self._profile.layers[part]), reversed(layer_seconds), strict=True
        ):
            ready_s += layer_s
            waiting_bytes += layer.parameter_bytes
            if waiting_bytes >= BUCKET_BYTES:
                self._send(ready_s, total.wire_s(waiting_bytes))
                waiting_bytes = 0.0
        self._send(ready_s, total.wire_s(waiting_bytes))
        # Buckets follow one another on the network: only the last one's latency is waited for.
        self._sent_s[op.stage] = self._network_free_s + total.whole_s(0.0)

    def _send(self, ready_s: float, wire_s: float) -> None:
        """Send a bucket after those before it."""
        self._network_free_s = max(self._network_free_s, ready_s) + wire_s

    def _update(self, stage: int) -> float:
        """Wait for the sum of a stage; return its seconds that have run beside ops."""
        total = self._sums[stage]
        gradient_bytes = sum(
            layer.parameter_bytes for layer in self._profile.layers[self._parts[stage]]
        )
        # At least the seconds of the CPU, which overlap no op.
        remaining_s = max(self._sent_s[stage] - self._now_s, total.cpu_s(gradient_bytes))
        exposed_s = remaining_s + SUM_S_PER_BYTE * gradient_bytes
        self._now_s += exposed_s
        return max(0.0, total.whole_s(gradient_bytes) - exposed_s)
