"""Rarer ways of a micro-batch through a stage: side losses, joint losses, unused outputs, devices."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tests.stage.test_stage import CPU, as_sent, make_stages, train
from torch import nn
from torch.nn import functional

from penstock.batches.batch import make_batch
from penstock.errors import RunError
from penstock.losses.stage_loss import LossOptions
from penstock.modules.recomputing import is_checkpointing
from penstock.modules.side_loss import collecting_side_losses, side_loss
from penstock.optim.update import Update
from penstock.schedule.recompute import Recompute
from penstock.stage.stage import Stage
from penstock.stage.stage_layers import StageLayer, StageLayers
from penstock.transport.payload import Payload

every_recompute = pytest.mark.parametrize("recompute", [Recompute.NEVER, Recompute.ALWAYS])
every_split = pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])


class Penalised(nn.Module):
    """A layer with a trained and a constant side loss."""

    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x):
        """Add the side losses."""
        y = self.linear(x)
        side_loss(self.factor * y.square().mean())
        side_loss(torch.tensor(0.5))
        return y


def assert_grads(modules, expected_modules):
    """Compare the gradients of two lists of layers."""
    ours, theirs = nn.ModuleList(modules).parameters(), nn.ModuleList(expected_modules).parameters()
    for parameter, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@every_recompute
@every_split
def test_side_losses_have_the_share_of_the_samples_and_losses_their_weights(recompute, split):
    """On every stage, in every batch; both are scaled in the gradients alone."""
    torch.manual_seed(0)
    modules = [Penalised(1.0), Penalised(3.0)]
    plain = copy.deepcopy(modules)
    stages, meter = make_stages(modules, recompute=recompute)
    weights = [0.25, 2.0, 0.5]
    for stage in stages:
        stage.loss_scale = 4.0
    for step in range(3):
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        batch = make_batch(x, y, 3, step=step, training=True)
        batch.loss_weights = list(weights)
        train(stages, batch, split=split, evicts=False)
        reported = 0.0
        for number, part in enumerate(batch.inputs):
            with collecting_side_losses() as sides:
                loss = functional.mse_loss(plain[1](plain[0](part)), batch.targets[number])
            value = weights[number] * loss + batch.shares[number] * sum(sides)
            (4.0 * value).backward()
            reported += float(value.detach())
        assert float(batch.loss_shares(batch.numbers).sum()) == pytest.approx(reported)
        assert_grads(modules, plain)
        assert meter.now == 0


def mixing_loss(output, target):
    """Return a loss that is no mean over samples."""
    return (output.mean(0) * target.mean(0)).sum() + output.std()


@every_recompute
@every_split
@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_on_the_whole_batch_is_computed_on_all_outputs(recompute, split, count):
    """In every batch, although the first forwards of a form look like ones for the fast path."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4), nn.Linear(4, 3)]
    plain = copy.deepcopy(nn.Sequential(*modules))
    stages, _ = make_stages(modules, recompute=recompute)
    last = stages[1]
    stages[1] = Stage(
        1,
        last.runner,
        last.update,
        recompute=recompute,
        loss=mixing_loss,
        loss_options=LossOptions(None, "batch"),
        activation_meter=last.activation_meter,
    )
    for step in range(4):
        x, y = torch.randn(7, 4), torch.randn(7, 3)
        batch = make_batch(x, y, count, step=step, training=True)
        train(stages, batch, split=split, evicts=False)
        loss = mixing_loss(plain(x), y)
        loss.backward()
        assert float(batch.loss_shares(batch.numbers).sum()) == pytest.approx(float(loss.detach()))
        assert_grads(modules, plain)


class Fork(nn.Module):
    """A layer with two outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        """Return both."""
        return self.left(x), self.right(x)


@every_recompute
@every_split
@pytest.mark.parametrize("used", [(True, False), (False, True), (False, False)], ids=str)
def test_outputs_without_a_gradient_begin_no_backward(used, recompute, split):
    """The next stage may ignore some of them, or all."""
    torch.manual_seed(0)
    (_, stage, _), meter = make_stages([nn.Tanh(), Fork(), nn.Tanh()], recompute=recompute)
    module = stage.layers[0].module
    plain = copy.deepcopy(module)
    x = torch.randn(3, 4)
    for step in range(3):
        batch = make_batch(x, x, 1, step=step, training=True)
        stage.forward(batch, 0, Payload("", (x.clone(),), (True,)))
        grads = [torch.randn(3, 2), torch.randn(3, 3)]
        pairs = [*zip(grads, used, strict=True)]
        sent = Payload.flat([grad if is_used else None for grad, is_used in pairs])
        if split:
            returned = stage.input_grad(batch, 0, sent)
            stage.weight_grad(batch, 0)
        else:
            returned = stage.backward(batch, 0, sent)
        leaf = x.clone().requires_grad_()
        outputs = plain(leaf)
        total = sum(
            (output * grad).sum()
            for output, (grad, is_used) in zip(outputs, pairs, strict=True)
            if is_used
        )
        if any(used):
            total.backward()
            torch.testing.assert_close(returned.leaves[0], leaf.grad)
        else:
            assert returned.leaves == (None,)
        assert_grads([module], [plain])
        assert meter.now == 0


@pytest.mark.parametrize(
    ("recompute", "repeated"),
    [
        (Recompute.NEVER, []),
        (Recompute.EXCEPT_LAST, [0, 1]),
        (Recompute.ALWAYS, [0, 1, 2]),
        (Recompute.SELECTIVE, []),
    ],
)
def test_micro_batches_are_repeated_as_their_policy_says(recompute, repeated):
    """Each once, just before its backward, as layers may ask; an evaluation repeats none."""
    calls, announced = [], []

    def note(_, inputs):
        calls.append(int(inputs[0][0, 0]))
        if is_checkpointing():
            announced.append(calls[-1])

    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(note)
    (stage, _), _ = make_stages([module, nn.Tanh()], recompute=recompute)
    x = torch.arange(3.0).repeat_interleave(2)[:, None].expand(6, 4).contiguous()
    for step in range(2):
        batch = make_batch(x, x, 3, step=step, training=True)
        for m in batch.numbers:
            stage.forward(batch, m, None)
        assert calls == [0, 1, 2]
        calls.clear()
        for m in batch.numbers:
            stage.backward(batch, m, Payload.flat([torch.ones(2, 4)]))
        assert calls == repeated
        calls.clear()
    assert announced == 2 * repeated
    stage.forward(make_batch(x, x, 3, step=3, training=False), 0, None)
    assert calls == [0]
    assert announced == 2 * repeated


def test_a_recomputed_micro_batch_has_only_its_input_to_evict():
    """It sends no bytes; what the meter counts of it leaves and comes back all the same."""
    options = {"recompute": Recompute.ALWAYS, "evicted": [0]}
    (first, _), meter = make_stages([nn.Linear(4, 4), nn.Tanh()], **options)
    x = torch.randn(6, 4)
    batch = make_batch(x, x, 2, step=0, training=True)
    for m in batch.numbers:
        first.forward(batch, m, None)
    held = meter.now
    moved = first.evict(batch, 0)
    assert (moved.tensors[0].shape, moved.tensors[0].dtype) == ((0,), torch.uint8)
    assert (moved.structure, moved.wants_grad) == ("", (False,))
    assert meter.now == held // 2
    first.load(batch, 0, as_sent(moved))
    assert meter.now == held
    first.backward(batch, 0, Payload.flat([torch.ones(3, 4)]))
    assert meter.now == held // 2
    assert first.layers[0].module.bias.grad.tolist() == [3.0] * 4


def named_stage(names, modules, device=CPU, **options):
    """Return stage 2, whose layers have these names."""
    layers = [
        StageLayer(index + 5, name, module)
        for index, (name, module) in enumerate(zip(names, modules, strict=True))
    ]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    recomputed = frozenset({5}) if options.get("recompute") is Recompute.SELECTIVE else frozenset()
    runner = StageLayers(layers, device, 0, recomputed=recomputed)
    return Stage(2, runner, Update.make(parameters, None), **options)


@pytest.mark.parametrize(
    ("names", "place"),
    [("a", "layer a"), ("ab", "layers a to b"), ("abc", "layers a to c")],
)
def test_a_recompute_that_differs_names_the_stage_and_its_first_and_last_layer(names, place):
    """These are the layers to look at."""
    stage = named_stage(names, [nn.Linear(4, 4) for _ in names], recompute=Recompute.ALWAYS)
    x = torch.randn(2, 4)
    batch = make_batch(x, x, 1, step=0, training=True)
    stage.forward(batch, 0, None)
    with torch.no_grad():
        stage.layers[0].module.weight.add_(1)
    with pytest.raises(RunError, match=f"^stage 2, {place}, micro-batch 0: recomputed"):
        stage.backward(batch, 0, Payload.flat([torch.ones(2, 4)]))


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("renewed", [False, True])
def test_layers_that_run_again_are_compared_unless_weights_may_change(allowed, renewed):
    """As whole forwards are, also after the model was traced again."""
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)]
    stage = named_stage("ab", modules, recompute=Recompute.SELECTIVE)
    if allowed:
        stage.allow_weight_changes()
    if renewed:
        stage.renew()
    x = torch.randn(2, 4)
    batch = make_batch(x, x, 1, step=0, training=True)
    stage.forward(batch, 0, None)
    with torch.no_grad():
        modules[0][0].bias.data += 1
    arrived = Payload.flat([torch.ones(2, 4)])
    if allowed:
        stage.backward(batch, 0, arrived)
        return
    with pytest.raises(RunError, match=r"^layer 5: recomputed for the backward"):
        stage.backward(batch, 0, arrived)


def test_a_recompute_with_other_gradients_is_refused():
    """The values may be equal, and the gradients would belong to other tensors."""
    module = nn.Linear(4, 4)
    stage = named_stage("a", [module], recompute=Recompute.ALWAYS)
    x = torch.randn(2, 4)
    batch = make_batch(x, x, 1, step=0, training=True)
    stage.forward(batch, 0, None)
    module.requires_grad_(requires_grad=False)
    with pytest.raises(RunError, match=r"^stage 2: run again for its backward, a forward made 1"):
        stage.backward(batch, 0, Payload.flat([torch.ones(2, 4)]))


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_restores_the_mode_of_every_module(fails):
    """A user may keep single modules in evaluation mode; also after an error."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4)))
    module[1][1].eval()
    stage = named_stage("a", [module])
    modes = [part.training for part in stage.modules()]
    assert modes.count(False) == 1
    try:
        with stage.evaluation_mode():
            assert not any(part.training for part in stage.modules())
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [part.training for part in stage.modules()] == modes


@every_recompute
@every_split
def test_a_stage_on_a_device_moves_what_arrives_to_it(recompute, split):
    """Inputs are views of one copy of the batch; gradients that arrive are moved too. Checks that
    are read later begin with every training batch, and no other one.
    """
    meta = torch.device("meta")
    module = nn.Linear(4, 4, device=meta)
    stage = named_stage("a", [module], meta, recompute=recompute)
    stage.allow_weight_changes()
    begun = []
    stage.runner.checks.begin = begun.append
    x = torch.randn(6, 4)
    for step in range(4):
        batch = make_batch(x, x, 2, step=step, training=True)
        for m in batch.numbers:
            output = stage.forward(batch, m, None)
            assert (output.tensors[0].shape, output.tensors[0].device) == ((3, 4), meta)
        assert list(batch.device_batches) == [meta]
        for m in batch.numbers:
            grads = Payload.flat([torch.ones(3, 4)])
            if split:
                stage.input_grad(batch, m, grads)
                stage.weight_grad(batch, m)
            else:
                stage.backward(batch, m, grads)
        assert module.weight.grad.device == meta
        sent = Payload("", (torch.ones(3, 4),), (True,))
        middle = stage.forward(batch, 0, sent)
        assert middle.tensors[0].device == meta
        stage.forget()
    assert set(begun) == {0, 1, 2, 3}
    begun.clear()
    stage.forward(make_batch(x, x, 2, step=7, training=False), 0, None)
    assert begun == []


class Noisy(nn.Module):
    """A loss that draws random numbers."""

    def forward(self, output, target):
        """Return the mean of the noise, without the output's values."""
        return (0 * output + torch.rand_like(output)).mean() + 0 * target.mean()


def test_a_loss_draws_from_the_seed_of_the_pipeline():
    """Another seed has other numbers, and the same seed the same."""
    losses = []
    for seed in (3, 4, 3):
        module = nn.Linear(4, 4)
        runner = StageLayers([StageLayer(0, "0", module)], CPU, seed)
        stage = Stage(0, runner, Update.make(list(module.parameters()), None), loss=Noisy())
        x = torch.ones(2, 4)
        batch = make_batch(x, x, 1, step=0, training=True)
        stage.forward(batch, 0, None)
        losses.append(float(batch.losses[0]))
    assert losses[0] == losses[2] != losses[1]


class CountingEntry(nn.Module):
    """An entry that multiplies by the number of its forwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, crossed, inputs):
        """Count, and multiply."""
        self.calls += 1
        return crossed * self.calls.clone()


def test_a_recomputed_entry_has_the_buffers_of_its_first_forward():
    """As layers have: it counts each micro-batch once."""
    module, entry = nn.Linear(4, 4, bias=False), CountingEntry()
    runner = StageLayers([StageLayer(3, "3", module)], CPU, 0, entry=entry)
    update = Update.make(list(module.parameters()), None)
    stage = Stage(1, runner, update, recompute=Recompute.ALWAYS)
    x = torch.ones(4, 4)
    batch = make_batch(x, x, 2, step=0, training=True)
    for number in batch.numbers:
        stage.forward(batch, number, Payload("", (torch.ones(2, 4),), (True,)))
    for number in batch.numbers:
        stage.backward(batch, number, Payload.flat([torch.ones(2, 4)]))
    assert float(entry.calls) == 2
    assert module.weight.grad.tolist() == [[2.0 * (1 + 2)] * 4] * 4


def test_a_recomputed_loss_keeps_no_graph_of_its_first_forward():
    """Not even that of the loss, through which all activations would stay alive."""
    outputs = []
    module = nn.Linear(4, 4)
    module.register_forward_hook(
        lambda _module, _inputs, output: outputs.append(weakref.ref(output.untyped_storage()))
    )
    for recompute in (Recompute.NEVER, Recompute.ALWAYS):
        outputs.clear()
        stage = named_stage("a", [module], recompute=recompute, loss=nn.functional.mse_loss)
        x = torch.randn(2, 4)
        batch = make_batch(x, x, 1, step=0, training=True)
        stage.forward(batch, 0, None)
        gc.collect()
        assert (outputs[0]() is None) is (recompute is Recompute.ALWAYS)


def test_each_form_of_micro_batch_comes_to_the_fast_path():
    """Each has its own name, since sizes and constants of micro-batches may differ."""
    torch.manual_seed(0)
    stages, _ = make_stages([nn.Linear(4, 4), nn.Linear(4, 4)])
    x = torch.randn(8, 4)
    for step in range(4):
        batch = make_batch(x, x, 3, step=step, training=True)
        train(stages, batch, split=False, evicts=False)
    for stage in stages:
        assert set(stage._fast_path.bytes_by_form) == set(batch.forms)


def test_weights_do_not_leave_with_what_is_evicted():
    """A linear layer saves its input and its weight; the input is moved, in 64 bytes."""
    (_, stage, _), _ = make_stages([nn.Tanh(), nn.Linear(4, 4), nn.Tanh()], evicted=[0])
    x = torch.randn(3, 4)
    batch = make_batch(x, x, 1, step=0, training=True)
    stage.forward(batch, 0, Payload("", (x,), (True,)))
    assert stage.evict(batch, 0).tensors[0].numel() == 64


def test_pending_checks_of_a_stage_are_read_on_demand():
    """Such as before a checkpoint is written."""
    stage = named_stage("a", [nn.Linear(4, 4)])
    assert not stage.has_pending_checks
    stage.read_checks()
    stage.runner.checks.add(torch.tensor([False])[0], "this is fine")
    stage.runner.checks.add(torch.tensor([True])[0], "this is wrong")
    assert stage.has_pending_checks
    with pytest.raises(RunError, match=r"^this is wrong"):
        stage.read_checks()
    assert not stage.has_pending_checks
