"""Stages op by op on slices of sequences: state goes to the next slice, its gradients come back."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from penstock.batches.batch import make_batch
from penstock.errors import RunError
from penstock.optim.update import Update
from penstock.schedule.recompute import Recompute
from penstock.schedule.slicing import Slicing
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.stage import Stage
from penstock.stage.stage_layers import StageLayer, StageLayers

#: Two micro-batches of three samples and eight tokens, in slices of four, two and two tokens.
SLICING = Slicing("tokens", ((0.5, 0.25, 0.25),) * 2)
SHAPE = (6, 8, 4)


class Running(nn.Module):
    """A sum over the tokens so far, of which the last is passed on beside the number of tokens and
    a tensor without a gradient.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.states = []

    def forward_slice(self, value, past):
        """Return the sums, and the state."""
        total, count = (0.0, 0) if past is None else (past["total"], past["count"])
        sums = self.linear(value).cumsum(1) + total
        last = sums[:, -1:].tanh()
        self.states.append(weakref.ref(last))
        if past is not None:
            self.states.append(weakref.ref(total))
        positive = (last.detach() > 0).float()
        return sums.sin(), {"positive": positive, "total": last, "count": count + value.shape[1]}


class Careless(Running):
    """Passes on another state in each forward; its output does not depend on the number of calls."""

    def __init__(self):
        super().__init__()
        self.calls = [0]

    def forward_slice(self, value, past):
        """Return the sums, and a state that counts the calls."""
        self.calls[0] += 1
        output, state = super().forward_slice(value, past)
        return output, {**state, "total": state["total"] * self.calls[0]}


class Detaching(Careless):
    """Passes on a state that requires a gradient in the first forward alone."""

    def forward_slice(self, value, past):
        """Return the sums, and a state with or without a graph."""
        output, state = Running.forward_slice(self, value, past)
        self.calls[0] += 1
        total = state["total"]
        return output, {**state, "total": total if self.calls[0] < 4 else total.detach()}


def stages_of(*modules, **options):
    """Return one stage for each module, of which the last has a loss, and their meter."""
    meter = ActivationMeter()
    stages = []
    for index, module in enumerate(modules):
        layers = StageLayers([StageLayer(index, str(index), module)], torch.device("cpu"), 0)
        loss = nn.functional.mse_loss if index == len(modules) - 1 else None
        update = Update.make(list(module.parameters()), None)
        stages.append(Stage(index, layers, update, loss=loss, activation_meter=meter, **options))
    return stages, meter


def batch_of(step):
    """Return a batch in slices."""
    torch.manual_seed(step)
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    return make_batch(x, y, 2, step=step, training=True, slicing=SLICING)


def reference(modules, batch):
    """Add the gradients of the same slices, one after the other in one graph."""
    for numbers in batch.rows():
        pasts = [None] * len(modules)
        loss = torch.zeros(())
        for number in numbers:
            value = batch.inputs[number]
            for index, module in enumerate(modules):
                value, pasts[index] = module.forward_slice(value, pasts[index])
            part = nn.functional.mse_loss(value, batch.targets[number])
            loss = loss + batch.shares[number] * part
        loss.backward()


def backward(stage, batch, number, grads, *, split):
    """Run the backward of a slice, whole or in two parts; return the gradients of the input."""
    if not split:
        return stage.backward(batch, number, grads)
    input_grads = stage.input_grad(batch, number, grads)
    stage.weight_grad(batch, number)
    return input_grads


@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.EXCEPT_LAST, Recompute.ALWAYS])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_those_of_the_slices_in_one_graph(recompute, split):
    """Over several batches; afterwards nothing of the states is left."""
    torch.manual_seed(1)
    modules = [Running(), Running()]
    plain = copy.deepcopy(modules)
    (first, last), meter = stages_of(*modules, recompute=recompute)
    for step in range(3):
        batch = batch_of(step)
        for number in batch.numbers:
            assert last.forward(batch, number, first.forward(batch, number, None)) is None
        for number in reversed(batch.numbers):
            first_grads = backward(last, batch, number, None, split=split)
            backward(first, batch, number, first_grads, split=split)
        reference(plain, batch)
        for module, other in zip(modules, plain, strict=True):
            for parameter, expected in zip(module.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, expected.grad)
        assert meter.now == 0
        gc.collect()
        assert not any(state() is not None for module in modules for state in module.states)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Careless, "other values"),
        (Detaching, "of which 0 want a gradient, and the first time 2, of which 1"),
    ],
)
def test_a_recompute_that_passes_on_another_state_is_refused(kind, text):
    """The next slice has used the first one; the output alone may be equal."""
    (stage,), _ = stages_of(kind(), recompute=Recompute.ALWAYS)
    batch = batch_of(0)
    for number in range(3):
        stage.forward(batch, number, None)
    stage.backward(batch, 2, None)  # the last slice passes on nothing
    with pytest.raises(RunError, match=text):
        stage.backward(batch, 1, None)


def test_an_evaluation_passes_states_on_without_a_graph():
    """It has the outputs of the slices in training, and leaves nothing behind."""
    (first, last), meter = stages_of(Running(), Running())
    training = batch_of(0)
    evaluation = make_batch(*training.whole, 2, step=0, training=False, slicing=SLICING)
    values = []
    for batch in (training, evaluation):
        outputs = [first.forward(batch, number, None) for number in batch.numbers]
        values.append([output.tensors[0] for output in outputs])
        assert [output.wants_grad for output in outputs] == [(batch.training,)] * 6
        first.forget()
    assert all(map(torch.equal, *values))
    assert meter.now == 0
    assert last.forward(evaluation, 0, outputs[0]) is None
    assert evaluation.losses[0].requires_grad is False
