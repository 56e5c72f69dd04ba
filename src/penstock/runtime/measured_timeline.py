"""Measured timeline of a run, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.event import Event, Timeline
from penstock.optim.stage_weights import StageWeights
from penstock.ranks.world import World
from penstock.runtime.interpreter import Interpreter
from penstock.schedule.op import Op, Schedule
from penstock.transport.payload import TensorForm

#: By rank, ops in order; each as the timeline shows it, and as it was run.
Rows = Mapping[int, Sequence[tuple[Op, Op]]]


def measured(
    world: World,
    schedule: Schedule,
    interpreters: Mapping[int, Interpreter],
    rows: Rows,
    weights: Mapping[int, Mapping[int, StageWeights]],
) -> Timeline:
    """Gather the times of some ops and the peak memory of all ranks. Every process calls it.

    Args:
        world: the ranks.
        schedule: the schedule.
        interpreters: those of the ranks of this process.
        rows: the ops of all ranks.
        weights: in a stream, by rank and stage, its weight rule.

    Returns:
        The timeline, the same in every process.
    """
    # One row of start and end per op, and a last row for the peak bytes.
    local = {}
    for rank, interpreter in interpreters.items():
        seconds = interpreter.seconds([run_op for _, run_op in rows[rank]])
        peak_bytes = interpreter.peak_bytes(weights.get(rank, {}))
        local[rank] = [torch.tensor([*seconds, (peak_bytes, 0)], dtype=torch.float64)]
    forms = {
        rank: [TensorForm((len(ops) + 1, 2), "float64", wants_grad=False)]
        for rank, ops in rows.items()
    }
    gathered = world.gather(local, forms)
    count = sum(len(ops) + 1 for ops in rows.values())
    table = torch.cat([gathered[rank][0] for rank in rows]) if gathered else None
    table = world.broadcast(table, 0, TensorForm((count, 2), "float64", wants_grad=False))
    table_rows = iter(table.tolist())
    events: list[Event] = []
    peaks: list[int] = []
    for rank, ops in rows.items():
        events += [Event(rank, op, *next(table_rows)) for op, _ in ops]
        peak, _ = next(table_rows)
        peaks.append(int(peak))
    return Timeline.of(
        events, len(rows), schedule.stages, tuple(peaks), source="measured", title=schedule.name
    )
