"""The self-check: what it compares, that it changes nothing, and how it prints."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import differences, gradients, layers_of
from tests.runtime.jobs import sgd
from torch import nn

import penstock as ps
from penstock.modules.side_loss import side_loss
from penstock.runtime.comparison import one_device_comparison
from penstock.runtime.comparison.undivided_batch import COARSE_TOLERANCE, SIDES, TOLERANCE
from penstock.stage.stage import Stage


def pipeline(name="mlp", stages=3, **options):
    """Return the pipeline of the case, its model and its data."""
    case = CASES[name]
    model, x, y = made(case)
    options.setdefault("micro_batches", 4)
    balance = lengths_of(len(layers_of(model)), stages)
    return (
        ps.Pipeline(model, loss=case.loss, balance=balance, executor="threads", **options),
        model,
        x,
        y,
    )


def test_outputs_are_those_of_the_training_forward():
    """The outputs are those that the loss was computed from, with dropout and batch norm in
    training mode.
    """
    pipe, _, x, y = pipeline("vgg")
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.outputs == {"output": 0.0}
    assert comparison.scale["output output"] > 0


def test_a_wrong_output_is_found_though_the_loss_may_be_right(monkeypatch):
    """A loss is one number, and two errors can cancel in it."""
    pipe, _, x, y = pipeline()
    right = Stage.forward

    def wrong(self, batch, micro_batch, arrived):
        output = right(self, batch, micro_batch, arrived)
        if self.loss is not None and micro_batch == 3:
            batch.outputs[micro_batch][0, 0] += 0.5
        return output

    monkeypatch.setattr(Stage, "forward", wrong)
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.worst == ("output", pytest.approx(0.5))
    assert comparison.loss <= 1e-6


def test_gradients_buffers_random_state_scaler_and_norm_are_left_as_they_were():
    """The check may be called in the middle of a run, and while gradients are being accumulated."""
    options = {
        "optimizer": sgd,
        "accumulate": 2,
        "clip_grad_norm": 1.0,
        "scaler": {"growth_interval": 1},
    }
    pipe, model, x, y = pipeline("resnet", **options)
    other, undisturbed, _, _ = pipeline("resnet", **options)
    for number in range(5):
        pipe.train_batch(x, y)
        other.train_batch(x, y)
        before = torch.get_rng_state(), pipe.loss_scale, pipe.grad_norm, pipe.skipped, pipe.step
        assert pipe.compare_with_one_device(x + number, y).relative < 1e-5
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (pipe.loss_scale, pipe.grad_norm, pipe.skipped, pipe.step) == before[1:]
        assert differences(gradients(model), gradients(undisturbed)) == []
        assert differences(dict(model.state_dict()), dict(undisturbed.state_dict())) == []


def test_gradients_and_scales_of_all_stages_come_back_after_an_error():
    """Also the gradients of parameters that a stage holds for another one."""
    trained, borrowed = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    trained.grad, borrowed.grad = torch.full((1,), 2.0), torch.full((1,), 3.0)
    update = SimpleNamespace(parameters=[trained], borrowed=[borrowed])
    stage = SimpleNamespace(update=update, loss_scale=4.0)
    empty = SimpleNamespace(update=SimpleNamespace(parameters=[], borrowed=[]), loss_scale=5.0)
    grads = trained.grad, borrowed.grad

    def fail():
        assert (trained.grad, borrowed.grad, stage.loss_scale) == (None, None, 1.0)
        trained.grad = torch.zeros(1)
        raise KeyError

    with (
        pytest.raises(KeyError),
        one_device_comparison._unchanged_gradients(SimpleNamespace(stages=[empty, stage])),
    ):
        fail()
    assert (trained.grad, borrowed.grad) == grads
    assert (stage.loss_scale, empty.loss_scale) == (4.0, 5.0)


def test_buffers_come_back_after_an_error():
    """Those of all stages, such as running statistics."""
    layers = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    pipe = ps.Pipeline(
        layers, loss=nn.functional.mse_loss, balance=[1, 1], micro_batches=2, executor="threads"
    )
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    play = pipe._player.play

    def fail(*args):
        play(*args)
        assert differences(pipe.state_dict(), before) != []
        raise KeyError

    pipe._player.play = fail
    with pytest.raises(KeyError):
        pipe.compare_with_one_device(torch.randn(4, 2), torch.randn(4, 2))
    assert differences(pipe.state_dict(), before) == []


class Penalised(nn.Linear):
    """A layer with a side loss, as in a mixture of experts."""

    def forward(self, x):
        """Run the layer."""
        out = super().forward(x)
        side_loss(out.square().mean() * 0.1)
        return out


def test_side_losses_of_inner_stages_count_on_both_sides():
    """The one device collects them as the stages do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Penalised(6, 6), nn.Tanh(), nn.Linear(6, 6))
    pipe = ps.Pipeline(
        model, loss=nn.MSELoss(), balance=[1, 1, 2], micro_batches=3, executor="threads"
    )
    x = torch.randn(9, 6)
    comparison = pipe.compare_with_one_device(x, x)
    assert comparison.relative < 1e-5
    assert comparison.whole.causes == (SIDES,)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_the_one_device_has_the_same_mixed_precision(autocast):
    """Otherwise the check would only see the rounding."""
    pipe, _, x, y = pipeline("gpt", autocast=autocast)
    comparison = pipe.compare_with_one_device(x, y)
    assert comparison.relative < 1e-3
    assert comparison.whole.tolerance == COARSE_TOLERANCE


def test_nan_on_one_side_alone_is_an_infinite_difference():
    """Comparisons with NaN are false, so the result must not depend on one."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.batches = nn.Parameter(torch.ones(2)), 0

        def forward(self, x):
            self.batches += 1
            return x * self.gain if self.batches > 2 else x * self.gain * float("nan")

    pipe = ps.Pipeline(
        [nn.Linear(2, 2), Odd()],
        loss=lambda out, _: out.mean(),
        balance=[1, 1],
        micro_batches=2,
        executor="threads",
    )
    comparison = pipe.compare_with_one_device(torch.ones(4, 2), torch.ones(4, 2))
    assert math.isinf(comparison.relative)
    assert math.isfinite(comparison.scale["loss"]), "scales are those of the one device"


def test_equal_infinities_and_nan_are_no_difference():
    """Masked scores are minus infinity on both sides."""

    class Masked(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.ones_like(x).triu(1).bool(), float("-inf"))

    model = [nn.Linear(3, 3), Masked()]
    pipe = ps.Pipeline(
        model,
        loss=lambda out, _: out[:, 0].mean(),
        balance=[1, 1],
        micro_batches=1,
        executor="threads",
    )
    assert pipe.compare_with_one_device(torch.randn(3, 3), torch.ones(3, 3)).relative < 1e-6


class Masking(nn.Module):
    """A layer with a mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))

    def forward(self, x):
        """Apply the mask."""
        return x * self.mask


class Centred(nn.Module):
    """A layer whose output for a sample depends on the other samples."""

    def forward(self, x):
        """Subtract the mean over the samples."""
        return x - x.mean(0)


def of(*layers, **options):
    """Compare a pipeline over the given layers with one device, on a batch for them."""
    torch.manual_seed(0)
    options.setdefault("loss", nn.MSELoss())
    pipe = ps.Pipeline(
        [nn.Linear(6, 6), *layers, nn.Linear(6, 3)],
        balance=[2, len(layers)],
        micro_batches=3,
        executor="threads",
        **options,
    )
    return pipe.compare_with_one_device(torch.randn(7, 6), torch.randn(7, 3))


def test_the_undivided_batch_is_compared_too():
    """An error in the division into micro-batches would be the same on one device with micro-
    batches.
    """
    comparison = of(nn.Tanh())
    assert comparison.relative < 1e-5
    assert comparison.whole.agrees
    assert comparison.whole.tolerance == TOLERANCE
    assert set(comparison.whole.gradients) == set(comparison.gradients)
    assert (
        "with the undivided batch: largest relative difference" in str(comparison).splitlines()[-1]
    )


def test_a_model_with_a_mask_of_bool_is_compared():
    """Masks of attention are such buffers, and torch has no absolute values of bool."""
    comparison = of(Masking())
    assert comparison.buffers == {"1.mask": 0.0}
    assert comparison.relative < 1e-5


def test_tied_weights_are_no_buffers():
    """The state has them under both names, and under one of these they have no gradient."""
    tied = nn.Linear(6, 6)
    layer = nn.Linear(6, 6)
    layer.weight = tied.weight
    comparison = of(tied, nn.Tanh(), layer)
    assert comparison.buffers == {}
    assert "1.weight" in comparison.gradients
    assert not {"3.weight", "buffer 3.weight"} & comparison.scale.keys(), "one name is enough"
    assert comparison.relative < 1e-5


def test_a_loss_that_draws_has_the_seed_of_the_run_on_the_undivided_batch():
    """With one micro-batch the undivided batch has the same random numbers."""

    def noisy(output, target):
        return (output - target).square().mean() * torch.rand(())

    torch.manual_seed(0)
    pipe = ps.Pipeline(
        [nn.Linear(6, 6), nn.Linear(6, 3)],
        balance=[1, 1],
        micro_batches=1,
        executor="threads",
        loss=noisy,
        seed=5,
    )
    pipe.train_batch(torch.randn(7, 6), torch.randn(7, 3))  # the numbers depend on the step, too
    comparison = pipe.compare_with_one_device(torch.randn(7, 6), torch.randn(7, 3))
    assert comparison.relative < 1e-5
    assert comparison.whole.agrees


def test_a_model_that_mixes_samples_differs_from_the_undivided_batch_alone():
    """No known cause explains the difference, and the text says what may."""
    comparison = of(Centred())
    assert comparison.relative < 1e-4
    assert not comparison.whole.agrees
    assert comparison.whole.causes == ()
    assert "either a layer mixes samples, or the loss" in str(comparison)


@pytest.mark.parametrize(
    ("layer", "cause"),
    [(nn.BatchNorm1d(6), "batch normalisation"), (nn.Dropout(0.5), "draw random numbers")],
)
def test_known_causes_of_differences_are_named(layer, cause):
    """Batch normalisation and dropout depend on the micro-batch."""
    comparison = of(layer)
    assert comparison.relative < 1e-4
    assert not comparison.whole.agrees
    assert cause in " ".join(comparison.whole.causes)
    assert cause in str(comparison)


def test_a_wrong_loss_weight_differs_from_the_undivided_batch():
    """The comparison with micro-batches cannot see it, since both sides use the weight."""
    comparison = of(nn.Tanh(), loss_weight=lambda target: 1.0 + float(target[0, 0] > 0))
    assert comparison.relative < 1e-5
    assert not comparison.whole.agrees
    assert "see loss_weight=" in str(comparison)


def test_hooks_on_weights_run_on_the_one_device_too():
    """The copied model had lost them once, and a correct pipeline was reported to be 97 % off."""
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda grad: grad * 0.03)
    comparison = of(layer)
    assert comparison.relative < 1e-5
    assert comparison.whole.agrees
    layer.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    comparison = of(layer)
    assert comparison.relative < 1e-5
    assert "hooks on weights" in " ".join(comparison.whole.causes)


def test_a_model_too_large_for_the_device_is_refused_with_advice(monkeypatch):
    """The comparison needs the whole model on one device, which may be why there is a pipeline."""
    pipe, _, x, y = pipeline()

    def full(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB.")

    monkeypatch.setattr("penstock.runtime.comparison.one_device.reference_model", full)
    with pytest.raises(
        ps.PenstockError, match=r"needs the whole model.*on cpu.*20 GiB.*smaller batch"
    ):
        pipe.compare_with_one_device(x, y)
