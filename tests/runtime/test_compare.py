"""The self-check: what it compares, what it leaves alone, and how it prints."""

from __future__ import annotations

import math

import pytest
import torch
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import differences, gradients, layers_of
from tests.runtime.jobs import sgd
from torch import nn

import penstock as ps
from penstock.runtime.compare import Comparison
from penstock.runtime.stage import Stage
from penstock.tracing.side_loss import side_loss


def pipeline(name="mlp", stages=3, **options):
    """The case's pipeline with its data."""
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
    """Dropout and batch norm in training mode: what the loss was computed from."""
    pipe, _, x, y = pipeline("vgg")
    found = pipe.compare_with_one_device(x, y)
    assert found.outputs == {"output": 0.0}
    assert found.scale["output output"] > 0


def test_a_wrong_output_is_found_though_the_loss_may_be_right(monkeypatch):
    """A loss is one number; two wrongs can make it right."""
    pipe, _, x, y = pipeline()
    right = Stage.forward

    def wrong(self, batch, micro_batch, arrived):
        made = right(self, batch, micro_batch, arrived)
        if self.loss is not None and micro_batch == 3:
            batch.outputs[micro_batch][0, 0] += 0.5
        return made

    monkeypatch.setattr(Stage, "forward", wrong)
    found = pipe.compare_with_one_device(x, y)
    assert found.worst == ("output", pytest.approx(0.5))
    assert found.loss <= 1e-6


def test_gradients_buffers_random_state_scaler_and_norm_are_left_as_they_were():
    """It may be called in the middle of a run, and in the middle of a window of accumulation."""
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


class Penalised(nn.Linear):
    """Has a loss of its own, as a mixture of experts does."""

    def forward(self, x):
        """Run the layer."""
        out = super().forward(x)
        side_loss(out.square().mean() * 0.1)
        return out


def test_side_losses_of_inner_stages_count_on_both_sides():
    """On the one device they are collected as the stages collect them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Penalised(6, 6), nn.Tanh(), nn.Linear(6, 6))
    pipe = ps.Pipeline(
        model, loss=nn.MSELoss(), balance=[1, 1, 2], micro_batches=3, executor="threads"
    )
    x = torch.randn(9, 6)
    assert pipe.compare_with_one_device(x, x).relative < 1e-5


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_the_one_device_has_the_same_mixed_precision(autocast):
    """Else its rounding would be all that is seen."""
    pipe, _, x, y = pipeline("gpt", autocast=autocast)
    assert pipe.compare_with_one_device(x, y).relative < 1e-3


def test_a_comparison_prints_the_worst_of_each_kind_first():
    """Who looks wants to know whether, where, and how much."""
    gradients = {f"layer{n}.weight": n * 1e-9 for n in range(12)}
    scale = dict.fromkeys(gradients, 1.0) | {
        "loss": 2.0,
        "buffer norm.running_mean": 0.5,
        "output output": 4.0,
    }
    found = Comparison(gradients, {"norm.running_mean": 0.25}, 1e-7, scale, {"output": 0.0})
    assert found.relative == 0.5
    assert str(found).splitlines() == [
        "pipeline against one device: 12 gradients, 1 buffer, 1 output and the loss; largest difference 0.5 of what it is of",
        "  loss      loss               differs by 1.00e-07, 5.0e-08 of it",
        "  output    output             differs by 0.00e+00, 0.0e+00 of it",
        *[
            f"  gradient  layer{n}.weight{' ' * (6 - (n > 9))}differs by {n * 1e-9:.2e}, {n * 1e-9:.1e} of it"
            for n in range(11, 3, -1)
        ],
        "  buffer    norm.running_mean  differs by 2.50e-01, 5.0e-01 of it",
        "  and 4 more, none of which differs more than the last of its kind",
    ]
    assert str(Comparison()) == "nothing was compared here: rank 0 has the comparison"


def test_a_difference_of_next_to_nothing_is_held_against_the_others_of_its_kind():
    """Biases before a softmax have gradients of rounding errors alone: any other order of sums
    changes them by all they are.
    """
    found = Comparison(
        {"a": 1e-9, "b": 0.0}, {}, 0.0, {"a": 1e-9, "b": 1.0, "loss": 1.0}, {"output": 0.0}
    )
    assert found.relative == pytest.approx(1e-6)


def test_what_is_no_number_on_one_side_alone_differs_without_end():
    """A comparison with NaN is never true, so it must not decide."""

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
    assert math.isinf(pipe.compare_with_one_device(torch.ones(4, 2), torch.ones(4, 2)).relative)


def test_equal_numbers_that_are_none_are_no_difference():
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


class Centred(nn.Module):
    """Samples see each other."""

    def forward(self, x):
        """Subtract the mean over the samples."""
        return x - x.mean(0)


def of(*layers, **options):
    """A pipeline over layers of the test, and a batch for it."""
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
    """The same micro-batches on one device have the same mistake, if it is one of dividing."""
    found = of(nn.Tanh())
    assert found.relative < 1e-5
    assert found.whole.agrees
    assert set(found.whole.gradients) == set(found.gradients)
    assert "with the undivided batch: largest relative difference" in str(found).splitlines()[-1]


def test_a_model_whose_samples_see_each_other_differs_from_the_undivided_batch_alone():
    """Nothing that is known excuses it, and the text says what to think of."""
    found = of(Centred())
    assert found.relative < 1e-4
    assert not found.whole.agrees
    assert found.whole.causes == ()
    assert "either a layer mixes samples, or the loss" in str(found)


@pytest.mark.parametrize(
    ("layer", "cause"),
    [(nn.BatchNorm1d(6), "batch normalisation"), (nn.Dropout(0.5), "draw random numbers")],
)
def test_what_differs_by_design_is_named(layer, cause):
    """Batch normalisation and dropout go by micro-batch."""
    found = of(layer)
    assert found.relative < 1e-4
    assert not found.whole.agrees
    assert cause in " ".join(found.whole.causes)
    assert cause in str(found)


def test_a_wrong_loss_weight_is_seen_against_the_undivided_batch():
    """It is taken as it is; both sides of the other comparison have it."""
    found = of(nn.Tanh(), loss_weight=lambda target: 1.0 + float(target[0, 0] > 0))
    assert found.relative < 1e-5
    assert not found.whole.agrees
    assert "see loss_weight=" in str(found)


def test_hooks_on_weights_run_on_the_one_device_too():
    """Its copy of the model had lost them, and a sound pipeline was said to be 97 % off."""
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda grad: grad * 0.03)
    found = of(layer)
    assert found.relative < 1e-5
    assert found.whole.agrees
    layer.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    found = of(layer)
    assert found.relative < 1e-5
    assert "hooks on weights" in " ".join(found.whole.causes)


def test_a_model_that_does_not_fit_the_device_is_refused_with_a_way_out(monkeypatch):
    """The comparison needs the whole model on one device, which a pipeline may be there to avoid."""
    pipe, _, x, y = pipeline()

    def full(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB.")

    monkeypatch.setattr("penstock.runtime.compare.reference_model", full)
    with pytest.raises(
        ps.PenstockError, match=r"needs the whole model.*on cpu.*20 GiB.*smaller batch"
    ):
        pipe.compare_with_one_device(x, y)
