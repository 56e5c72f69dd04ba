"""The fast path of a stage gives what the checked path gives."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.modules.side_loss import (
    collect_side_losses,
    collecting_side_losses,
    side_loss,
)
from penstock.optim.update import Update
from penstock.stage.fast_path import _MAX_FORMS, FastPath
from penstock.stage.stage import Stage
from penstock.stage.stage_layers import StageLayer, StageLayers
from penstock.transport.payload import Payload

CPU = torch.device("cpu")


class Transposed(nn.Module):
    """A layer whose input gradient has another memory layout than its input."""

    def forward(self, x):
        """Double the transposed input."""
        return (x.t() * 2).contiguous()


def input_grads(module, batches):
    """Return the gradients that a stage of one module sends back, one per batch."""
    layers = StageLayers([StageLayer(0, "0", module)], torch.device("cpu"), 0)
    stage = Stage(1, layers, Update.make(list(module.parameters()), None))
    x = torch.arange(12.0).reshape(3, 4)
    grads = []
    for step in range(batches):
        batch = make_batch(x, x, 1, step=step, training=True)
        output = stage.forward(batch, 0, Payload("", (x.clone(),), (True,)))
        arrived = Payload.flat([torch.ones_like(output.leaves[0])])
        grads.append(stage.backward(batch, 0, arrived).leaves[0])
    return grads, stage


def test_an_input_gradient_keeps_the_memory_layout_that_autograd_gives_it():
    """In another layout the stage before would sum it in another order, and round differently."""
    grads, _ = input_grads(Transposed(), 4)
    assert [grad.stride() for grad in grads] == [(1, 3)] * 4


def test_a_form_takes_the_fast_path_once_its_gradients_have_the_layout_of_its_inputs():
    """The test above would pass without any fast path."""
    grads, stage = input_grads(nn.Tanh(), 4)
    assert stage._fast_path.bytes_by_form
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert [grad.stride() for grad in grads] == [(4, 1)] * 4


class LateSides(nn.Module):
    """A layer that has side losses from its third forward on: one trained, and one constant."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        """Add the side losses."""
        self.calls += 1
        y = self.linear(x)
        if self.calls > 2:
            side_loss(y.square().mean())
            side_loss(torch.tensor(0.25))
        return y


@pytest.mark.parametrize("last", [False, True])
def test_a_side_loss_that_begins_on_the_fast_path_is_trained_and_reported(last):
    """From its very first micro-batch, with the micro-batch's share, and ever after."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), LateSides()] if last else [LateSides(), nn.Linear(4, 4)]
    pipe = ps.Pipeline(
        nn.Sequential(*layers),
        balance=(1, 1),
        schedule="1f1b",
        micro_batches=2,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
    )
    layers[last].calls = -4  # two batches train without side losses, on the fast path at last
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for step in range(5):
        reference = copy.deepcopy(nn.Sequential(*layers))
        for parameter in (*reference.parameters(), *nn.Sequential(*layers).parameters()):
            parameter.grad = None
        expected = 0.0
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            with collecting_side_losses() as sides:
                loss = nn.functional.mse_loss(reference(part), target)
            expected += (loss + sum(sides)) / 2
        expected.backward()
        assert bool(sides) == (step > 2)
        torch.testing.assert_close(pipe.train_batch(x, y), expected.detach())
        for ours, theirs in zip(
            nn.Sequential(*layers).parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_layouts_of_a_limited_number_of_forms_are_remembered():
    """Shapes that depend on the data may never come again."""
    path = FastPath(SimpleNamespace(layers=SimpleNamespace(device=CPU), mixed=False), None)
    for number in range(_MAX_FORMS):
        path.note_same_layout(f"form {number}")
    assert len(path._same_layouts) == _MAX_FORMS
    path.note_same_layout("one more")
    assert path._same_layouts == {"one more"}
    path.bytes_by_form["one more"] = 4
    path.clear()
    assert not path._same_layouts
    assert not path.bytes_by_form


#: What the first forward of a form must have shown, as `path_after` takes it.
SUFFICIENT = {
    "changes_input": False,
    "settled": True,
    "wants_grad": True,
    "same_layout": True,
    "input_structure": "",
    "output_structure": "",
    "is_last": False,
    "cuts_tokens": False,
    "keeps_outputs": False,
}


def path_after(facts):
    """Return the fast path after a forward of which these things are known."""
    builder = SimpleNamespace(
        layers=SimpleNamespace(device=CPU),
        mixed=False,
        loss=len if facts["is_last"] else None,
        in_place=SimpleNamespace(excluded=lambda *, training: not facts["changes_input"]),
        form=lambda batch, number: f"2/{batch.forms[number]}",
    )
    meter = SimpleNamespace(settled=lambda form: facts["settled"], size={"2/b": 48}.get)
    path = FastPath(builder, meter)
    if facts["same_layout"]:
        path.note_same_layout("b")
    batch = SimpleNamespace(
        forms=["a", "b"], cuts_tokens=facts["cuts_tokens"], keeps_outputs=facts["keeps_outputs"]
    )
    inputs = Payload(facts["input_structure"], (torch.ones(2),), (facts["wants_grad"],))
    output = Payload(facts["output_structure"], (torch.ones(2),), (True,))
    path.enable(batch, 1, inputs, None if facts["is_last"] else output)
    return path


@pytest.mark.parametrize(
    ("changed", "enabled"),
    [
        ({}, True),
        ({"changes_input": True}, False),
        ({"settled": False}, False),
        ({"same_layout": False}, False),
        ({"same_layout": False, "wants_grad": False}, True),
        ({"input_structure": "*"}, False),
        ({"output_structure": "*"}, False),
        ({"output_structure": "*", "is_last": True}, True),
        ({"cuts_tokens": True}, False),
        ({"keeps_outputs": True}, False),
    ],
    ids=str,
)
def test_a_form_takes_the_fast_path_if_its_first_forward_needed_nothing_else(changed, enabled):
    """Under its name in the batch, with the bytes that its graph saves."""
    path = path_after({**SUFFICIENT, **changed})
    assert path.bytes_by_form == ({"b": 48} if enabled else {})


@pytest.mark.parametrize("last", [False, True])
def test_layers_with_side_losses_never_take_the_fast_path(last):
    """It would leave the path at once, after a graph that nothing has measured."""
    module = LateSides()
    module.calls = 2
    layers = StageLayers([StageLayer(0, "0", module)], CPU, 0)
    loss = nn.functional.mse_loss if last else None
    stage = Stage(0, layers, Update.make(list(module.parameters()), None), loss=loss)
    x = torch.randn(3, 4)
    for step in range(3):
        batch = make_batch(x, x, 1, step=step, training=True)
        output = stage.forward(batch, 0, None)
        arrived = None if output is None else Payload.flat([torch.ones(3, 4)])
        stage.backward(batch, 0, arrived)
        assert not stage._fast_path.bytes_by_form
        assert stage.activation_meter.now == 0


@pytest.mark.parametrize("sides", [False, True])
def test_a_form_leaves_the_fast_path_with_its_first_side_loss(sides):
    """Later micro-batches must be measured with the graphs of their side losses; other forms stay."""

    def run(batch, number, value, state):
        if sides:
            side_loss(value.sum())
        return value * 2

    layers = SimpleNamespace(device=CPU, run=run)
    path = FastPath(SimpleNamespace(layers=layers, mixed=False, loss=None, reach=None), None)
    path.bytes_by_form = {"a": 8, "b": 16}
    batch = SimpleNamespace(inputs=[torch.ones(2)], forms=["a"])
    saved, output = path.forward(batch, 0, None, 8)
    assert path.bytes_by_form == ({"b": 16} if sides else {"a": 8, "b": 16})
    assert saved.size == 8
    assert (output.structure == "") is not sides


def test_an_error_on_the_fast_path_leaves_no_collector_of_side_losses():
    """A side loss of the next model would go to the failed forward."""
    builder = SimpleNamespace(layers=SimpleNamespace(device=CPU), mixed=False, loss=None)
    outer = []

    def run(*args):
        side_loss(torch.tensor(1.0))
        raise KeyError("planted")

    builder.layers.run = run
    path = FastPath(builder, None)
    batch = SimpleNamespace(inputs=[torch.ones(2)])
    before = collect_side_losses(outer)
    try:
        with pytest.raises(KeyError):
            path.forward(batch, 0, None, 8)
        side_loss(torch.tensor(2.0))
    finally:
        collect_side_losses(before)
    assert [float(value) for value in outer] == [2.0]


@pytest.mark.parametrize("trained", [False, True])
def test_only_outputs_with_a_graph_want_a_gradient(trained):
    """A stage whose layers are frozen has none; its backward then computes nothing."""
    module = nn.Linear(4, 4).requires_grad_(requires_grad=trained)
    layers = StageLayers([StageLayer(0, "0", module)], CPU, 0)
    stage = Stage(0, layers, Update.make(list(module.parameters()), None))
    x = torch.randn(3, 4)
    for step in range(4):
        batch = make_batch(x, x, 1, step=step, training=True)
        output = stage.forward(batch, 0, None)
        assert output.wants_grad == (trained,)
        assert bool(stage._fast_path.bytes_by_form) == (step > 0)
        arrived = Payload.flat([torch.ones(3, 4)] if trained else [])
        assert stage.backward(batch, 0, arrived).leaves == ()
    assert (module.weight.grad is not None) is trained


@pytest.mark.parametrize("watched", [False, True])
def test_a_backward_without_an_arriving_gradient_computes_nothing(watched, monkeypatch):
    """The next stage has not used the output; also where backwards are watched for random numbers."""
    module = nn.Linear(4, 4)
    layers = StageLayers([StageLayer(0, "0", module)], CPU, 0)
    stage = Stage(0, layers, Update.make(list(module.parameters()), None))
    x, meter = torch.randn(3, 4), stage.activation_meter
    monkeypatch.setattr(type(layers.draws), "watches_backward", watched)
    for step in range(3):
        batch = make_batch(x, x, 1, step=step, training=True)
        stage.forward(batch, 0, None)
        assert meter.now > 0
        assert stage.backward(batch, 0, Payload.flat([None])).leaves == ()
        assert meter.now == 0
    assert stage._fast_path.bytes_by_form
    assert module.weight.grad is None


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_the_fast_path_builds_a_graph_in_mixed_precision_if_requested(mixed, outside):
    """Also where gradients are off around it. The reach of a loss is checked once per batch, and
    not of a loss that cannot use parameters.
    """
    dtypes, checked = [], []
    reach = SimpleNamespace(step=-1)

    def check_loss(batch, loss, output):
        checked.append((loss.item(), output.tolist()))
        reach.step = batch.step

    def run(batch, number, value, state):
        dtypes.append((value[:, None] @ value[None]).dtype)
        assert state.keeps is False
        return value * 2

    reach.check_loss = check_loss
    builder = SimpleNamespace(
        layers=SimpleNamespace(device=CPU, run=run),
        mixed=mixed,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=mixed),
        loss=SimpleNamespace(
            of=lambda batch, number, output, sides: output.sum(), may_use_parameters=True
        ),
        reach=reach,
    )
    path = FastPath(builder, None)
    arrived = Payload("", (torch.ones(2, requires_grad=True) * 1,), (True,))
    for step, training, may_use_parameters in [
        (0, True, True),
        (0, True, True),
        (1, True, True),
        (2, False, False),
        (2, True, True),
        (3, True, False),
        (3, True, True),
    ]:
        builder.loss.may_use_parameters = may_use_parameters
        batch = SimpleNamespace(step=step, training=training)
        with torch.set_grad_enabled(outside):
            saved, output = path.forward(batch, 0, arrived, 8)
        assert output is None
        assert saved.size == 8
        assert saved.leaf.is_leaf
        assert saved.leaf.requires_grad
        saved.root.backward()
        assert saved.leaf.grad.tolist() == [2.0, 2.0]
    assert checked == [(4.0, [2.0, 2.0])] * 3
    assert dtypes == [torch.bfloat16 if mixed else torch.float32] * 7


def test_the_fast_path_moves_inputs_to_the_device_of_the_stage():
    """Those of a batch are views of one copy; what arrives is a leaf on the device."""
    meta = torch.device("meta")
    numbers = []

    def run(batch, number, value, state):
        numbers.append(number)
        return value * 2

    layers = SimpleNamespace(device=meta, run=run)
    path = FastPath(SimpleNamespace(layers=layers, mixed=False, loss=None, reach=None), None)
    batch = make_batch(torch.ones(5, 4), torch.ones(5, 3), 2, step=0, training=True)
    for number, count in ((1, 2), (0, 3)):
        _, output = path.forward(batch, number, None, 8)
        assert (output.tensors[0].device, output.tensors[0].shape) == (meta, (count, 4))
    assert list(batch.device_batches) == [meta]
    saved, output = path.forward(batch, 0, Payload("", (torch.ones(3, 4),), (True,)), 8)
    assert output.tensors[0].device == saved.leaf.device == meta
    assert numbers == [1, 0, 0], "layers draw the random numbers of the micro-batch"
    assert saved.leaf.requires_grad


class Detached(nn.Module):
    """A layer whose output has no graph."""

    def forward(self, x):
        """Double the values of the input."""
        return 2 * x.detach()


@pytest.mark.parametrize("split", [False, True])
def test_an_input_that_no_output_depends_on_gets_no_gradient(split):
    """The stage before waits for one entry per tensor that it has sent: None, on either path."""
    stage = Stage(1, StageLayers([StageLayer(0, "0", Detached())], CPU, 0), Update.make([], None))
    x = torch.ones(3, 4)
    for step in range(4):
        batch = make_batch(x, x, 1, step=step, training=True)
        output = stage.forward(batch, 0, Payload("", (x.clone(),), (True,)))
        assert output.wants_grad == (False,)
        if split and step:
            returned = stage.input_grad(batch, 0, Payload.flat([]))
            stage.weight_grad(batch, 0)
        else:
            returned = stage.backward(batch, 0, Payload.flat([]))
        assert returned.leaves == (None,)
        assert stage.activation_meter.now == 0
    assert stage._fast_path.bytes_by_form


@pytest.mark.parametrize("wants_grad", [False, True])
def test_an_arrived_input_is_a_leaf_if_its_sender_wants_a_gradient(wants_grad):
    """Without trained layers before, the stage before has nothing to do with one."""
    module = nn.Linear(4, 4)
    layers = StageLayers([StageLayer(0, "0", module)], CPU, 0)
    stage = Stage(1, layers, Update.make(list(module.parameters()), None))
    x = torch.ones(3, 4)
    for step in range(4):
        batch = make_batch(x, x, 1, step=step, training=True)
        stage.forward(batch, 0, Payload("", (x.clone(),), (wants_grad,)))
        returned = stage.backward(batch, 0, Payload.flat([torch.ones(3, 4)]))
        assert len(returned.leaves) == wants_grad
    assert stage._fast_path.bytes_by_form


@pytest.mark.parametrize("calls", [0, -4])
def test_a_loss_has_its_weight_and_side_losses_the_share_where_they_begin(calls):
    """In the first forward, or in one of the fast path; micro-batches have unequal weights."""
    torch.manual_seed(0)
    module = LateSides()
    module.calls = calls
    layers = StageLayers([StageLayer(0, "0", module)], CPU, 0)
    update = Update.make(list(module.parameters()), None)
    stage = Stage(0, layers, update, loss=nn.functional.mse_loss)
    weights, plain = [0.25, 2.0], copy.deepcopy(module)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for step in range(4):
        batch = make_batch(x, y, 2, step=step, training=True)
        batch.loss_weights = weights
        for number in batch.numbers:
            stage.forward(batch, number, None)
        for number in batch.numbers:
            stage.backward(batch, number, None)
        for weight, part, target in zip(weights, x.chunk(2), y.chunk(2), strict=True):
            with collecting_side_losses() as sides:
                loss = nn.functional.mse_loss(plain(part), target)
            (weight * loss + sum(sides) / 2).backward()
        for parameter, expected in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)


class LateDetachedSides(LateSides):
    """A layer whose output has no graph, and whose later side losses have one."""

    def forward(self, x):
        """Detach the output."""
        return super().forward(x).detach()


def test_a_side_loss_that_begins_beside_an_output_without_a_graph_is_trained():
    """The next stage sends no gradient for the output; the first forwards build a graph, too."""
    module = LateDetachedSides()
    layers = StageLayers([StageLayer(0, "0", module)], CPU, 0)
    stage = Stage(0, layers, Update.make(list(module.parameters()), None))
    x = torch.randn(3, 4)
    for step in range(4):
        batch = make_batch(x, x, 1, step=step, training=True)
        module.zero_grad()
        output = stage.forward(batch, 0, None)
        assert not any(output.wants_grad)
        stage.backward(batch, 0, Payload.flat([]))
        expected = [parameter.grad for parameter in module.parameters()]
        if step < 2:
            assert expected == [None, None]
            continue
        side = module.linear(x).square().mean()
        expected = torch.autograd.grad(side, list(module.parameters()))
        torch.testing.assert_close([p.grad for p in module.parameters()], list(expected))
