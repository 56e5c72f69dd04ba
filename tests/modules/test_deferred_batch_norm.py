"""Deferred batch norm: running statistics of whole batches, from micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.grad.buffers import Buffers
from penstock.modules.deferred_batch_norm import (
    DeferredBatchNorm,
    begin,
    check_not_traced,
    convert,
    revert,
)
from penstock.modules.recomputing import PASSES

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def tilted(samples: int, *shape: int) -> torch.Tensor:
    """Return numbers whose channels differ in scale and samples in mean, far from zero, so that
    sums of squares would lose digits.
    """
    x = torch.randn(samples, 3, *shape)
    scale = torch.tensor([1.0, 10.0, 100.0]).view(3, *[1] * len(shape))
    return x * scale + 1000 * torch.arange(samples, dtype=torch.float32).view(
        -1, 1, *[1] * len(shape)
    )


def assert_same_statistics(layer: nn.Module, expected: nn.Module, rtol: float = 1e-5) -> None:
    """Compare means, variances and counts."""
    for name in STATISTICS:
        torch.testing.assert_close(
            getattr(layer, name), getattr(expected, name), rtol=rtol, atol=1e-5
        )


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=5),
    batches=st.integers(1, 3),
    momentum=st.sampled_from([0.1, 1.0, None]),
    kind=st.sampled_from(
        [
            (nn.BatchNorm1d, (5,)),
            (nn.BatchNorm1d, ()),
            (nn.BatchNorm2d, (2, 3)),
            (nn.BatchNorm3d, (2, 1, 2)),
        ]
    ),
)
def test_running_statistics_are_those_of_plain_batch_norm_on_whole_batches(
    sizes, batches, momentum, kind
):
    """For uneven micro-batches, every momentum and every kind of layer."""
    plain = kind[0](3, momentum=momentum)
    deferred = convert(copy.deepcopy(plain), len(sizes))
    for _ in range(batches):
        x = tilted(sum(sizes), *kind[1])
        plain(x)
        for part in x.split(sizes):
            deferred(part)
    assert_same_statistics(deferred, plain)


def test_outputs_and_gradients_are_those_of_plain_batch_norm_on_micro_batches():
    """Only the running statistics are deferred."""
    plain = nn.BatchNorm2d(3, eps=50.0)
    deferred = convert(copy.deepcopy(plain), 2)
    for part in tilted(6, 4, 4).chunk(2):
        a, b = part.clone().requires_grad_(), part.clone().requires_grad_()
        one, other = plain(a), deferred(b)
        torch.testing.assert_close(other, one)
        one.square().sum().backward()
        other.square().sum().backward()
        torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(
        [p.grad for p in deferred.parameters()], [p.grad for p in plain.parameters()]
    )


def test_until_the_batch_ends_running_statistics_stay():
    """An evaluation within a batch must use those of whole batches."""
    layer, parts = convert(nn.BatchNorm1d(3), 3), tilted(6).chunk(3)
    for part in parts[:2]:
        layer(part)
        assert layer.running_mean.tolist() == [0.0] * 3
    layer(parts[2])
    assert int(layer.num_batches_tracked) == 1


def test_begin_drops_an_unfinished_batch_and_sets_how_many_micro_batches_come():
    """After a failed batch, and before a small last one."""
    plain = nn.Sequential(nn.BatchNorm1d(3))
    deferred = convert(copy.deepcopy(plain), 4)
    deferred(tilted(5))
    begin(deferred, 2)
    x = tilted(6)
    plain(x)
    for part in x.chunk(2):
        deferred(part)
    assert_same_statistics(deferred[0], plain[0])


def test_numbers_that_are_none_spoil_one_batch_and_not_those_after_begin():
    """NaN is then in the running statistics, as with plain batch norm; the sums must not keep it."""
    layer = convert(nn.BatchNorm1d(3, momentum=1.0), 1)
    layer(torch.full((4, 3), torch.nan))
    assert bool(layer.batch_mean.isnan().any()) is False
    layer.running_mean.zero_()
    layer.running_var.fill_(1)
    layer(tilted(4))
    assert bool(layer.running_mean.isfinite().all())


def test_evaluation_uses_running_statistics_and_changes_nothing():
    """As in plain batch norm, of any epsilon."""
    plain = nn.BatchNorm1d(3, eps=50.0)
    plain(tilted(6))
    deferred = convert(copy.deepcopy(plain), 2).eval()
    before = {name: tensor.clone() for name, tensor in deferred.named_buffers()}
    x = tilted(4)
    torch.testing.assert_close(deferred(x), plain.eval()(x))
    torch.testing.assert_close(dict(deferred.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("reports_passes", [False, True])
def test_a_recompute_does_not_count(reports_passes):
    """Either the passes are reported, or only buffers are restored, as a recomputing stage does."""
    plain = nn.BatchNorm1d(3)
    deferred = convert(copy.deepcopy(plain), 3)
    buffers, x = Buffers([deferred]), tilted(9)
    plain(x)
    for part in x.chunk(3):
        contents = buffers.contents()
        first = deferred(part)
        if reports_passes:
            PASSES.recomputing = True
            try:
                second = deferred(part)
            finally:
                PASSES.recomputing = False
        else:
            with buffers.with_contents(contents):
                second = deferred(part)
        torch.testing.assert_close(second, first)
    assert_same_statistics(deferred, plain)


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_in_a_pipeline_running_statistics_are_those_of_plain_training_on_the_batch(recompute):
    """The first batch norm's input does not depend on statistics of others, so it must be exact."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = convert(copy.deepcopy(plain), 4)
    pipe = ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=[1, 2],
        schedule="1f1b",
        micro_batches=4,
        recompute=recompute,
        executor="threads",
        device="cpu",
    )
    for _ in range(2):
        x, y = torch.randn(12, 4), torch.randn(12, 2)
        pipe.train_batch(x, y)
        plain(x)
    assert_same_statistics(model[1], plain[1])
    pipe.close()


def test_converting_keeps_names_tensors_and_hooks_and_reverting_gives_the_plain_layer_back():
    """An optimizer created before has the same parameters; a checkpoint has the same names."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    names, tensors = list(model.state_dict()), list(model.parameters())
    calls: list[str] = []
    model[1][0].register_forward_hook(lambda *_: calls.append("called"))
    deferred = convert(model, 2)
    assert deferred is model
    assert isinstance(model[1][0], DeferredBatchNorm)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), tensors, strict=True))
    assert "micro_batches=2" in repr(model)
    model(torch.randn(4, 3))
    assert calls == ["called"]
    assert revert(model) is model
    assert type(model[1][0]) is nn.BatchNorm1d
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_buffers()] == [f"1.0.{name}" for name in STATISTICS]
    assert all(a is b for a, b in zip(model.parameters(), tensors, strict=True))


def test_one_layer_in_two_places_stays_one():
    """Two copies would each get half of the micro-batches."""
    norm = nn.BatchNorm1d(3)
    model = convert(nn.ModuleList([norm, norm]), 2)
    assert model[0] is model[1]


def test_the_plain_layer_has_no_buffers_of_the_deferred_one():
    """Whoever has a reference to it goes on with its own state."""
    norm = nn.BatchNorm1d(3)
    deferred = convert(norm, 2)
    assert [name for name, _ in norm.named_buffers()] == list(STATISTICS)
    assert deferred.running_mean is norm.running_mean
    assert list(norm.state_dict()) == list(deferred.state_dict())


def test_children_that_are_none_stay_none():
    """As of a layer whose shortcut is left out."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.register_module("shortcut", None)
    assert convert(model, 2).shortcut is None
    assert revert(model).shortcut is None


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3), nn.InstanceNorm1d(3)]
)
def test_modules_without_statistics_to_defer_are_unchanged(layer):
    """Layers without running statistics."""
    assert convert(layer, 2) is layer


class Scaled(nn.BatchNorm1d):
    """A batch norm of the user with a forward that does more."""

    def forward(self, x):
        """Return twice the normalised value."""
        return 2 * super().forward(x)


def test_a_batch_norm_with_a_forward_of_the_user_is_unchanged():
    """The forward would be lost; a subclass without one is converted and reverted to its class."""
    layer = Scaled(3)
    assert convert(layer, 2) is layer
    kind = type("Named", (nn.BatchNorm1d,), {})
    deferred = convert(kind(3), 2)
    assert isinstance(deferred, DeferredBatchNorm)
    assert type(revert(deferred)) is kind


def test_a_buffer_of_the_user_stays_outside_the_state_through_both_conversions():
    """A layer may have more buffers than those of batch norm."""
    layer = nn.BatchNorm1d(3)
    layer.register_buffer("calls", torch.zeros(1), persistent=False)
    names = list(layer.state_dict())
    deferred = convert(layer, 2)
    assert list(deferred.state_dict()) == names
    plain = revert(deferred)
    assert list(plain.state_dict()) == names
    assert plain.calls is layer.calls


def test_a_reset_of_the_running_statistics_drops_those_of_an_unfinished_batch():
    """They would else be part of the next batch."""
    plain, layer = nn.BatchNorm1d(3), convert(nn.BatchNorm1d(3), 2)
    layer(tilted(5))
    layer.reset_running_stats()
    x = tilted(6)
    plain(x)
    for part in x.chunk(2):
        layer(part)
    assert_same_statistics(layer, plain)


def test_a_batch_norm_that_cannot_be_deferred_is_refused():
    """Statistics over several processes; a batch without micro-batches."""
    with pytest.raises(SettingError, match="1 is a SyncBatchNorm, which cannot be deferred"):
        convert(nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(3)), 2)
    with pytest.raises(SettingError, match="at least 1 micro-batch, not 0"):
        convert(nn.BatchNorm1d(3), 0)


def test_inputs_with_a_wrong_number_of_dimensions_are_refused_with_the_message_of_torch():
    """The converted layer knows its original class."""
    with pytest.raises(ValueError, match="expected 4D input"):
        convert(nn.BatchNorm2d(3), 2)(torch.randn(4, 3))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        convert(nn.BatchNorm1d(3), 2)(torch.randn(4, 3, 2, 2))


def test_converting_again_changes_the_number_of_micro_batches():
    """A model may be used in one pipeline after another."""
    layer = convert(nn.BatchNorm1d(3), 2)
    assert convert(layer, 5) is layer
    assert layer.micro_batches == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_of_numbers_are_merged_without_overflow(dtype):
    """Counts are integers and sums are kept as means, so neither grows with the batch."""
    plain = nn.BatchNorm1d(3).to(dtype)
    deferred = convert(copy.deepcopy(plain), 4)
    x = tilted(400).to(dtype)
    plain(x)
    for part in x.chunk(4):
        deferred(part)
    assert_same_statistics(deferred, plain, rtol=1e-10 if dtype is torch.float64 else 0.03)


def test_a_layer_on_the_meta_device_gets_memory_by_its_reset():
    """A rank allocates only its own layers, whose counts start at zero."""
    layer = convert(nn.BatchNorm1d(3, device="meta"), 2).to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.batch_mean.tolist() == [0.0] * 3
    assert int(layer.batch_seen) == 0


@pytest.mark.parametrize(
    ("norm", "refused"),
    [
        (nn.BatchNorm2d(2), True),
        (nn.BatchNorm1d(2, track_running_stats=False), False),
        (nn.InstanceNorm1d(2), False),
        (nn.LayerNorm(2), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_traced_model_with_batch_norms_that_would_be_deferred_is_refused(norm, refused):
    """Its graph calls no modules; the message names the model and the layer."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(norm))
    if not refused:
        check_not_traced(model)
        return
    with pytest.raises(SettingError, match=r"and Sequential is traced: .* statistics of 1\.0 at"):
        check_not_traced(model)
