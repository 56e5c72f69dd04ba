"""The ways in which pipelines train silently wrong, each by its name: here they give one device's
numbers, or refuse.

The first six are those of torch.distributed.pipelining 2.13, the others those that users report.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import PlainTraining, differences, gradients, layers_of
from tests.runtime.jobs import Plain, sgd
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import penstock as ps
from penstock.ranks.processes.launch import launch

SPLIT = ["zb-h1", "zb-v"]  # their backwards are in two parts
#: Two copies of two stages with split backwards.
SPLIT_COPIES = """rank 0 | 0F0 1F1 1I1 1W1 0F2 1F3 1I3 0I0 0W0 1W3 0I2 0W2 0U1 1U1
rank 1 | 0F1 1F0 1I0 1W0 0F3 1F2 1I2 0I1 0W1 1W2 0I3 0W3 0U1 1U1"""


def pipeline(model, name="mlp", stages=4, schedule="1f1b", **options):
    """In this process, in four micro-batches."""
    options.setdefault("executor", "threads")
    if isinstance(schedule, str):
        options.setdefault("micro_batches", 4)
    lengths = options.pop("balance", None) or lengths_of(len(layers_of(model)), stages)
    return ps.Pipeline(
        model,
        loss=options.pop("loss", CASES[name].loss),
        balance=lengths,
        schedule=schedule,
        **options,
    )


def near(actual, expected):
    """Names that differ by more than the rounding of sums in another order."""
    assert actual.keys() == expected.keys()
    return [
        name
        for name in actual
        if not torch.allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6)
    ]


# -- 1
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", *SPLIT])
def test_two_batches_before_one_optimizer_step(schedule):
    """There the older gradients are divided again: 1.25 instead of 2 at four micro-batches."""
    model, x, y = made(CASES["mlp"])
    plain = PlainTraining(copy.deepcopy(model), CASES["mlp"].loss)
    pipe = pipeline(model, schedule=schedule, optimizer=sgd)
    for samples in (10, 6):
        pipe.train_batch(x[:samples], y[:samples], update=False)
        plain.backward(x[:samples], y[:samples], 4)
    assert near(gradients(model), gradients(plain.model)) == []
    pipe.update()
    sgd(list(plain.model.parameters())).step()
    assert near(dict(model.state_dict()), dict(plain.model.state_dict())) == []


# -- 2
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_evaluation_between_batches_leaves_gradients_buffers_and_random_state(schedule):
    """There evaluation divides the gradients that are there by the number of micro-batches."""
    model, x, y = made(CASES["resnet"])
    model.append(nn.Dropout(0.5))
    pipe = pipeline(model, "resnet", schedule=schedule, optimizer=sgd)
    pipe.train_batch(x, y, update=False)
    before = gradients(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    pipe.eval_batch(x, y)
    pipe.forward(x)
    assert differences(gradients(model), before[0]) == []
    assert differences(dict(model.state_dict()), dict(before[1])) == []
    assert torch.equal(torch.get_rng_state(), before[2])


# -- 3
# ---------------------------------------------------------------------------------------------------------------------


def test_copies_with_split_backward():
    """There gradients of weights that come in a W of their own are not reduced over the copies."""
    model, x, y = made(CASES["mlp"], 12)
    plain = PlainTraining(copy.deepcopy(model), CASES["mlp"].loss)
    pipe = pipeline(model, balance=[3, 4], schedule=ps.Schedule.parse(SPLIT_COPIES), optimizer=sgd)
    pipe.train_batch(x, y)
    plain.backward(x, y, 4)
    assert near(gradients(model), gradients(plain.model)) == []
    held = [
        {
            f"{layer.name}.{name}": p
            for layer in stage.layers
            for name, p in layer.module.named_parameters()
        }
        for stage in pipe._assembly.stages
        if stage.index == 1
    ]
    assert differences(*held) == []


# -- 4
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [[0], [2], [0, 2], [0, 2, 4]])
@pytest.mark.parametrize("schedule", ["1f1b", *SPLIT])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_frozen_stages_with_split_backward(frozen, schedule, recompute):
    """There a stage whose input wants no gradient gets none for its weights either, and the loss
    looks normal.
    """
    model, x, y = made(CASES["mlp"])
    for layer in frozen:
        model[layer].requires_grad_(False)
    plain = PlainTraining(copy.deepcopy(model), CASES["mlp"].loss)
    pipe = pipeline(model, schedule=schedule, recompute=recompute, optimizer=sgd)
    pipe.train_batch(x, y)
    plain.backward(x, y, 4)
    assert near(gradients(model), gradients(plain.model)) == []
    assert len(gradients(model)) == 8 - 2 * len(frozen)


# -- 5
# ---------------------------------------------------------------------------------------------------------------------


def test_batch_norm_during_shape_inference():
    """There shapes are found out by one more real forward, on whatever the memory held, at the
    first batch and after evaluations.
    """
    model, x, y = made(CASES["resnet"], 12)
    plain = PlainTraining(copy.deepcopy(model), CASES["resnet"].loss)
    pipe = pipeline(model, "resnet", stages=3)
    for times in (1, 2, 3):
        pipe.train_batch(x, y)
        plain.backward(x, y, 4)
        assert int(model[1].num_batches_tracked) == 4 * times
        pipe.eval_batch(x, y)
        pipe.forward(x[:5])
        assert differences(dict(model.named_buffers()), dict(plain.model.named_buffers())) == []


def norms_in_processes():
    """Buffers of a rank's batch norms after two batches with an evaluation in between."""
    model, x, y = made(CASES["resnet"], 12)
    pipe = pipeline(
        model,
        "resnet",
        stages=2,
        executor="processes",
        optimizer=Plain,
        clip_grad_norm=1.0,
        deadline_s=60,
    )
    for _ in range(2):
        pipe.train_batch(x, y)
        pipe.eval_batch(x[:6], y[:6])
    result = pipe.state_dict(), pipe.grad_norm, pipe.compare_with_one_device(x, y)
    pipe.close()
    return result


def test_batch_norm_and_the_norm_of_gradients_over_real_processes():
    """Receive buffers, headers and shapes are really made out there."""
    by_rank = launch(norms_in_processes, 2, threads=1)
    model, x, y = made(CASES["resnet"], 12)
    plain = PlainTraining(model, CASES["resnet"].loss)
    optimizer = Plain(list(model.parameters()))
    for _ in range(2):
        model.zero_grad()
        plain.backward(x, y, 4)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    state, actual_norm, comparison = by_rank[0]
    assert near(state, dict(model.state_dict())) == []
    assert int(state["1.num_batches_tracked"]) == 8
    assert actual_norm == by_rank[1][1] == pytest.approx(float(norm), rel=1e-5)
    assert comparison.relative < 1e-5


# -- 6
# ---------------------------------------------------------------------------------------------------------------------


def test_tied_copies_stay_equal():
    """There they are never brought together. More of this in tests/ranks/test_tied_weights.py."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[4].weight = model[0].weight
    pipe = pipeline(model, balance=[1, 3, 1], loss=nn.MSELoss(), optimizer=sgd)
    x = torch.randn(8, 6)
    for _ in range(3):
        pipe.train_batch(x, x.roll(1))
    first, last = (pipe._assembly.stages[stage].layers[0].module.weight for stage in (0, 2))
    assert first is not last
    assert torch.equal(first, last)


# -- what users report
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", *SPLIT])
def test_an_uneven_last_batch(schedule):
    """Micro-batches of unequal sizes count by their samples, and a batch of fewer samples than
    micro-batches has fewer of them.
    """
    model, x, y = made(CASES["mlp"], 11)
    for samples in (11, 7, 3, 1):
        plain = PlainTraining(copy.deepcopy(model), CASES["mlp"].loss)
        loss = pipeline(model, schedule=schedule).train_batch(x[:samples], y[:samples])
        assert torch.allclose(loss, plain.backward(x[:samples], y[:samples], 4))
        whole = CASES["mlp"].loss(plain.model(x[:samples]), y[:samples])
        assert torch.allclose(loss, whole, rtol=1e-5)
        assert near(gradients(model), gradients(plain.model)) == []
        model.zero_grad()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_sequence_length_that_changes_from_batch_to_batch(recompute):
    """There a pipeline crashes when shapes change after its first step."""
    case = CASES["gpt-without-dropout"]
    model, x, y = made(case)
    plain = PlainTraining(copy.deepcopy(model), case.loss)
    pipe = pipeline(model, "gpt", stages=3, optimizer=sgd, recompute=recompute)
    optimizer = sgd(list(plain.model.parameters()))
    for tokens in (6, 3, 6, 5, 1):
        optimizer.zero_grad()
        loss = plain.backward(x[:, :tokens], y[:, :tokens], 4)
        optimizer.step()
        assert torch.allclose(pipe.train_batch(x[:, :tokens], y[:, :tokens]), loss)
        pipe.forward(x[:, :tokens])
    assert near(dict(model.state_dict()), dict(plain.model.state_dict())) == []


class Heads(nn.Module):
    """Several outputs, one of which no gradient reaches."""

    def __init__(self):
        super().__init__()
        self.kind, self.place = nn.Linear(8, 3), nn.Linear(8, 4)

    def forward(self, x):
        """Run the layer."""
        kind = self.kind(x)
        return {"kind": kind, "place": (self.place(x), None), "best": kind.argmax(-1)}


def detection_loss(output, target):
    """Of several outputs and targets as a structure."""
    kind, (place, weight) = target["kind"], target["place"]
    place_error = ((output["place"][0] - place).square().mean(1) * weight).mean()
    return functional.cross_entropy(output["kind"], kind) + place_error


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_of_several_outputs_and_targets_as_structures(schedule):
    """Structures are cut with the batch, leaf by leaf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Heads())
    x = torch.randn(10, 5)
    target = {"kind": torch.randint(0, 3, (10,)), "place": [torch.randn(10, 4), torch.rand(10)]}
    plain = copy.deepcopy(model)
    expected = detection_loss(plain(x), target)
    expected.backward()
    pipe = pipeline(model, balance=[2, 2, 1], schedule=schedule, loss=detection_loss)
    assert torch.allclose(pipe.train_batch(x, target), expected, rtol=1e-5)
    assert near(gradients(model), gradients(plain)) == []
    comparison = pipe.compare_with_one_device(x, target)
    assert set(comparison.outputs) == {"output['kind']", "output['place'][0]", "output['best']"}
    assert comparison.relative < 1e-5


@dataclass
class Pair:
    """A target of the user's own kind."""

    a: torch.Tensor
    b: torch.Tensor


def test_targets_of_a_class_that_the_user_has_registered():
    """Whatever torch's pytrees know is cut."""
    pytree.register_pytree_node(
        Pair, lambda pair: ([pair.a, pair.b], None), lambda leaves, _: Pair(*leaves)
    )
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    x, target = torch.randn(6, 5), Pair(torch.randn(6), torch.randn(6))
    plain = copy.deepcopy(model)

    def loss(output, pair):
        return (output[:, 0] - pair.a).square().mean() + (output[:, 1] - pair.b).abs().mean()

    expected = loss(plain(x), target)
    assert torch.allclose(
        pipeline(model, stages=2, loss=loss).train_batch(x, target), expected, rtol=1e-5
    )


def test_a_gradient_that_was_there_before_the_first_batch_is_added_to():
    """As on one device: only the user drops gradients that no step has used."""
    model, x, y = made(CASES["mlp"])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain = PlainTraining(plain, CASES["mlp"].loss)
    pipeline(model).train_batch(x, y)
    plain.backward(x, y, 4)
    assert near(gradients(model), gradients(plain.model)) == []


def test_the_loss_that_is_reported_is_neither_scaled_nor_divided():
    """There a loss that was divided for accumulation is logged divided."""
    model, x, y = made(CASES["mlp"])
    expected = CASES["mlp"].loss(model(x), y).detach()
    pipe = pipeline(
        model, optimizer=sgd, accumulate=8, scaler={"init_scale": 4096.0}, clip_grad_norm=1.0
    )
    assert torch.allclose(pipe.train_batch(x, y), expected, rtol=1e-5)
