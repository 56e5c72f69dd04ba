"""Simulate: programs and costs to a timeline."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import SettingError
from penstock.event import Event, Timeline
from penstock.schedule.graph import build
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind, Op, Schedule
from penstock.simulate.costs import Costs

RECOMPUTE = ("never", "except_last", "always")


def recomputes(recompute: str, micro_batch: int, micro_batches: int) -> bool:
    """Whether this micro-batch's forward runs again before its backward (torchgpipe's `checkpoint`)."""
    if recompute not in RECOMPUTE:
        raise SettingError(f"recompute is one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    return recompute == "always" or (recompute == "except_last" and micro_batch != micro_batches - 1)


@dataclass(frozen=True)
class _StageCosts:
    """Costs by stage, every default filled in."""

    seconds: dict[Kind, tuple[float, ...]]
    up: tuple[float, ...]
    down: tuple[float, ...]
    crossing_bytes: tuple[float, ...]

    @classmethod
    def of(cls, costs: Costs, stages: int) -> _StageCosts:
        forward = costs.spread("forward", stages)
        backward = costs.spread("backward", stages)
        inputs, weights = costs.spread("input_grad", stages), costs.spread("weight_grad", stages)
        if forward is None:
            raise SettingError("costs: forward is needed")
        if backward is None:
            if inputs is None or weights is None:
                backward = tuple(2 * seconds for seconds in forward)
            else:
                backward = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        if inputs is None:
            inputs = tuple(b / 2 if weights is None else max(b - weights[s], 0.0) for s, b in enumerate(backward))
        weights = weights or tuple(max(b - i, 0.0) for b, i in zip(backward, inputs, strict=True))
        update = costs.spread("update", stages) or (0.0,) * stages
        up = costs.spread("transfer", stages - 1) or (0.0,) * (stages - 1)
        down = costs.spread("transfer_back", stages - 1) or up
        seconds = {Kind.F: forward, Kind.B: backward, Kind.I: inputs, Kind.W: weights, Kind.U: update}
        return cls(seconds, up, down, costs.spread("boundary_bytes", stages - 1) or (0.0,) * (stages - 1))


def simulate_schedule(schedule: Schedule, costs: Costs, *, overlap: bool = True, recompute: str = "never") -> Timeline:
    """When every op and transfer starts and ends.

    Ranks run their programs in order; an op starts when its rank is free and what it needs has arrived. Every directed pair of
    ranks has one link, which carries one message at a time, in the order of sending. Copies of a stage start their U together,
    when the last of them has come to it.

    Args:
        schedule: a sound schedule.
        costs: seconds per stage and boundary; bytes too if `peak_memory` is wanted.
        overlap: transfers run beside compute; False makes the sending rank stand still meanwhile.
        recompute: "never", "except_last" or "always": a recomputed micro-batch's B (or I) costs a forward more, and keeps only
            its stage's input from F until then.

    Raises:
        SettingError: the costs do not fit the number of stages.
        ScheduleError: the schedule lacks an op.
    """
    table = _StageCosts.of(costs, schedule.stages)
    again = {m: recomputes(recompute, m, schedule.micro_batches) for _, m in schedule.placement}

    def op_seconds(_: int, op: Op) -> float:
        seconds = table.seconds[op.kind][op.stage]
        if op.kind in (Kind.B, Kind.I) and again[op.micro_batch]:
            seconds += table.seconds[Kind.F][op.stage]
        return seconds

    def transfer_seconds(_: Link, message: Message) -> float:
        return table.up[message.stage] if message.kind is Kind.F else table.down[message.stage - 1]

    events = [
        event if event.to_rank is None else event._replace(bytes=round(table.crossing_bytes[_boundary(event.op)]))
        for event in map(Event._make, build(schedule, overlap).events(op_seconds, transfer_seconds))
    ]
    memory = peak_memory(schedule, costs, recompute)
    return Timeline.of(events, schedule.ranks, schedule.stages, memory, "simulated", schedule.name)


def _boundary(op: Op) -> int:
    return op.stage if op.kind is Kind.F else op.stage - 1


def peak_memory(schedule: Schedule, costs: Costs, recompute: str = "never") -> tuple[int, ...] | None:
    """Bytes that every rank holds at its fullest, or None when the costs carry no bytes.

    Counts weights with gradients and optimizer state, and activations from F to the end of the backward; a recomputed
    micro-batch keeps its stage's input, and all its activations only while its backward runs.
    """
    activations = costs.spread("activation_bytes", schedule.stages)
    weights = costs.spread("weight_bytes", schedule.stages)
    if activations is None and weights is None:
        return None
    activations = activations or (0.0,) * schedule.stages
    weights = weights or (0.0,) * schedule.stages
    inputs = costs.spread("input_bytes", schedule.stages) or (0.0,) * schedule.stages
    peaks = []
    for rank, program in enumerate(schedule.programs):
        held = sum(weights[stage] for stage in schedule.stages_of_rank[rank])
        peak = held
        for kind, stage, m in program:
            if kind is Kind.U:
                continue
            again = recomputes(recompute, m, schedule.micro_batches)
            kept = inputs[stage] if again else activations[stage]
            if kind is Kind.F:
                # A forward that will be recomputed frees as it goes: its largest moment is not known here, its input is.
                held += kept
            elif again and kind in (Kind.B, Kind.I):
                held += activations[stage] - inputs[stage]
            peak = max(peak, held)
            if kind in (Kind.B, Kind.W):
                held -= activations[stage]
        peaks.append(round(peak))
    return tuple(peaks)
