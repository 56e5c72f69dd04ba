"""Law 1 for the families whose ranks hold several stages, and for every depth of 1F1B's warm-up:
options that the other conformance tests leave as they are.
"""

from __future__ import annotations

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import differences, gradients, layers_of

import penstock as ps

#: name, stages, micro-batches, options
SCHEDULES = [
    ("1f1b", 3, 5, {"warm_up": (5, 3, 1)}),
    ("1f1b", 4, 6, {"warm_up": (9, 4, 2, 2)}),
    ("eager-1f1b", 4, 6, {}),
    ("interleaved", 4, 4, {}),
    ("interleaved", 6, 4, {"chunks": 3}),
    ("interleaved", 6, 7, {"group": 4}),
    ("interleaved", 3, 2, {"chunks": 3}),
    ("breadth-first", 4, 5, {}),
    ("breadth-first", 8, 3, {"chunks": 4}),
    ("hanayo", 4, 4, {}),
    ("hanayo", 6, 6, {"ratio": 2}),
    ("hanayo", 8, 5, {"waves": 2}),
    ("hanayo", 2, 3, {}),
]


def trained(name, schedule, recompute):
    """Loss, gradients and buffers of two steps without updates, and the order in which every rank
    ran its ops.
    """
    case = CASES[name]
    model, x, y = made(case)
    lengths = lengths_of(len(layers_of(model)), schedule.stages)
    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths,
        schedule=schedule,
        recompute=recompute,
        executor="threads",
    )
    try:
        losses = [pipe.train_batch(x, y) for _ in range(2)]
        events = pipe.timeline().compute
        order = [
            tuple(event.op for event in events if event.rank == rank)
            for rank in range(schedule.ranks)
        ]
        return losses, gradients(model) | dict(model.named_buffers()), order
    finally:
        pipe.close()


@pytest.mark.parametrize("recompute", ["never", "except_last"])
@pytest.mark.parametrize("name", ["vgg", "resnet"])
@pytest.mark.parametrize(("schedule_name", "stages", "micro_batches", "options"), SCHEDULES)
def test_losses_gradients_and_buffers_equal_those_of_one_stage_to_the_bit(
    schedule_name, stages, micro_batches, options, name, recompute
):
    """Where a stage stands and when it runs must not change what is learned; and the programs ran
    as they are written.
    """
    schedule = ps.schedule(schedule_name, stages, micro_batches, **options)
    losses, actual, order = trained(name, schedule, recompute)
    plain, expected, _ = trained(name, ps.schedule("1f1b", 1, micro_batches), "never")
    assert all(torch.equal(a, b) for a, b in zip(losses, plain, strict=True))
    assert differences(actual, expected) == []
    assert order == list(schedule.programs)
