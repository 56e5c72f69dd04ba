"""compare_with_one_device and timeline: what the pipeline says of itself is true."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tests.conformance.catalogue import one_of_each
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import PlainTraining, differences, gradients, layers_of
from torch import nn

import penstock as ps
from penstock.stage.stage import Stage
from penstock.transport.payload import Payload

AT_5, AT_6 = one_of_each(5), one_of_each(6)  # some take only multiples of their ranks


def pipeline(name, stages=3, schedule="1f1b", **options):
    """The case's pipeline, its model and a batch."""
    case = CASES[name]
    model, x, y = made(case)
    lengths = lengths_of(len(layers_of(model)), stages)
    options.setdefault("micro_batches", 4)
    return (
        ps.Pipeline(
            model, loss=case.loss, balance=lengths, schedule=schedule, executor="threads", **options
        ),
        model,
        x,
        y,
    )


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_a_sound_pipeline_differs_by_nothing_from_one_device(name, recompute):
    """Gradients and buffers to the bit, the loss to the rounding of its sum; every parameter and
    buffer is named.
    """
    pipe, model, x, y = pipeline(name, recompute=recompute)
    comparison = pipe.compare_with_one_device(x, y)
    assert set(comparison.gradients) == {key for key, _ in model.named_parameters()}
    assert set(comparison.buffers) == {key for key, _ in model.named_buffers()}
    assert set(comparison.gradients.values()) == {0.0}
    assert set(comparison.buffers.values()) <= {0.0}
    assert comparison.loss <= 1e-6
    assert comparison.worst[1] <= 1e-6
    assert all(
        comparison.scale[key] > 0 for key in comparison.gradients if not key.endswith("qkv.bias")
    )


def test_a_wrong_gradient_on_one_stage_is_found_and_named(monkeypatch):
    """The check is only worth something if it fails when it should."""
    pipe, _, x, y = pipeline("mlp")
    right = Stage.backward

    def wrong(self, batch, micro_batch, arrived):
        sent = right(self, batch, micro_batch, arrived)
        if self.index == 1 and micro_batch == 2:
            return Payload.flat([1.01 * leaf for leaf in sent.leaves])
        return sent

    monkeypatch.setattr(Stage, "backward", wrong)
    comparison = pipe.compare_with_one_device(x, y)
    off = {name for name, error in comparison.gradients.items() if error}
    assert off == {"fc1.weight", "fc1.bias"}
    assert comparison.worst[0] in off
    assert comparison.worst[1] > 1e-4 * comparison.scale["fc1.weight"]
    assert comparison.loss <= 1e-6


def test_a_buffer_that_moves_twice_is_found(monkeypatch):
    """A recomputed forward that moves running statistics again was the commonest bug of
    torchgpipe's kind.
    """
    pipe, model, x, y = pipeline("resnet", recompute="always")
    monkeypatch.setattr("penstock.grad.buffers.Buffers.contents", lambda self: {})
    comparison = pipe.compare_with_one_device(x, y)
    assert {name for name, error in comparison.buffers.items() if error} == {
        name for name, _ in model.named_buffers()
    }


@pytest.mark.parametrize(
    "optimizer", [None, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)]
)
def test_comparing_between_batches_changes_nothing_of_the_training(optimizer):
    """It may be called in the middle of a run: weights, gradients, buffers, random numbers and the
    step are those without it.
    """
    pipe, model, x, y = pipeline("resnet", optimizer=optimizer)
    other, undisturbed, _, _ = pipeline("resnet", optimizer=optimizer)
    for _ in range(3):
        pipe.train_batch(x, y)
        other.train_batch(x, y)
        comparison = pipe.compare_with_one_device(x * 2, y)
        assert comparison.worst[1] <= 1e-6
        assert pipe.step == other.step
        assert differences(gradients(model), gradients(undisturbed)) == []
        assert differences(dict(model.state_dict()), dict(undisturbed.state_dict())) == []


def test_a_model_from_the_meta_device_is_compared_too():
    """Buffers that no checkpoint has, such as masks, exist on the one device as well."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(16, 16))
            self.register_buffer("mask", torch.empty(16, 16), persistent=False)
            self.reset_parameters()

        def reset_parameters(self):
            nn.init.normal_(self.weight)
            self.mask.copy_(torch.ones(16, 16).tril())

        def forward(self, x):
            return x @ (self.weight * self.mask)

    with torch.device("meta"):
        model = nn.Sequential(Masked(), nn.Tanh(), Masked(), nn.Linear(16, 5))
    pipe = ps.Pipeline(
        model, loss=nn.CrossEntropyLoss(), balance=[2, 2], micro_batches=3, executor="threads"
    )
    x, y = CASES["mlp"].data(10)
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.worst[1] <= 1e-6
    assert len(comparison.gradients) == 4


def test_frozen_and_unused_parameters_are_compared_as_zero():
    """A parameter that no gradient reaches is no difference."""
    case = CASES["mlp"]
    model, x, y = made(case)
    model[2].requires_grad_(False)
    model[4].register_parameter("unused", nn.Parameter(torch.ones(3)))
    pipe = ps.Pipeline(
        model, loss=case.loss, balance=[3, 2, 2], micro_batches=3, executor="threads"
    )
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.worst[1] <= 1e-6
    assert "fc3.unused" in comparison.gradients
    assert not any(name.startswith("fc2") for name in comparison.gradients)


@pytest.mark.parametrize("schedule", AT_6 | AT_5)
def test_the_timeline_has_every_op_of_every_program_in_order_with_times_that_fit(schedule):
    """The same type as simulate gives; ops of a rank do not overlap, and none starts before what it
    needs has ended.
    """
    schedule = (AT_6 | AT_5)[schedule]
    pipe, _, x, y = pipeline("vgg", schedule.stages, schedule, micro_batches=None)
    pipe.train_batch(x, y)
    timeline = pipe.timeline()
    programs = schedule.programs
    assert timeline.source == "measured"
    assert (timeline.ranks, timeline.stages) == (len(programs), schedule.stages)
    ends = {event.op: event.end for event in timeline.compute}
    for rank, program in enumerate(programs):
        rank_events = [event for event in timeline.compute if event.rank == rank]
        assert tuple(event.op for event in rank_events) == program
        assert all(a.end <= b.start for a, b in itertools.pairwise(rank_events))
    for event in timeline.compute:
        if event.op.kind.value == "F" and event.op.stage:
            assert ends[event.op._replace(stage=event.op.stage - 1)] <= event.start
    assert min(event.start for event in timeline.compute) == 0
    assert 0 <= timeline.bubble_ratio < 1
    assert timeline.peak_in_flight == ps.verify(pipe.setting.schedule).peak_in_flight


def test_the_timeline_is_of_the_last_batch_whatever_it_was():
    """A short batch has fewer ops, an evaluation only forwards."""
    pipe, _, x, y = pipeline("mlp", micro_batches=4)
    with pytest.raises(ps.PenstockError, match="there is no timeline yet: train a batch first"):
        pipe.timeline()
    pipe.train_batch(x, y)
    assert len(pipe.timeline().compute) == 3 * (2 * 4 + 1)
    pipe.train_batch(x[:2], y[:2])
    assert len(pipe.timeline().compute) == 3 * (2 * 2 + 1)
    pipe.forward(x)
    assert len(pipe.timeline().compute) == 3 * 4
    pipe.compare_with_one_device(x, y)
    assert len(pipe.timeline().compute) == 3 * (2 * 4 + 1), (
        "it comes to its updates, and leaves the weights"
    )


def test_the_plain_reference_of_these_tests_agrees_with_the_self_check():
    """Two implementations of plain training, written apart, have one result."""
    pipe, model, x, y = pipeline("vgg")
    other = copy.deepcopy(model)
    PlainTraining(other, CASES["vgg"].loss).backward(x, y, 4)
    scale = pipe.compare_with_one_device(x, y).scale
    for name, grad in gradients(other).items():
        assert float(grad.abs().max()) == scale[name]
