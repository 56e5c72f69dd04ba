"""The timeline of what really happened, brought together from all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from penstock.event import Event, Timeline
from penstock.runtime.interpreter import Interpreter
from penstock.runtime.world import World
from penstock.schedule.op import Op, Schedule
from penstock.transport.payload import TensorForm

#: Per rank, ops in order: as a timeline shows them, and as they were run.
Rows = Mapping[int, Sequence[tuple[Op, Op]]]


def measured(
    world: World, schedule: Schedule, interpreters: Mapping[int, Interpreter], rows: Rows
) -> Timeline:
    """Start and end of some ops on all ranks, and the most bytes that these have held; every
    process gets the same timeline.
    """
    local = {
        rank: [
            torch.tensor(
                [
                    *interpreter.seconds([ran for _, ran in rows[rank]]),
                    (interpreter.peak_bytes(), 0),
                ],
                dtype=torch.float64,
            )
        ]
        for rank, interpreter in interpreters.items()
    }
    forms = {
        rank: [TensorForm((len(ops) + 1, 2), "float64", wants_grad=False)]
        for rank, ops in rows.items()
    }
    gathered = world.gather(local, forms)
    count = sum(len(ops) + 1 for ops in rows.values())
    table = torch.cat([gathered[rank][0] for rank in rows]) if gathered else None
    table = world.broadcast(table, 0, TensorForm((count, 2), "float64", wants_grad=False))
    found = iter(table.tolist())
    events: list[Event] = []
    peaks: list[int] = []
    for rank, ops in rows.items():
        events += [Event(rank, op, *next(found)) for op, _ in ops]
        peaks.append(int(next(found)[0]))
    return Timeline.of(
        events, len(rows), schedule.stages, tuple(peaks), source="measured", title=schedule.name
    )
