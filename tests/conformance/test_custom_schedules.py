"""Law 1 for user-defined schedules: any sound program runs, and its gradients are exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.random_programs import random_schedules
from tests.conformance.reference import (
    PlainTraining,
    differences,
    gradients,
    in_order_of,
    layers_of,
)

import penstock as ps

RECOMPUTE = st.sampled_from(["never", "except_last", "always"])


@pytest.mark.parametrize("name", ["vgg", "gpt", "mlp"])
def test_any_sound_schedule_has_exact_gradients(name):
    """Several stages on a rank in any order, backwards in two parts, any order of micro-batches:
    the sums stay the same.
    """
    case = CASES[name]

    @given(random_schedules(), RECOMPUTE, st.integers(1, 12))
    @settings(deadline=None, max_examples=30)
    def holds(schedule, recompute, samples):
        ps.verify(schedule)
        model, x, y = made(case, samples)
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
            loss = pipe.train_batch(x, y)
            actual = gradients(model)
            plain, parts = PlainTraining(model, case.loss).backward_in_parts(
                x, y, schedule.micro_batches
            )
            assert torch.equal(loss, plain)
            assert differences(actual, in_order_of(schedule, lengths, model, parts)) == []
        finally:
            pipe.close()

    holds()


@given(random_schedules())
@settings(deadline=None, max_examples=25)
def test_batch_norm_in_any_schedule_has_exact_gradients(schedule):
    """Statistics of a micro-batch are its own, so gradients do not depend on the order in which
    micro-batches pass.
    """
    case = CASES["resnet"]
    model, x, y = made(case)
    lengths = lengths_of(len(layers_of(model)), schedule.stages)
    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths,
        schedule=schedule,
        recompute="except_last",
        executor="threads",
    )
    try:
        pipe.train_batch(x, y)
        actual = gradients(model)
        _, parts = PlainTraining(model, case.loss).backward_in_parts(x, y, schedule.micro_batches)
        assert differences(actual, in_order_of(schedule, lengths, model, parts)) == []
    finally:
        pipe.close()


@given(random_schedules())
@settings(deadline=None, max_examples=25)
def test_the_executed_order_is_the_programs_order(schedule):
    """The runtime plays the program it was given, op for op, U included."""
    case = CASES["mlp"]
    model, x, y = made(case)
    lengths = lengths_of(len(layers_of(model)), schedule.stages)
    pipe = ps.Pipeline(
        model, loss=case.loss, balance=lengths, schedule=schedule, executor="threads"
    )
    try:
        pipe.train_batch(x, y)
        timeline = pipe.timeline()
        for rank, program in enumerate(schedule.programs):
            assert tuple(event.op for event in timeline.compute if event.rank == rank) == program
    finally:
        pipe.close()
