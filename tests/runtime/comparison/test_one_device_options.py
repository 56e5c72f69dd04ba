"""Pipelines with options and unusual layers against plain training on one device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.modules.side_loss import side_loss
from penstock.runtime.comparison import one_device_comparison
from penstock.runtime.comparison.one_device_comparison import Comparison, compare

SHAPE = (7, 6)


def comparison_of(layers, *, loss=nn.functional.mse_loss, y=None, micro_batches=3, **options):
    """Compare the second batch of a pipeline over some layers with one device."""
    torch.manual_seed(0)
    options.setdefault("schedule", "gpipe")
    pipe = ps.Pipeline(
        layers,
        balance=[1, len(layers) - 1],
        micro_batches=micro_batches,
        loss=loss,
        executor="threads",
        **options,
    )
    x = torch.randn(SHAPE)
    y = torch.randn(SHAPE) if y is None else y
    pipe.train_batch(x, y)
    return pipe.compare_with_one_device(x, y)


class OftenSided(nn.Linear):
    """A layer with a side loss for the larger micro-batches."""

    def forward(self, x):
        """Add the mean square of the output."""
        output = super().forward(x)
        if len(x) > 2:
            side_loss(output.square().mean())
        return output


class OftenDropping(nn.Module):
    """A layer that drops values in the larger micro-batches."""

    def forward(self, x):
        """Drop some values."""
        return nn.functional.dropout(x, 0.5) if len(x) > 2 else x


def test_side_losses_and_random_numbers_of_some_micro_batches_are_noticed():
    """They are causes of differences from the undivided batch."""
    comparison = comparison_of([OftenSided(6, 6), OftenDropping(), nn.Linear(6, 6)])
    assert comparison.relative < 1e-5
    assert comparison.whole.causes == (one_device_comparison.DRAWS, one_device_comparison.SIDES)


def test_dropout_in_front_of_other_layers_draws_by_step_and_micro_batch():
    """The layers after it draw nothing."""
    comparison = comparison_of([nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh()], seed=3)
    assert comparison.relative < 1e-5
    assert one_device_comparison.DRAWS in comparison.whole.causes


def test_a_loss_on_the_joined_outputs_is_computed_once():
    """After the last forward, as in the pipeline, and as for the undivided batch."""

    def spread(output, target):
        return (output - output.mean(0)).square().mean() + (output - target).abs().mean()

    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    comparison = comparison_of(layers, loss=spread, loss_on="batch")
    assert comparison.relative < 1e-5
    assert comparison.whole.agrees


def test_side_losses_are_weighted_by_samples_where_the_loss_is_not():
    """Of this loss, some micro-batches have fewer targets that count."""
    targets = torch.tensor([0, -100, -100, 1, 2, 3, 4])
    layers = [OftenSided(6, 6), nn.Linear(6, 6)]
    comparison = comparison_of(layers, loss=nn.CrossEntropyLoss(), y=targets)
    assert comparison.relative < 1e-5
    assert comparison.gradients.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_deferred_statistics_are_those_of_all_micro_batches():
    """The one device updates them at the last micro-batch, as the stages do."""
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6)]
    comparison = comparison_of(layers, deferred_batch_norm=True)
    assert comparison.buffers["1.num_batches_tracked"] == 0.0
    assert max(comparison.buffers.values()) < 1e-6
    assert comparison.loss < 1e-6


def test_batch_norms_without_running_statistics_are_compared():
    """Their buffers are None."""
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)]
    comparison = comparison_of(layers)
    assert comparison.loss < 1e-6
    assert comparison.buffers == {}


def test_the_undivided_batch_has_the_same_mixed_precision():
    """With one micro-batch it has the same sums and the same rounding."""
    comparison = comparison_of(
        [nn.Linear(6, 6), nn.Linear(6, 6)], micro_batches=1, autocast=torch.bfloat16
    )
    assert comparison.relative == 0.0
    assert comparison.whole.relative < 1e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-3), (torch.bfloat16, 0.1)])
def test_the_tolerance_is_that_of_the_parameters(dtype, tolerance):
    """Sums in 16 bits round by some percent."""
    layers = [nn.Linear(6, 6, dtype=dtype), nn.Linear(6, 6, dtype=dtype)]
    torch.manual_seed(0)
    pipe = ps.Pipeline(
        layers,
        balance=[1, 1],
        micro_batches=3,
        loss=nn.functional.mse_loss,
        executor="threads",
    )
    x = torch.randn(SHAPE, dtype=dtype)
    assert pipe.compare_with_one_device(x, x).whole.tolerance == tolerance


def test_a_frozen_model_and_all_its_outputs_are_compared():
    """There is nothing to differentiate. Outputs have their places, and the scale of the largest
    value of all micro-batches.
    """

    class Both(nn.Module):
        """A layer with two outputs."""

        def forward(self, x):
            """Return the input and its half."""
            return {"whole": x, "half": x / 2}

    def loss(output, target):
        return (output["half"] - target).square().mean()

    pipe = ps.Pipeline(
        [nn.Identity(), Both()], balance=[1, 1], micro_batches=3, loss=loss, executor="threads"
    )
    x = torch.arange(42.0).reshape(SHAPE)
    comparison = pipe.compare_with_one_device(x, -x)
    assert comparison.gradients == {}
    assert sorted(comparison.outputs.values()) == [0.0, 0.0]
    scales = {name: size for name, size in comparison.scale.items() if name != "loss"}
    assert sorted(scales) == sorted(f"output {place}" for place in comparison.outputs)
    assert sorted(scales.values()) == [20.5, 41.0]


def test_a_negative_loss_has_a_positive_scale():
    """Relative differences are absolute ones over sizes."""
    comparison = comparison_of(
        [nn.Linear(6, 6), nn.Linear(6, 6)], loss=lambda output, _: -output.square().mean()
    )
    assert comparison.scale["loss"] > 0
    assert comparison.whole.scale["loss"] > 0
    assert 0 <= comparison.relative < 1e-5


def test_a_buffer_that_differs_is_reported():
    """Here the one device goes on from the count of the pipeline."""

    class Counting(nn.Module):
        """A layer that counts in Python and in a buffer."""

        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            """Count."""
            self.calls += 1
            self.count.fill_(self.calls)
            return x

    comparison = comparison_of([nn.Linear(6, 6), Counting()])
    # Three micro-batches of training and three of the check, and three more on the one device.
    assert comparison.buffers == {"1.count": 3.0}
    assert comparison.scale["buffer 1.count"] == 9.0
    assert comparison.relative == pytest.approx(1 / 3)


class WrongSlices(nn.Module):
    """Sums tokens, with an error in every slice."""

    def forward(self, x):
        """Sum the whole sequence."""
        return x.cumsum(1)

    def forward_slice(self, x, past):
        """Go on from the sum of the slices before, and add 1."""
        total = x.cumsum(1) + (1 if past is None else past)
        return total, total[:, -1:]


def test_slices_are_compared_with_the_forward_of_whole_sequences():
    """Otherwise an error of `forward_slice` would be on both sides."""
    pipe = ps.Pipeline(
        [nn.Linear(3, 3), WrongSlices(), nn.Linear(3, 3)],
        balance=[2, 1],
        schedule=ps.schedule("terapipe", 2, 2, slices=3),
        loss=nn.functional.mse_loss,
        executor="threads",
    )
    x, y = torch.randn(4, 6, 3), torch.randn(4, 6, 3)
    assert pipe.compare_with_one_device(x, y).relative > 1e-2


def test_the_settings_of_the_device_are_those_of_the_comparison(monkeypatch):
    """They are read when it is made."""
    monkeypatch.setattr(one_device_comparison, "numeric_settings", lambda device: (str(device),))
    comparison = comparison_of([nn.Linear(6, 6), nn.Linear(6, 6)])
    assert comparison.settings == ("cpu",)


@pytest.mark.parametrize("missing", [0, 1])
def test_rank_0_needs_inputs_and_targets_of_the_whole_batch(missing):
    """The other ranks are stopped before they wait for it."""
    log = []
    whole = [torch.ones(2), torch.ones(2)]
    whole[missing] = torch.ones(2, device="meta")
    world = SimpleNamespace(local_ranks=(0,), abandon=log.append)
    assembly = SimpleNamespace(world=world, placed=None)
    with pytest.raises(SettingError, match="needs the whole batch") as error:
        compare(assembly, lambda: log.append("played"), SimpleNamespace(whole=whole), None)
    assert log == [error.value]


def test_other_ranks_need_no_whole_batch(monkeypatch):
    """They take part, and compare nothing."""
    collected = SimpleNamespace(collect=lambda *args: {}, collect_grads=lambda *args: {})
    monkeypatch.setattr(one_device_comparison, "state", collected)
    monkeypatch.setattr(one_device_comparison, "by_micro_batch", lambda *args: {})
    assembly = SimpleNamespace(
        world=SimpleNamespace(local_ranks=(1,)),
        placed=SimpleNamespace(local=[]),
        stages=[],
        setting=SimpleNamespace(schedule=None),
    )
    played = []
    batch = SimpleNamespace(whole=[torch.ones(2, device="meta")] * 2)
    assert compare(assembly, lambda: played.append("batch"), batch, None) == Comparison()
    assert played == ["batch"]


def test_frozen_parameters_are_no_buffers():
    """They have no gradient, and do not change."""
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    layers[0].bias.requires_grad_(False)
    comparison = comparison_of(layers)
    assert comparison.buffers == {}
    assert comparison.relative < 1e-5


def test_buffers_of_all_copies_of_a_stage_come_back():
    """Each has seen other micro-batches."""
    pipe = ps.Pipeline(
        [nn.BatchNorm1d(6)],
        balance=[1],
        schedule=ps.Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0U1"),
        loss=nn.functional.mse_loss,
        executor="threads",
    )
    modules = [stage.layers[0].module for stage in pipe._assembly.stages]
    before = [module.running_mean.clone() for module in modules]
    pipe.compare_with_one_device(torch.randn(SHAPE), torch.randn(SHAPE))
    for module, mean in zip(modules, before, strict=True):
        assert torch.equal(module.running_mean, mean)
