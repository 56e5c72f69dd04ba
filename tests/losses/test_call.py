"""Calls of a loss: its device, its random numbers, and copies that keep its state."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.batches.batch import make_batch
from penstock.errors import SettingError
from penstock.losses.call import LossCall, is_torchs_loss, on_device, one_number

CPU = torch.device("cpu")


class Counting(nn.Module):
    """A loss with state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, output, target):
        self.calls += 1
        self.mean += 1
        return (output - target).mean()


class Own(nn.MSELoss):
    """A loss that derives from torch's."""


def mse_loss(output, target):
    """A function of a user with a name of torch's."""
    return functional.mse_loss(output, target) * 2


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (functional.mse_loss, True),
        (functools.partial(functional.cross_entropy, ignore_index=0), True),
        (functools.partial(functools.partial(functional.l1_loss), reduction="sum"), True),
        (nn.CrossEntropyLoss(), True),
        (Own(), False),
        (Counting(), False),
        (mse_loss, False),
        (functional.dropout, False),
        (lambda x, y: x, False),
        (functools.partial(mse_loss), False),
    ],
)
def test_losses_of_torch_are_known_by_themselves_and_not_by_name(loss, expected):
    """They draw nothing, and no sample sees another."""
    assert is_torchs_loss(loss) is expected
    assert LossCall(loss, CPU).draws is not expected


def test_all_losses_of_torchs_functional_module_are_known_and_nothing_else():
    """Functions with a reduction, but those that take weights or a function of the caller."""
    others = {"linear_cross_entropy", "triplet_margin_with_distance_loss"}
    losses = set()
    for name, function in inspect.getmembers(functional, inspect.isfunction):
        if "reduction" in inspect.signature(function).parameters:
            losses.add(name)
    assert {name for name in dir(functional) if is_torchs_loss(getattr(functional, name))} == (
        losses - others
    )


def test_random_numbers_are_those_of_step_and_micro_batch():
    """And of the seed; the generator of the caller does not move."""

    def drawn(output, target):
        return torch.rand(())

    batches = [
        make_batch(torch.ones(4), torch.ones(4), 2, step=step, training=True) for step in (0, 1)
    ]
    before = torch.get_rng_state()
    draws = {}
    for seed in (0, 1):
        call = LossCall(drawn, CPU, seed)
        for batch in batches:
            for number in (0, 1, -1):
                draws[seed, batch.step, number] = float(call(batch, number, None, None))
    assert len(set(draws.values())) == 12
    again = LossCall(drawn, CPU, 1)
    assert float(again(batches[1], 1, None, None)) == draws[1, 1, 1]
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_without_effect_has_a_copy_of_the_state():
    """A loss of torch has none; what cannot be copied is called as it is."""
    counting = Counting()
    call = LossCall(counting, CPU)
    copy = call.untouched()
    copy(torch.ones(2), torch.zeros(2))
    assert (copy.calls, counting.calls, counting.mean.item()) == (1, 0, 0.0)
    plain = nn.MSELoss()
    assert LossCall(plain, CPU).untouched() is plain
    counting.lock = (number for number in ())
    assert call.untouched() is counting


def test_a_compiled_loss_is_evaluated_as_it_was_before():
    """A module or a function: torch.compile marks what it has compiled."""
    module = Counting()
    compiled = nn.Module()
    compiled.add_module("_orig_mod", module)
    copied = LossCall(compiled, CPU).untouched()
    assert (type(copied), copied is module) == (Counting, False)

    def function(output, target):
        return mse_loss(output, target)

    function._torchdynamo_orig_callable = mse_loss
    assert LossCall(function, CPU).untouched() is mse_loss


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduction", "sum"),
        ("ignore_index", 3),
        ("weight", torch.ones(3)),
        ("label_smoothing", 0.1),
    ],
)
def test_settings_differ_after_a_change_of_any_option(name, value):
    """Also of class weights in place. A function has none."""
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    call = LossCall(loss, CPU)
    before = call.settings()
    assert call.settings() == before
    setattr(loss, name, value)
    assert call.settings() != before
    before = call.settings()
    loss.weight.mul_(2)
    assert call.settings() != before
    with torch.inference_mode():
        loss.weight = torch.ones(3)
    assert call.settings() != before
    assert LossCall(mse_loss, CPU).settings() is None


def test_targets_are_those_of_the_micro_batch_and_not_read_from_the_host_on_the_cpu():
    """Nested ones as well."""
    y = {"a": torch.arange(5.0), "b": [torch.arange(5)]}
    batch = make_batch(torch.ones(5), y, 2, step=0, training=True)
    call = LossCall(mse_loss, CPU)
    second = call.target(batch, 1)
    assert (second["a"].tolist(), second["b"][0].tolist()) == ([3.0, 4.0], [3, 4])
    assert call.whole_target(batch)["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert call.host_target(batch, 1) is None


def test_targets_in_host_memory_serve_a_loss_on_a_device_until_it_has_refused_them():
    """Only if all of them are there."""
    y = {"a": torch.arange(5.0), "b": torch.arange(5)}
    batch = make_batch(torch.ones(5), y, 2, step=0, training=True)
    call = LossCall(mse_loss, CPU)
    call._on_host = False
    assert call.host_target(batch, 1)["a"].tolist() == [3.0, 4.0]
    assert call.host_target(batch, None)["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    batch.targets[1]["b"] = batch.targets[1]["b"].to("meta")
    assert call.host_target(batch, 1) is None
    assert call.host_target(batch, 0) is not None
    call.reads_host_targets = False
    assert call.host_target(batch, 0) is None


def test_tensors_of_a_loss_are_moved_and_the_callers_stay():
    """Buffers and parameters of modules, arguments of partials, and both within each other."""
    meta = torch.device("meta")
    module = Counting()
    assert on_device(module, CPU) is module
    moved = on_device(module, meta)
    assert (moved.mean.device, module.mean.device) == (meta, CPU)
    weight = torch.ones(2)
    partial = functools.partial(functools.partial(module, 1), [weight], weight=weight, n=3)
    moved = on_device(partial, meta)
    assert moved.keywords["weight"].device == meta
    assert moved.keywords["n"] == 3
    assert moved.args[-1][0].device == meta
    assert moved.func.mean.device == meta
    assert (weight.device, module.mean.device) == (CPU, CPU)
    assert on_device(mse_loss, meta) is mse_loss


def test_a_loss_is_one_number_of_any_shape():
    """Others are refused with their shape or type; a number of Python has no gradient."""
    for shape in ((), (1,), (1, 1)):
        assert one_number(torch.full(shape, 3.0)).shape == ()
    for loss, words in (
        (torch.ones(2, 1), r"\(2, 1\)$"),
        (3.0, "float, which has no gradient. Return the tensor itself"),
        (torch.ones(0), r"\(0,\)$"),
    ):
        with pytest.raises(SettingError, match=f"this one is {words}"):
            one_number(loss)


def test_a_loss_of_torch_uses_parameters_only_if_a_tensor_of_its_own_is_trained():
    """Of all others it is not known. Weights of classes may be thawed at any time."""
    weight = torch.ones(3)
    module = nn.BCEWithLogitsLoss(pos_weight=weight)
    partial = functools.partial(functional.cross_entropy, weight=weight)
    calls = [LossCall(loss, CPU) for loss in (nn.MSELoss(), functional.mse_loss, module, partial)]
    assert [call.may_use_parameters for call in calls] == [False] * 4
    weight.requires_grad_()
    assert [call.may_use_parameters for call in calls] == [False, False, True, True]
    module.pos_weight = nn.Parameter(torch.ones(3), requires_grad=False)
    assert not calls[2].may_use_parameters
    module.pos_weight.requires_grad_()
    assert calls[2].may_use_parameters
    nested = functools.partial(functools.partial(functional.cross_entropy, weight=weight))
    assert LossCall(nested, CPU).may_use_parameters
    assert LossCall(mse_loss, CPU).may_use_parameters
