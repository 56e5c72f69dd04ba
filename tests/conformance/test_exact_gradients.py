"""Law 1: every schedule, cut and way to recompute gives the losses, gradients and buffers of plain
training, to the bit.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from functools import cache

import pytest
import torch
from tests.conformance.catalogue import EVERY, SLICED, SYNCHRONOUS, one_of_each
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import (
    PlainTraining,
    added_up,
    differences,
    gradients,
    in_order_of,
    layers_of,
)

import penstock as ps

RECOMPUTE = ["never", "except_last", "always"]
#: The schedules of which the others are made run with every model in every way, in this size.
THOROUGH = ("naive", "gpipe", "1f1b")
WHOLE = (4, 8)


def points():
    """Schedules, models and ways to recompute, of which any two meet.

    Every size of a schedule runs once, with models and ways by turns; a schedule of few sizes runs
    some of them again, until it has met every model. That a size, a model and a way go wrong only
    together was never seen: the whole grid has twelve times the points.
    """
    sizes = defaultdict(list)
    for key, schedule in EVERY.items():
        sizes[schedule.name].append((key, schedule))
    for first, (name, made_sizes) in enumerate(sizes.items()):
        for turn in range(max(len(made_sizes), len(CASES))):
            key, schedule = made_sizes[turn % len(made_sizes)]
            if name in THOROUGH and key == f"{name}-{WHOLE[0]}-{WHOLE[1]}":
                for case, recompute in itertools.product(CASES, RECOMPUTE):
                    yield key, schedule, case, recompute
                continue
            case = list(CASES)[(first + turn) % len(CASES)]
            yield key, schedule, case, RECOMPUTE[(first + turn + turn // 3) % len(RECOMPUTE)]


GRID = [
    pytest.param(schedule, case, recompute, id=f"{key}-{case}-{recompute}")
    for key, schedule, case, recompute in points()
]
AT_8 = one_of_each(8)
#: Schedules that are made in smaller sizes, too.
IN_SMALLER_SIZES = {
    schedule.name
    for schedule in EVERY.values()
    if (schedule.stages, schedule.micro_batches) != WHOLE
}


@cache
def expected(name, samples, micro_batches):
    """Loss, gradients by micro-batch and buffers of two steps of plain training without updates."""
    case = CASES[name]
    model, x, y = made(case, samples)
    plain = PlainTraining(model, case.loss)
    steps = []
    for _ in range(2):
        loss, parts = plain.backward_in_parts(x, y, micro_batches)
        steps.append((loss, parts, {key: value.clone() for key, value in model.named_buffers()}))
    return steps


def wrong_gradients(pipe, model, parts):
    """Names of gradients that differ from plain training's, added up in the order of the programs."""
    return differences(
        gradients(model), in_order_of(pipe.setting.schedule, pipe.setting.lengths, model, parts)
    )


def pipeline(name, schedule, recompute="never", samples=10):
    """The case's pipeline in this process, its model, and a batch."""
    case = CASES[name]
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
    return pipe, model, x, y


class SeenByFirstCopies:
    """Buffers of every stage when only the micro-batches of its first copy have passed through it."""

    def __init__(self, schedule, lengths, name):
        case = CASES[name]
        self.parts = min(schedule.micro_batches, 10)
        self.stages = []
        first = 0
        for stage, (length, ranks) in enumerate(zip(lengths, schedule.ranks_of_stage, strict=True)):
            model, x, _ = made(case, 10)
            micro_batches = [
                m for m in range(self.parts) if schedule.placement[stage, m] == ranks[0]
            ]
            inner = layers_of(model)[first : first + length]
            names = {id(buffer): key for key, buffer in model.named_buffers()}
            buffers = [(names[id(buffer)], buffer) for layer in inner for buffer in layer.buffers()]
            self.stages.append(
                (
                    PlainTraining(model, case.loss),
                    torch.tensor_split(x, self.parts),
                    micro_batches,
                    buffers,
                )
            )
            first += length

    def next(self):
        """After one step more."""
        values = {}
        for plain, parts, micro_batches, buffers in self.stages:
            for m in micro_batches:
                plain.forward(parts[m], m)
            plain.step += 1
            values |= {key: buffer.clone() for key, buffer in buffers}
        return values


def test_every_synchronous_schedule_of_the_catalogue_is_held_against_plain_training():
    """A schedule that can be made in none of the sizes here would pass by never being tried."""
    assert set(AT_8) == {schedule.name for schedule in EVERY.values()}
    assert set(AT_8) | {schedule.name for schedule in SLICED.values()} == set(SYNCHRONOUS), (
        "test_slices.py has those that cut more"
    )


def test_any_two_of_schedule_size_model_and_way_meet():
    """What the smaller grid of `points` must have of the whole one."""
    met = list(points())
    assert {key for key, *_ in met} == set(EVERY)
    parameters = [
        {
            "schedule": schedule.name,
            "stages": schedule.stages,
            "micro_batches": schedule.micro_batches,
            "case": case,
            "recompute": recompute,
        }
        for _, schedule, case, recompute in met
    ]
    for one, other in itertools.product(parameters[0], ("case", "recompute")):
        if one != other:
            pairs = {(values[one], values[other]) for values in parameters}
            whole = {values[one] for values in parameters}, {values[other] for values in parameters}
            assert pairs == set(itertools.product(*whole)), f"{one} and {other}"


def test_the_reference_itself_adds_up_as_autograd_does():
    """Where a schedule changes the order of backwards, gradients by micro-batch are added up
    instead: the same to the bit.
    """
    case = CASES["gpt"]
    model, x, y = made(case)
    loss, parts = PlainTraining(copy.deepcopy(model), case.loss).backward_in_parts(x, y, 3)
    assert torch.equal(PlainTraining(model, case.loss).backward(x, y, 3), loss)
    assert differences(gradients(model), added_up(parts, range(3))) == []


@pytest.mark.parametrize(("schedule", "name", "recompute"), GRID)
def test_losses_gradients_and_buffers_equal_plain_training_to_the_bit(schedule, name, recompute):
    """Splitting work over stages must not change what is learned; the second step shows that
    nothing is left of the first. In the largest size the smaller ones have shown it already.
    """
    pipe, model, x, y = pipeline(name, schedule, recompute)
    copied = max(map(len, schedule.ranks_of_stage)) > 1
    first_copies = SeenByFirstCopies(schedule, pipe.setting.lengths, name) if copied else None
    is_largest = (schedule.stages, schedule.micro_batches) == WHOLE
    steps = 1 if is_largest and schedule.name in IN_SMALLER_SIZES and not copied else 2
    for loss, parts, buffers in expected(name, 10, schedule.micro_batches)[:steps]:
        pipe.zero_grad()
        assert torch.equal(pipe.train_batch(x, y), loss)
        assert wrong_gradients(pipe, model, parts) == []
        assert (
            differences(
                dict(model.named_buffers()), first_copies.next() if first_copies else buffers
            )
            == []
        )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.whole])
@pytest.mark.parametrize("samples", [37, 16, 8])
def test_gradients_equal_the_undivided_batch_to_float_tolerance(name, samples):
    """Unequal micro-batches are weighted by their samples: 37 in 8 parts are five of 5 and three of
    4.
    """
    pipe, model, x, y = pipeline(name, AT_8["1f1b"], "never", samples)
    loss = pipe.train_batch(x, y)
    whole, _, _ = made(CASES[name], samples)
    undivided = CASES[name].loss(whole(x), y)
    undivided.backward()
    assert torch.allclose(loss, undivided.detach(), rtol=1e-6)
    for key, parameter in whole.named_parameters():
        error = (model.get_parameter(key).grad - parameter.grad).abs().max()
        assert error <= 1e-5 * parameter.grad.abs().max(), key


@pytest.mark.parametrize("name", AT_8)
@pytest.mark.parametrize("samples", [37, 5, 1])
def test_unequal_micro_batches_and_batches_smaller_than_m_are_exact(name, samples):
    """The last batch of an epoch is as long as it is; with fewer samples than micro-batches each
    sample is one.
    """
    pipe, model, x, y = pipeline("vgg", AT_8[name], "except_last", samples)
    loss, parts, _ = expected("vgg", samples, 8)[0]
    assert torch.equal(pipe.train_batch(x, y), loss)
    assert wrong_gradients(pipe, model, parts) == []


def test_gpipe_in_torchgpipes_reverse_order_adds_gradients_up_in_that_order():
    """Where a schedule turns the order of backwards round, sums do too: exact still, though not
    plain training's last bits.
    """
    case = CASES["gpt"]
    model, x, y = made(case)
    schedule = ps.schedule("gpipe", 2, 8, backward_order="reverse")
    pipe = ps.Pipeline(model, loss=case.loss, balance=[3, 2], schedule=schedule, executor="threads")
    pipe.train_batch(x, y)
    parts = expected("gpt", 10, 8)[0][1]
    assert differences(gradients(model), added_up(parts, range(7, -1, -1))) == []
    assert differences(gradients(model), added_up(parts, range(8))) != []


def test_batches_of_changing_size_follow_one_another():
    """A short batch runs a shorter program; nothing of it may stay for the next whole one."""
    case = CASES["gpt"]
    model, x, y = made(case, 16)
    plain = PlainTraining(copy.deepcopy(model), case.loss)
    pipe = ps.Pipeline(
        model, loss=case.loss, balance=[2, 2, 1], micro_batches=4, executor="threads"
    )
    for samples in (16, 3, 16, 7, 2):
        assert torch.equal(
            pipe.train_batch(x[:samples], y[:samples]), plain.backward(x[:samples], y[:samples], 4)
        )
    assert differences(gradients(model), gradients(plain.model)) == []
