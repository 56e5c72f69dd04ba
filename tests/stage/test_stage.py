"""Two stages, op by op, against plain autograd: gradients, what is held, and what is released."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.batches.batch import make_batch
from penstock.optim.update import Update
from penstock.schedule.recompute import Recompute
from penstock.stage import stage as stage_module
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.saved_forward import FastForward
from penstock.stage.stage import Stage
from penstock.stage.stage_layers import StageLayer, StageLayers
from penstock.transport.payload import Payload

CPU = torch.device("cpu")


class Pair(nn.Module):
    """A layer with two outputs, of which one needs no gradient, and a constant."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """Return a nested value."""
        return {"value": self.linear(x), "mask": (x > 0).float()}, 0.5


class Join(nn.Module):
    """A layer that takes what `Pair` returns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value):
        """Return one tensor."""
        tensors, factor = value
        return self.linear(tensors["value"] * tensors["mask"]) * factor


class Transposed(nn.Module):
    """A layer whose input gradient has another memory layout than its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        """Transpose twice."""
        return self.linear(x.t().contiguous().t()[:, :3]).repeat(1, 2)[:, :4]


class Frozen(nn.Linear):
    """A layer without trained weights, so that its output needs no gradient."""

    def __init__(self):
        super().__init__(4, 4)
        self.requires_grad_(requires_grad=False)


CASES = {
    "linear": (lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 4))),
    "nested": (Pair, Join),
    "layouts": (lambda: nn.Linear(4, 4), Transposed),
    "frozen": (Frozen, lambda: nn.Linear(4, 4)),
    "no weights": (lambda: nn.Linear(4, 4), nn.Tanh),
}


def make_stages(modules, **options):
    """Return one stage for each module on a common meter; the last has a loss."""
    meter = ActivationMeter()
    stages = []
    for index, module in enumerate(modules):
        layers = StageLayers([StageLayer(index, str(index), module)], CPU, 0)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        loss = nn.functional.mse_loss if index == len(modules) - 1 else None
        update = Update.make(trained, None)
        stages.append(Stage(index, layers, update, loss=loss, activation_meter=meter, **options))
    return stages, meter


def as_sent(payload):
    """Return a payload as a transport between processes delivers it."""
    return payload.with_tensors([tensor.detach().clone() for tensor in payload.tensors])


def train(stages, batch, *, split, evicts):
    """Run all forwards of a batch, and then all backwards."""
    first, last = stages
    for m in batch.numbers:
        assert last.forward(batch, m, as_sent(first.forward(batch, m, None))) is None
        if evicts:
            first.load(batch, m, as_sent(first.evict(batch, m)))
    for m in batch.numbers:
        if split:
            grads = last.input_grad(batch, m, None)
            first.input_grad(batch, m, as_sent(grads))
            last.weight_grad(batch, m)
            first.weight_grad(batch, m)
        else:
            first.backward(batch, m, as_sent(last.backward(batch, m, None)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("recompute", "split", "evicts"),
    [
        (Recompute.NEVER, False, False),
        (Recompute.NEVER, True, False),
        (Recompute.NEVER, False, True),
        (Recompute.NEVER, True, True),
        (Recompute.ALWAYS, False, False),
        (Recompute.ALWAYS, True, False),
        (Recompute.ALWAYS, False, True),
    ],
)
def test_gradients_are_those_of_the_whole_model(name, recompute, split, evicts):
    """Of unequal micro-batches, over several batches (later ones take the fast path), to the last
    bits that sums over micro-batches leave; nothing is held afterwards.
    """
    torch.manual_seed(0)
    modules = [make() for make in CASES[name]]
    plain = copy.deepcopy(nn.Sequential(*modules))
    evicted = range(3) if evicts else ()
    stages, meter = make_stages(modules, recompute=recompute, evicted=evicted)
    for step in range(4):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        batch = make_batch(x, y, 3, step=step, training=True)
        assert len({len(part) for part in batch.inputs}) > 1
        train(stages, batch, split=split, evicts=evicts)
        assert meter.now == 0
        for stage in stages:
            assert not stage._saved
            assert not stage._pending
        loss = nn.functional.mse_loss(plain(x), y)
        if loss.requires_grad:
            loss.backward()
        mean = sum(share * batch.losses[m] for m, share in enumerate(batch.shares))
        torch.testing.assert_close(mean, loss.detach())
        assert not any(value.requires_grad for value in batch.losses.values())
        for parameter, expected in zip(
            nn.Sequential(*modules).parameters(), plain.parameters(), strict=True
        ):
            assert (parameter.grad is None) == (expected.grad is None)
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS])
def test_evaluation_saves_nothing_and_builds_no_graph(recompute):
    """Neither the full way nor the fast path, in any order with training."""
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    stages, meter = make_stages(modules, recompute=recompute)
    x = torch.randn(6, 4)
    for step in range(3):
        batch = make_batch(x, x, 2, step=step, training=False)
        for m in batch.numbers:
            sent = stages[0].forward(batch, m, None)
            assert not sent.tensors[0].requires_grad
            stages[1].forward(batch, m, sent)
        assert not stages[0]._saved
        assert not stages[1]._saved
        assert meter.peak == meter.now == 0
        expected = nn.functional.mse_loss(nn.Sequential(*modules)(x), x)
        torch.testing.assert_close(sum(batch.losses.values()) / 2, expected.detach())
        train(stages, make_batch(x, x, 2, step=step, training=True), split=False, evicts=False)
        meter.begin()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_losses_have_their_share_and_the_scale_in_the_gradients_only(fast, split):
    """By samples, or by weights that the loss has; the reported loss has neither."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    stages, _ = make_stages(modules)
    x = torch.randn(6, 4)
    for step in range(4 if fast else 0):
        train(stages, make_batch(x, x, 3, step=step, training=True), split=split, evicts=False)
    if fast:
        # Only B shows whether input gradients have the layout that the fast path gives them.
        on_fast_path = [bool(stage._fast_path.bytes_by_form) for stage in stages]
        assert on_fast_path == [True, not split]
    weights = [0.5, 0.125, 2.0]
    for given in (None, weights):
        for parameter in nn.Sequential(*modules).parameters():
            parameter.grad = None
        batch = make_batch(x, x, 3, step=9, training=True)
        batch.loss_weights = given
        for stage in stages:
            stage.loss_scale = 8.0
        train(stages, batch, split=split, evicts=False)
        grads = [parameter.grad for parameter in nn.Sequential(*modules).parameters()]
        total = sum(
            weight * nn.functional.mse_loss(nn.Sequential(*modules)(part), part)
            for weight, part in zip(given or batch.shares, batch.inputs, strict=True)
        )
        expected = torch.autograd.grad(8.0 * total, list(nn.Sequential(*modules).parameters()))
        torch.testing.assert_close(grads, list(expected))
        plain = nn.functional.mse_loss(nn.Sequential(*modules)(x[:2]), x[:2])
        torch.testing.assert_close(batch.losses[0], plain.detach())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS])
def test_a_stage_holds_what_its_graphs_save_from_forward_to_the_end_of_the_backward(
    recompute, split
):
    """Of a linear layer its input; with recompute likewise, until its graph is built again."""
    stages, meter = make_stages([nn.Linear(4, 4), nn.Tanh()], recompute=recompute)
    first = stages[0]
    x = torch.randn(6, 4)
    one = 3 * 4 * 4  # bytes of a micro-batch
    for step in range(4):
        batch = make_batch(x, x, 2, step=step, training=True)
        held = []
        outputs = []
        for m in batch.numbers:
            outputs.append(first.forward(batch, m, None))
            held.append(meter.now)
        for m in batch.numbers:
            grads = Payload.flat([torch.ones(3, 4)])
            if split:
                first.input_grad(batch, m, grads)
                held.append(meter.now)
                first.weight_grad(batch, m)
            else:
                first.backward(batch, m, grads)
            held.append(meter.now)
        expected = [one, 2 * one, *([2 * one] if split else []), one, *([one] if split else []), 0]
        if step:  # the first graph is one of copies, which show whether layers change their inputs
            assert held == expected
        assert held[-1] == 0
        sent = outputs[0].tensors[0]
        # Recomputed, the graph of the first forward must not be kept alive by its output.
        assert sent.requires_grad is (recompute is Recompute.NEVER)
        assert outputs[0].wants_grad == (True,)


def test_evicted_activations_leave_the_meter_and_come_back():
    """Their bytes are those of the graph; a recomputed micro-batch sends nothing."""
    stages, meter = make_stages([nn.Linear(4, 4), nn.Tanh()], evicted=[0])
    first, x = stages[0], torch.randn(6, 4)
    batch = make_batch(x, x, 2, step=0, training=True)
    for m in batch.numbers:
        first.forward(batch, m, None)
    full = meter.now
    moved = first.evict(batch, 0)
    assert meter.now == full // 2
    assert moved.wants_grad == (False,)
    assert moved.tensors[0].dtype == torch.uint8
    with pytest.raises(RuntimeError, match="evicted and not loaded"):
        first.backward(copy.copy(batch), 0, Payload.flat([torch.ones(3, 4)]))
    stages, meter = make_stages([nn.Linear(4, 4), nn.Tanh()], evicted=[0])
    first = stages[0]
    for m in batch.numbers:
        first.forward(batch, m, None)
    # What is not to be evicted has nothing to send.
    assert first._saved[0, 1].saved is None
    assert first._saved[0, 0].saved is not None
    moved = first.evict(batch, 0)
    first.load(batch, 0, as_sent(moved))
    assert meter.now == full


def test_several_batches_in_flight_do_not_mix():
    """A stream has micro-batches of the same number, of different steps."""
    stages, meter = make_stages([nn.Linear(4, 4), nn.Tanh()])
    first = stages[0]
    parts = [torch.full((2, 4), float(step + 1)) for step in range(3)]
    batches = [make_batch(x, x, 1, step=step, training=True) for step, x in enumerate(parts)]
    for batch in batches:
        first.forward(batch, 0, None)
    for batch in reversed(batches):
        weight = first.layers[0].module.weight
        weight.grad = None
        first.backward(batch, 0, Payload.flat([torch.ones(2, 4)]))
        assert torch.equal(weight.grad, torch.full((4, 4), 2.0 * (batch.step + 1)))
    assert meter.now == 0


def test_forgetting_drops_all_that_unfinished_batches_have_saved():
    """Also what waits for its W, the meter, and the results of checks."""
    stages, meter = make_stages([nn.Linear(4, 4), nn.Tanh()])
    first, x = stages[0], torch.randn(6, 4)
    batch = make_batch(x, x, 2, step=0, training=True)
    for m in batch.numbers:
        first.forward(batch, m, None)
    first.input_grad(batch, 0, Payload.flat([torch.ones(3, 4)]))
    first._slice_states.waiting[1] = {0: x}
    cleared = []
    first.runner.checks = SimpleNamespace(clear=lambda: cleared.append(1), pending=True)
    assert first.has_pending_checks
    first.forget()
    assert (first._saved, first._pending, first._slice_states.waiting) == ({}, {}, {})
    assert (meter.now, meter.peak, cleared) == (0, 0, [1])


def test_the_tensors_of_a_stage_are_its_parameters_and_buffers():
    """Of all its modules, without the names that hold nothing."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    (stage,), _ = make_stages([module])
    expected = [*module.parameters(), *module.buffers()]
    assert {id(tensor) for tensor in stage.tensors()} == {id(tensor) for tensor in expected}
    assert len(list(stage.tensors())) == len(expected)


def test_a_stage_whose_weights_may_change_compares_no_recomputed_forward():
    """A backward may then read newer weights than its forward, also after a new trace."""
    for renewed in (False, True):
        stages, _ = make_stages([nn.Linear(4, 4), nn.Tanh()], recompute=Recompute.ALWAYS)
        first, x = stages[0], torch.randn(2, 4)
        first.allow_weight_changes()
        if renewed:
            first.renew()
        batch = make_batch(x, x, 1, step=0, training=True)
        first.forward(batch, 0, None)
        with torch.no_grad():
            first.layers[0].module.weight.mul_(2)
        first.backward(batch, 0, Payload.flat([torch.ones(2, 4)]))


def test_a_recomputed_forward_that_reads_other_weights_is_refused():
    """Unless that is allowed, see above; the message names stage, layers and micro-batch."""
    stages, _ = make_stages([nn.Linear(4, 4), nn.Tanh()], recompute=Recompute.ALWAYS)
    first, x = stages[0], torch.randn(4, 4)
    batch = make_batch(x, x, 2, step=0, training=True)
    for m in batch.numbers:
        first.forward(batch, m, None)
    with torch.no_grad():
        first.layers[0].module.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"stage 0, layer 0, micro-batch 1: recomputed"):
        first.backward(batch, 1, Payload.flat([torch.ones(2, 4)]))


def test_an_arrived_tensor_becomes_a_leaf_and_stays_as_it_was():
    """Within a process it is the sender's own, whose graph must not be entered."""
    stages, _ = make_stages([nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()])
    middle = stages[1]
    x = torch.randn(3, 4)
    for step in range(4):
        batch = make_batch(x, x, 1, step=step, training=True)
        sent = stages[0].forward(batch, 0, None)
        middle.forward(batch, 0, sent)
        grads = middle.backward(batch, 0, Payload.flat([torch.ones(3, 4)]))
        weight = middle.layers[0].module.weight
        torch.testing.assert_close(grads.tensors[0], torch.ones(3, 4) @ weight.detach())
        assert stages[0].layers[0].module.weight.grad is None
        assert sent.tensors[0].grad_fn is not None
        stages[0].forget()


def test_every_backward_runs_with_the_random_numbers_of_its_micro_batch():
    """A W says that it is the second part: code of the layers runs again in it. On the fast path
    layers that draw nothing enter no context.
    """
    stages, _ = make_stages([nn.Linear(4, 4), nn.Tanh()], recompute=Recompute.NEVER)
    first, x = stages[0], torch.randn(8, 4)
    batch = make_batch(x, x, 4, step=3, training=True)
    grads = Payload.flat([torch.ones(2, 4)])
    for step in range(3):
        train(stages, make_batch(x, x, 4, step=step, training=True), split=False, evicts=False)
    calls, active, gradients_inside = [], [], []

    @contextmanager
    def context(batch, micro_batch, *, weights_only=False):
        calls.append((batch.step, micro_batch, weights_only))
        active.append(1)
        yield
        active.pop()

    first._builder.backward_context = context
    first.layers[0].module.weight.register_hook(lambda grad: gradients_inside.append(len(active)))
    for m in batch.numbers:
        first.forward(batch, m, None)
    assert {type(saved) for saved in first._saved.values()} == {FastForward}
    first.input_grad(batch, 2, grads)
    first.weight_grad(batch, 2)
    first.backward(batch, 1, grads)
    assert calls == [(3, 2, False), (3, 2, True)]
    draws, first.runner.draws = first.runner.draws, SimpleNamespace(watches_backward=True)
    first.backward(batch, 3, grads)
    first.runner.draws = draws
    first._fast_path.clear()
    first.forward(batch, 0, None)
    first.backward(batch, 0, grads)
    assert calls[2:] == [(3, 3, False), (3, 0, False)]
    assert gradients_inside == [1, 0, 1, 1]


def test_weights_of_losses_are_counted_before_the_first_forward_if_possible():
    """On the last stage, while its input is on its way: of a batch of one micro-batch at once."""
    (first, last), _ = make_stages([nn.Linear(4, 4), nn.Linear(4, 4)])
    x = torch.randn(5, 4)
    batch = make_batch(x, x, 1, step=0, training=True)
    first.prepare(batch)
    assert batch.loss_weights is None, "this stage has no loss"
    last.prepare(batch)
    assert batch.loss_weights == [1.0]


@pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS])
def test_an_evaluation_measures_nothing_of_the_graphs_of_training(recompute):
    """It saves nothing, and its micro-batches have the forms of those that are trained."""
    held = []
    for evaluates in (False, True):
        stages, meter = make_stages([nn.Tanh(), nn.Linear(4, 4)], recompute=recompute)
        x = torch.randn(6, 4)
        for step in range(2 * evaluates):
            batch = make_batch(x, x, 2, step=step, training=False)
            for stage in stages:
                stage.forward(batch, 0, None if stage is stages[0] else Payload.of(x[:3]))
        for step in range(3):
            train(stages, make_batch(x, x, 2, step=step, training=True), split=False, evicts=False)
            held.append(meter.peak)
            meter.begin()
    assert held[:3] == held[3:]
    assert min(held) > 0


def test_results_of_checks_of_losses_and_recomputes_are_read_with_those_of_the_layers(monkeypatch):
    """The host does not wait for each; the loss may be one that these layers compute."""
    calls = []
    monkeypatch.setattr(stage_module, "StageLoss", lambda *args: calls.append(args))
    modules = [nn.Tanh(), nn.Linear(4, 4)]
    _, last = make_stages(modules)[0]
    ((loss, device, options, seed, layers, checks),) = calls
    assert (loss, device, seed, layers) == (nn.functional.mse_loss, CPU, 0, modules[1:])
    assert options is last.loss_options
    assert checks is last._second_forwards._checks is last.runner.checks
