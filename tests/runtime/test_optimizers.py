"""Optimizers and parameters: trained to the same numbers as in plain PyTorch, or refused before."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from tests.runtime.against_plain import (
    SCHEDULES,
    adamw,
    batch,
    furthest,
    model,
    pipeline,
    plain_step,
    same_state,
    sgd,
)
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import penstock as ps
from penstock.errors import SettingError

INF = float("inf")


def test_an_optimizer_over_all_of_the_model_or_one_for_all_stages_is_refused():
    """Each stage's step would step all weights: they were 73 % off after four steps."""
    network = model()
    with pytest.raises(
        SettingError, match=r"called with the 2 parameters of stage 0 and returned SGD"
    ):
        pipeline(network, optimizer=lambda params: sgd(network.parameters()))
    optimizers = []

    def cached(params):
        optimizers.append(sgd(params))
        return optimizers[0]

    with pytest.raises(SettingError, match=r"2 parameters of stage 1 .* not one optimizer for all"):
        pipeline(network, optimizer=cached)


def test_an_optimizer_in_place_of_a_factory_is_refused_with_what_to_write():
    """The error once was that an SGD object is not callable."""
    network = model()
    with pytest.raises(
        SettingError, match=r"Write optimizer=lambda params: torch\.optim\.SGD\(params"
    ):
        pipeline(network, optimizer=sgd(network.parameters()))


@pytest.mark.parametrize(
    "factory",
    [torch.optim.Adagrad, functools.partial(torch.optim.Adam, lr=0.01), adamw],
    ids=["class", "partial", "function"],
)
def test_classes_partials_and_functions_are_factories(factory):
    """These are the forms that users write."""
    network, plain = model(), model()
    pipe, optimizer = pipeline(network, optimizer=factory), factory(plain.parameters())
    for number in range(3):
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    assert furthest(network, plain) < 1e-12


def test_parameters_that_a_factory_leaves_out_are_not_trained():
    """As in plain PyTorch. A stage may have none of the chosen ones, which version 0.1 refused."""
    network, plain = model(), model()
    only = [network[2].weight, network[6].weight]

    def chosen(params):
        return sgd([p for p in params if any(p is parameter for parameter in only)])

    pipe = pipeline(network, optimizer=chosen)
    optimizer = sgd([plain[2].weight, plain[6].weight])
    scheduler = pipe.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))
    reference = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(4):
        pipe.train_batch(*batch(number))
        plain.zero_grad()
        plain_step(plain, optimizer, number)
        scheduler.step()
        reference.step()
    assert furthest(network, plain) < 1e-12
    assert scheduler.get_last_lr() == reference.get_last_lr()
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())


def test_a_factory_that_chooses_by_identity_is_refused_where_stages_have_copies():
    """The copies have parameters of their own, which would silently be left out."""
    network = model()
    only = [network[2].weight, network[6].weight]

    def chosen(params):
        return sgd([p for p in params if any(p is parameter for parameter in only)])

    with pytest.raises(SettingError, match=r"for one copy of stage 1 than for another.* p\.ndim"):
        pipeline(network, optimizer=chosen, schedule="chimera")
    pipeline(
        network, optimizer=lambda params: sgd([p for p in params if p.ndim > 1]), schedule="chimera"
    )


def test_a_gradient_that_is_nan_on_another_rank_is_in_the_norm():
    """A norm without it would hide what the clipped weights become: torch's own is NaN, too."""
    network = model()
    pipe = pipeline(network, clip_grad_norm=0.05, on_nonfinite="warn")
    network[6].weight.register_hook(lambda grad: torch.full_like(grad, float("nan")))
    pipe.train_batch(*batch())
    assert math.isnan(pipe.grad_norm)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_value": 0.01},
        *({"clip_grad_norm": 0.05, "clip_norm_type": n} for n in (1, 3.0, INF)),
    ],
    ids=["value", "norm 1", "norm 3", "infinite norm"],
)
def test_clipping_by_value_and_other_norms_is_torchs_own(options, schedule, tied):
    """Clipping is over all stages, after replicas and tied weights have been summed, and once for
    each step.
    """
    network, plain = model(tied), model(tied)
    pipe = pipeline(network, schedule=schedule, accumulate=2, **options)
    optimizer = sgd(plain.parameters())
    for number in range(6):
        x, y = batch(number)
        pipe.train_batch(x, y)
        (functional.cross_entropy(plain(x), y) / 2).backward()
        if number % 2:
            if "clip_grad_value" in options:
                torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            else:
                norm = torch.nn.utils.clip_grad_norm_(
                    plain.parameters(), 0.05, options["clip_norm_type"]
                )
                assert pipe.grad_norm == pytest.approx(float(norm), rel=1e-12)
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(network, plain) < 1e-12


@pytest.mark.parametrize(
    "options", [{"clip_grad_value": 0.01}, {"clip_grad_norm": 0.01, "clip_norm_type": INF}]
)
def test_scaled_gradients_are_clipped_after_they_are_unscaled(options):
    """Otherwise nearly all of them would be at the limit."""
    network, plain = model().float(), model().float()
    scaling = {"init_scale": 1024.0, "growth_interval": 2}
    pipe = pipeline(network, scaler=scaling, **options)
    optimizer, scaler = sgd(plain.parameters()), torch.amp.GradScaler("cpu", **scaling)
    for number in range(4):
        x, y = batch(number)
        pipe.train_batch(x.float(), y)
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(plain(x.float()), y)).backward()
        scaler.unscale_(optimizer)
        if "clip_grad_value" in options:
            torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        else:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, INF)
        scaler.step(optimizer)
        scaler.update()
    assert furthest(network, plain) < 1e-5


def test_sparse_gradients_are_clipped_by_value():
    """Each row of an embedding's gradient counts once."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(12, 4))
    plain = copy.deepcopy(network)
    plain[0].sparse = False
    x, y = torch.randint(9, (8, 2), generator=torch.Generator().manual_seed(1)), batch()[1]
    pipe = ps.Pipeline(
        network,
        loss=functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        balance=[1, 2],
        micro_batches=2,
        executor="threads",
        clip_grad_value=0.01,
    )
    pipe.train_batch(x, y)
    functional.cross_entropy(plain(x), y).backward()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert furthest(network, plain) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clip_grad_value": 0.0},
            r"clip_grad_value is the largest absolute value .*above 0, not 0\.0",
        ),
        ({"clip_grad_norm": 1.0, "clip_norm_type": "max"}, r"clip_norm_type .* not 'max'"),
        ({"clip_norm_type": 1.0}, r"is an option of clip_grad_norm=, which is not given"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, r"give one of them"),
        (
            {"clip_grad_value": 1.0, "optimizer": None},
            r"clip_grad_value is an option of the update",
        ),
        (
            {"clip_grad_value": 1.0, "schedule": "pipedream"},
            r"clip_grad_value: pipedream is asynchr",
        ),
    ],
)
def test_invalid_clipping_is_refused(options, message):
    """The argument is named, when the pipeline is constructed."""
    with pytest.raises(SettingError, match=message):
        pipeline(model(), **options)


def test_inputs_and_targets_that_want_a_gradient_are_refused():
    """Plain PyTorch would set x.grad, and a pipeline does not."""
    pipe = pipeline(model())
    x, y = batch()
    with pytest.raises(
        SettingError, match=r"the inputs of a batch have a tensor of shape \(8, 6\) .*detach"
    ):
        pipe.train_batch(x.clone().requires_grad_(), y)
    soft = torch.full((8, 4), 0.25, dtype=torch.float64, requires_grad=True)
    with pytest.raises(SettingError, match="the targets of a batch have a tensor"):
        pipe.train_batch(x, soft)
    pipe.eval_batch(x.clone().requires_grad_(), y)


def test_unexpected_names_are_refused_unless_they_are_to_be_skipped():
    """A prefix or an old name would otherwise silently leave the model untrained."""
    pipe = pipeline(model())
    state = {name: value + 1 for name, value in pipe.state_dict().items()}
    wrong = {**state, "8.weight": torch.ones(1)}
    del wrong["0.bias"]
    with pytest.raises(SettingError, match=r"it has no '0\.bias'; the model has no '8\.weight'"):
        pipe.load_state_dict(wrong)
    with pytest.raises(SettingError, match=r"Take 'module\.' off its names"):
        pipe.load_state_dict({f"module.{name}": value for name, value in state.items()})
    result = pipe.load_state_dict(wrong, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["8.weight"])
    assert torch.equal(pipe.state_dict()["0.weight"], state["0.weight"])
    assert not torch.equal(pipe.state_dict()["0.bias"], state["0.bias"])
    assert pipe.load_state_dict(state) == ([], [])
