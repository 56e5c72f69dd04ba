"""Layers of a stage as one: entries and exits, mixed precision, compiled code, layers that run
again.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.batches.batch import make_batch
from penstock.optim.update import Update
from penstock.schedule.recompute import Recompute
from penstock.stage import stage_layers as stage_layers_module
from penstock.stage.slice_state import SliceState
from penstock.stage.stage import Stage
from penstock.stage.stage_layers import StageLayer, StageLayers

CPU = torch.device("cpu")


def stage(modules, *, recompute="never", autocast=None, **options):
    """The only stage of a model; further options are those of its layers."""
    layers = [StageLayer(index, str(index), module) for index, module in enumerate(modules)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return Stage(
        0,
        StageLayers(layers, CPU, 0, **options),
        Update.make(parameters, None),
        Recompute(recompute),
        nn.functional.mse_loss,
        autocast=autocast,
    )


def trained(one_stage, x, y, batches=2):
    """The losses of some batches, run forward and backward."""
    losses = []
    for step in range(batches):
        batch = make_batch(x, y, 2, step=step, training=True)
        for number in batch.numbers:
            one_stage.forward(batch, number, None)
            one_stage.backward(batch, number, None)
        losses.append(float(batch.loss_shares(batch.numbers).sum()))
    return losses


def layers():
    """Some layers, one of which draws random numbers."""
    torch.manual_seed(0)
    return [
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 4),
    ]


def data():
    """A batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


class Scale(nn.Module):
    """An entry: what came, times the mean of the micro-batch's inputs."""

    def forward(self, crossed, inputs):
        """Both arrive as they were."""
        return crossed * inputs.mean()


def test_an_entry_makes_what_the_first_layer_takes_of_what_came_and_the_inputs():
    """Masks and their like need not travel."""
    x, y = data()
    first = nn.Linear(4, 4)
    entry_stage = stage([first], entry=Scale())
    expected = sum(
        nn.functional.mse_loss(first(part * part.mean()), targets) / 2
        for part, targets in zip(x.split(4), y.split(4), strict=True)
    )
    assert trained(entry_stage, x, y, 2) == pytest.approx([float(expected.detach())] * 2)


def test_an_exit_makes_what_crosses_of_what_the_last_layer_returns():
    """What can be made again stays behind."""
    x, _ = data()
    first = nn.Linear(4, 4)
    layer = StageLayer(0, "0", first)
    exit_stage = Stage(
        0,
        StageLayers([layer], CPU, 0, exit=lambda value: {"sent": value}),
        Update.make(list(first.parameters()), None),
    )
    sent = exit_stage.forward(make_batch(x, x, 1, step=0, training=True), 0, None)
    assert sent.value().keys() == {"sent"}


@pytest.mark.parametrize("recomputed", [{0, 1, 2}, {2, 3, 4, 5}, {5}, set(range(7))])
def test_layers_that_run_again_give_the_same_to_the_bit(recomputed):
    """Dropout draws the same numbers, and batch norm counts once."""
    x, y = data()
    one, other = layers(), layers()
    plain, again = stage(one), stage(other, recompute="selective", recomputed=frozenset(recomputed))
    state = torch.get_rng_state()
    assert trained(plain, x, y) == trained(again, x, y)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is as it was"
    for mine, theirs in zip(
        nn.ModuleList(one).state_dict().values(),
        nn.ModuleList(other).state_dict().values(),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(plain.update.parameters, again.update.parameters, strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_layers_that_run_again_hold_less():
    """That is what they are for."""
    x, y = data()
    plain, again = (
        stage(layers()),
        stage(layers(), recompute="selective", recomputed=frozenset(range(7))),
    )
    trained(plain, x, y)
    trained(again, x, y)
    assert again.activation_meter.peak < plain.activation_meter.peak


def test_compiled_layers_give_the_same():
    """Neighbours become one function; those that draw stay apart, so that their numbers are the
    same.
    """
    x, y = data()
    plain, compiled = stage(layers()), stage(layers(), compile={"backend": "aot_eager"})
    assert trained(plain, x, y) == pytest.approx(trained(compiled, x, y), rel=1e-6)
    assert len(compiled.runner._parts) == 3


def test_mixed_precision_computes_in_it_and_keeps_gradients_whole():
    """As torch.autocast around the forward and the loss."""
    x, y = data()
    module = nn.Linear(4, 4)
    dtypes = []
    module.register_forward_hook(lambda _m, _i, out: dtypes.append(out.dtype))
    mixed_stage = stage([module], autocast=torch.bfloat16)
    trained(mixed_stage, x, y, 2)
    assert set(dtypes) == {torch.bfloat16}
    assert module.weight.grad.dtype == torch.float32


def test_a_scaled_loss_is_reported_as_it_is():
    """Gradients are scaled, whichever way a micro-batch goes."""
    x, y = data()
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(one.state_dict())
    plain, scaled = stage([one]), stage([other])
    scaled.loss_scale = 4.0
    assert trained(plain, x, y) == trained(scaled, x, y)
    torch.testing.assert_close(other.weight.grad, 4 * one.weight.grad)


class Drawing(nn.Module):
    """A layer of the user that draws random numbers."""

    def forward(self, value):
        """Add them."""
        return value + torch.rand_like(value)


class Past(nn.Module):
    """A layer that passes on the sum of the values so far."""

    def forward_slice(self, value, past):
        """Add what came before."""
        total = value.sum() if past is None else past + value.sum()
        return value + total, total

    def forward(self, value):
        """Run on a whole sequence."""
        return value * 10


def layers_of(*modules, **options):
    """Return layers 3, 4 and so on of a chain, with the names a, b and so on."""
    entries = [StageLayer(3 + n, "abcdefghi"[n], module) for n, module in enumerate(modules)]
    return StageLayers(entries, CPU, 0, **options)


class Batch(SimpleNamespace):
    """A batch, which is known by a weak reference."""


def batch_of(*, cuts_tokens=False, training=True):
    """Return a batch of one micro-batch."""
    inputs = [torch.ones(2)]
    return Batch(step=0, training=training, inputs=inputs, cuts_tokens=cuts_tokens)


@pytest.mark.parametrize("cuts_tokens", [False, True])
@pytest.mark.parametrize("others", [(), (nn.Dropout(0.0),)])
def test_layers_pass_on_state_only_where_sequences_are_cut(cuts_tokens, others):
    """By their index and name in the chain, from the state of the slices before. From batch 3 on
    some are not observed for random numbers.
    """
    stage_layers = layers_of(nn.Identity(), Past(), *others)
    for incoming in ({}, {4: torch.tensor(5.0)}, {}, {4: torch.tensor(5.0)}):
        state = SliceState(incoming)
        output = stage_layers.run(batch_of(cuts_tokens=cuts_tokens), 0, torch.ones(2), state)
        if not cuts_tokens:
            assert output.tolist() == [10, 10]
            assert state.outgoing == {}
            continue
        total = 2 + (5 if incoming else 0)
        assert output.tolist() == [1 + total] * 2
        assert {index: float(value) for index, value in state.outgoing.items()} == {4: total}
        assert {name for name, *_ in state._versions} == {"b"}


def test_entry_layers_and_exit_run_in_this_order():
    """Also where nothing draws, nothing is cut and nothing runs again."""
    order = []

    class Noted(nn.Module):
        """A module that notes its calls."""

        def __init__(self, name):
            super().__init__()
            self.name = [name]

        def forward(self, value, inputs=None):
            """Note the call."""
            order.append(self.name[0] if inputs is None else (self.name[0], inputs.tolist()))
            return value

    def end(value):
        order.append("exit")
        return value + 1

    for options in ({"recomputed": frozenset({4})}, {}):
        stage_layers = layers_of(Noted("a"), Noted("b"), entry=Noted("entry"), exit=end, **options)
        assert [type(module) for module in stage_layers.modules()] == [Noted] * 3
        assert next(stage_layers.modules()).name == ["entry"]
        for training in (True, True, False):
            order.clear()
            batch = batch_of(training=training)
            assert stage_layers.run(batch, 0, torch.zeros(2), SliceState()).tolist() == [1, 1]
            assert order == [("entry", [1.0, 1.0]), "a", "b", "exit"]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_saved_tensors_are_offloaded_in_training_alone(monkeypatch, share):
    """All but weights and buffers, those of the entry included."""
    calls = []

    @contextmanager
    def noting(weights, share):
        calls.append((weights, share))
        yield

    monkeypatch.setattr(stage_layers_module, "offloading", noting)
    layer, entry = nn.BatchNorm1d(2), Scale()
    entry.weight = nn.Parameter(torch.ones(3))
    layer.register_buffer("sparse", torch.eye(2).to_sparse())
    layer.register_buffer("view", torch.ones(4)[2:])
    stage_layers = layers_of(layer, entry=entry, offload=share)
    stage_layers.run(batch_of(), 0, torch.ones(2, 2), SliceState())
    with torch.no_grad():
        stage_layers.run(batch_of(training=False), 0, torch.ones(2, 2), SliceState())
    tensors = [entry.weight, *layer.parameters(), *layer.buffers()]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_sparse}
    assert calls == [(addresses, share)]
    layers_of(layer).run(batch_of(), 0, torch.ones(2, 2), SliceState())
    assert len(calls) == 1
    layers_of(nn.Linear(2, 2), offload=share).run(batch_of(), 0, torch.ones(2, 2), SliceState())
    assert len(calls) == 2, "also where nothing but the layers runs"


@pytest.mark.parametrize("recomputed", [frozenset(), frozenset({4})])
def test_neighbours_are_compiled_as_one_function_unless_they_draw_or_pass_on_state(
    monkeypatch, recomputed
):
    """Dropout is apart whatever its rate, which may rise later. Layers that run again are apart."""
    compiled, resets = [], []

    def compile_module(module, **options):
        assert options == {"backend": "one"}
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_module)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    modules = [
        nn.Linear(2, 2),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Tanh(),
        Past(),
        nn.Linear(2, 2),
        nn.Sigmoid(),
        nn.Tanh(),
        Drawing(),
    ]
    stage_layers = layers_of(*modules, compile={"backend": "one"}, recomputed=recomputed)
    parts = [(part.index, part.name, part.slice_state) for part in stage_layers._parts]
    if recomputed:
        assert [name for _, name, _ in parts] == list("abcdefghi")
        assert compiled == modules
        assert [index for index, *_ in parts] == [*range(3, 12)]
    else:
        assert parts == [
            (3, "a + b", False),
            (5, "c", False),
            (6, "d", False),
            (7, "e", True),
            (8, "f + g + h", False),
            (11, "i", False),
        ]
        assert [*compiled[0]] == modules[:2]
        assert compiled[1:4] == modules[2:5]
        assert [*compiled[4]] == modules[5:8]
        assert compiled[5] is modules[8]
        assert stage_layers.draws._joined == {3: "a + b", 8: "f + g + h"}
    count = len(compiled)
    assert resets == []
    stage_layers.renew()
    assert (len(compiled), resets) == (2 * count, [1])
    layers_of(*modules).renew()
    assert resets == [1]


@pytest.mark.parametrize("options", [None, {"backend": "one"}])
def test_no_backward_of_compiled_layers_is_observed(monkeypatch, options):
    """Dispatch modes must not be entered around compiled code."""
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    stage_layers = layers_of(Past(), compile=options)
    stage_layers.run(batch_of(), 0, torch.ones(2), SliceState())
    assert stage_layers.draws.watches_backward is (options is None)


@pytest.mark.parametrize("fails", [False, True])
def test_all_modules_are_evaluated_and_then_have_their_own_modes_again(fails):
    """Those of the entry and those inside layers, too; a user may keep some in evaluation mode."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    entry = nn.Sequential(nn.BatchNorm1d(2))
    stage_layers = layers_of(inner, nn.Tanh(), entry=entry)
    inner[1].training = entry[0].training = False
    modes = [module.training for module in stage_layers.modules()]
    assert modes.count(False) == 2
    try:
        with stage_layers.evaluation_mode():
            assert not any(module.training for module in stage_layers.modules())
            inner[1].training = True
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [module.training for module in stage_layers.modules()] == modes


@pytest.mark.parametrize(
    ("recomputed", "starts", "order"),
    [
        ({3, 4}, set(), "ab"),
        ({3, 4}, {4}, "ba"),
        ({3, 4, 5}, {5}, "cab"),
        ({3, 4, 5}, {3, 4, 5}, "cba"),
    ],
)
def test_recomputed_neighbours_run_again_in_the_segments_that_are_given(recomputed, starts, order):
    """A segment runs again as a whole, the last one first."""
    calls = []
    modules = [nn.Sequential(nn.Tanh(), nn.Tanh()) for _ in range(3)]
    for name, module in zip("abc", modules, strict=True):
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    options = {"recomputed": frozenset(recomputed), "segment_starts": frozenset(starts)}
    x = torch.ones(2, requires_grad=True)
    output = layers_of(*modules, **options).run(batch_of(), 0, x, SliceState())
    assert calls == ["a", "b", "c"]
    calls.clear()
    output.sum().backward()
    assert "".join(calls) == order


def test_comparisons_of_recomputed_layers_are_read_with_the_other_checks_of_the_stage(monkeypatch):
    """The host does not wait for each."""
    calls = []
    monkeypatch.setattr(stage_layers_module, "Recomputing", lambda *args: calls.append(args))
    recomputed, starts = frozenset({3, 4}), frozenset({4})
    stage_layers = layers_of(nn.Tanh(), nn.Tanh(), recomputed=recomputed, segment_starts=starts)
    assert calls == [(stage_layers._parts, recomputed, starts, stage_layers.checks)]
