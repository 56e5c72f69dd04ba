"""The loss where it is computed: counts, weights, side losses, and what is reported."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.batches.batch import make_batch
from penstock.errors import RunError, SettingError
from penstock.losses.stage_loss import (
    LossOptions,
    StageLoss,
    Starts,
    reported_loss,
    total,
    zero_loss,
)
from penstock.values.deferred_checks import DeferredChecks

CPU = torch.device("cpu")


def sum_and_count(output, target):
    """Return the sum over the samples whose target is not 0, and their number."""
    counted = target[:, 0] != 0
    return (output - target)[counted].square().sum(), counted.sum()


def batch_of(x, y, micro_batches=2):
    """Return a batch in training."""
    return make_batch(x, y, micro_batches, step=0, training=True)


@pytest.mark.parametrize("counted", [[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
def test_a_sum_is_divided_by_the_count_of_the_batch(counted):
    """Also where a micro-batch, or the batch, counts nothing: then the loss is 0 and finite."""
    y = torch.tensor(counted, dtype=torch.float32).reshape(4, 1).expand(4, 2).contiguous()
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    options = LossOptions(loss_weight=lambda target: (target[:, 0] != 0).sum())
    stage_loss, batch = StageLoss(sum_and_count, CPU, options), batch_of(x, y)
    grads = []
    for number in batch.numbers:
        value = batch.inputs[number].clone().requires_grad_()
        loss = stage_loss.of(batch, number, value, [])
        (grad,) = torch.autograd.grad(loss * batch.loss_weights[number], value)
        grads.append(grad)
    whole = x.clone().requires_grad_()
    sum_of_all, count = sum_and_count(whole, y)
    mean = sum_of_all / max(int(count), 1)
    (expected,) = torch.autograd.grad(mean, whole)
    torch.testing.assert_close(torch.cat(grads), expected)
    torch.testing.assert_close(sum(batch.losses.values()), mean.detach())


def test_a_count_that_is_not_the_expected_one_is_refused():
    """The weights of earlier micro-batches would be wrong; so is a tuple of another length."""
    x = torch.ones(4, 2)
    options = LossOptions(loss_weight=lambda target: 3.0)
    batch = batch_of(x, x)
    with pytest.raises(SettingError, match="count"):
        StageLoss(sum_and_count, CPU, options).of(batch, 0, x[:2].clone().requires_grad_(), [])
    three = StageLoss(lambda output, target: (output.sum(), 1, 2), CPU, options)
    with pytest.raises(SettingError, match="tuple of 3 values"):
        three.of(batch_of(x, x), 0, x[:2].clone().requires_grad_(), [])


def test_a_count_that_comes_where_there_was_none_before_is_refused():
    """The weights are those of a loss of one number."""
    x = torch.ones(4, 2)
    batch = batch_of(x, x)
    batch.loss_weights = [0.5, 0.5]
    with pytest.raises(SettingError, match="for micro-batch 1, and one number where it was asked"):
        StageLoss(sum_and_count, CPU).of(batch, 1, x[2:].clone().requires_grad_(), [])


def test_a_batch_of_one_micro_batch_is_divided_by_its_own_count():
    """No weights are needed then."""
    x, y = torch.ones(4, 2), torch.zeros(4, 2)
    y[:2] = 3.0
    batch = batch_of(x, y, 1)
    loss = StageLoss(sum_and_count, CPU).of(batch, 0, x.clone().requires_grad_(), [])
    assert loss.item() == 2 * 2 * 4 / 2
    assert batch.losses[0].item() == loss.item()
    for count, expected in ((0.5, 16.0), (0, math.inf), (torch.tensor(0.25), 32.0)):
        stage_loss = StageLoss(lambda output, target, count=count: (output.sum(), count), CPU)
        loss = stage_loss.of(batch_of(x, y, 1), 0, x.clone().requires_grad_(), [])
        assert loss.item() == expected  # as in plain training


@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_outputs_are_stored_where_the_caller_needs_them(targets, keeps):
    """Without their graphs; without targets there is no loss."""
    x = torch.ones(4, 2)
    batch = batch_of(x, x if targets else None)
    batch.keeps_outputs = keeps
    value = x[:2].clone().requires_grad_()
    loss = StageLoss(functional.mse_loss, CPU).of(batch, 0, value, [])
    assert (loss is None) is not targets
    assert (0 in batch.outputs) == (keeps or not targets)
    assert not any(output.requires_grad for output in batch.outputs.values())


def test_what_is_reported_has_the_weight_and_the_side_losses_their_share():
    """Without their graphs."""
    batch = batch_of(torch.ones(4, 2), torch.ones(4, 2))
    loss = torch.tensor(3.0, requires_grad=True)
    sides = [torch.tensor(2.0, requires_grad=True), torch.tensor(4.0)]
    assert total(sides).item() == 6.0
    assert not total(sides).requires_grad
    for weights, expected in (([0.5, 0.5], 4.5), ([0.25, 0.75], 3.75)):
        batch.loss_weights = weights
        value = reported_loss(batch, 0, loss, sides)
        assert value.item() == expected
        assert not value.requires_grad
        assert reported_loss(batch, 0, loss, []).item() == 3.0 * weights[0]


def test_a_loss_without_weight_has_gradients_of_zero_whatever_its_value():
    """The mean over no tokens is NaN, and 0 times NaN would be, too."""
    value = torch.tensor([1.0, float("nan")], requires_grad=True)
    loss = zero_loss(
        {"logits": value, "count": torch.tensor(3)}, torch.tensor(float("nan")).double()
    )
    assert (loss.item(), loss.dtype) == (0.0, torch.float64)
    (grad,) = torch.autograd.grad(loss, value)
    assert grad.tolist() == [0.0, 0.0]


def test_a_loss_of_the_model_is_no_output_whose_gradient_is_zero():
    """Its own backward divides by 0, and would make a NaN of the 0; unless it is the only output."""
    x = torch.ones(2, requires_grad=True)
    infinite = x.sum() / torch.zeros(())
    (grad,) = torch.autograd.grad(zero_loss({"loss": infinite, "scores": x * 2}, infinite), x)
    assert grad.tolist() == [0.0, 0.0]
    assert zero_loss({"loss": x.sum()}, infinite).requires_grad


def test_a_loss_of_torch_without_a_reduction_is_refused():
    """As that of a caller, also for a single micro-batch."""
    x = torch.ones(4, 3)
    stage_loss = StageLoss(torch.nn.MSELoss(reduction="none"), CPU)
    for micro_batches in (1, 2):
        batch = batch_of(x, x, micro_batches)
        with pytest.raises(SettingError, match="the loss must be one number"):
            stage_loss.of(batch, 0, batch.inputs[0].clone().requires_grad_(), [])


def test_a_loss_that_is_infinite_since_its_divisor_is_zero_is_refused():
    """What is divided counts in the batch: to leave it out would give a wrong loss."""

    def per_positive(output, target):
        return (output - target).square().sum() / (target > 0).sum()

    x, y = torch.ones(4, 2), torch.tensor([[2.0, 3.0]] * 2 + [[0.0, -1.0]] * 2)
    stage_loss, batch = StageLoss(per_positive, CPU), batch_of(x, y)
    stage_loss.of(batch, 0, batch.inputs[0].clone().requires_grad_(), [])
    assert batch.loss_weights == [1.0, 0.0]
    with pytest.raises(
        SettingError, match=r"micro-batch 1 is infinite, and its weight .* by a count of 0"
    ):
        stage_loss.of(batch, 1, batch.inputs[1].clone().requires_grad_(), [])


def detached(output, target):
    """Lose the graph."""
    return functional.mse_loss(output.detach(), target)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("loss", [detached, lambda x, y: (detached(x, y), 1)])
def test_a_loss_without_a_gradient_is_refused_in_training(micro_batches, loss):
    """It would train nothing without a word; evaluation needs none."""
    x = torch.ones(4, 2)
    batch = batch_of(x, x, micro_batches)
    value = batch.inputs[0].clone().requires_grad_()
    with pytest.raises(SettingError, match="the loss has no gradient"):
        StageLoss(loss, CPU).of(batch, 0, value, [])
    assert StageLoss(loss, CPU).of(batch_of(x, x, micro_batches), 0, value.detach(), []) == 0
    side = torch.tensor(2.0, requires_grad=True)
    assert StageLoss(loss, CPU).of(batch_of(x, x, micro_batches), 0, value, [side]) == 0


def test_a_constant_loss_of_a_micro_batch_in_which_nothing_counts_is_trained():
    """The batch's has a gradient, whether that micro-batch comes first or after others."""

    def of_positive(output, target):
        counted = target > 0
        if not counted.any():
            return torch.tensor(0.0)
        return (output[counted] - target[counted]).square().sum()

    x, y = torch.ones(4, 2), torch.tensor([[0.0, -1.0]] * 2 + [[2.0, 3.0]] * 2)
    options = LossOptions(loss_weight=lambda target: 1.0)
    for targets in (y, y.flip(0)):
        stage_loss, batch = StageLoss(of_positive, CPU, options), batch_of(x, targets)
        losses = [
            stage_loss.of(batch, number, batch.inputs[number].clone().requires_grad_(), [])
            for number in batch.numbers
        ]
        assert sorted(loss.item() for loss in losses) == [0.0, 10.0]


def test_starts_are_cached_by_value_and_dtype_up_to_a_number():
    """Dynamic loss scales need ever more."""
    starts = Starts()
    root = torch.tensor(1.0)
    half = starts.of(0.5, root)
    assert (half.item(), half.shape) == (0.5, ())
    assert starts.of(0.5, root) is half
    assert starts.of(0.5, root.double()).dtype == torch.float64
    for number in range(200):
        assert starts.of(float(number), root).item() == number
        assert len(starts._grads) <= 64


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, lambda x, y: (x - y).square().mean()], ids=["torch", "own"]
)
@pytest.mark.parametrize("sides", [[], [torch.tensor(2.0), torch.tensor(4.0)]])
def test_the_reported_loss_is_that_of_the_batch_with_its_side_losses(loss, sides):
    """Whether the loss is torch's own, which is not checked, or the caller's."""
    x, y = torch.randn(5, 2), torch.randn(5, 2)
    stage_loss, batch = StageLoss(loss, CPU), batch_of(x, y)
    for number in batch.numbers:
        value = batch.inputs[number].clone().requires_grad_()
        part = stage_loss.of(batch, number, value, sides)
        assert part.shape == ()
        torch.testing.assert_close(part, functional.mse_loss(value, batch.targets[number]))
    assert batch.loss_weights == [0.6, 0.4]
    total_loss = sum(batch.losses[n] * batch.loss_factors.get(n, 1) for n in batch.numbers)
    side = 6.0 if sides else 0.0
    assert float(total_loss) == pytest.approx(float(functional.mse_loss(x, y)) + side)
    assert not any(value.requires_grad for value in batch.losses.values())


def test_counts_of_the_caller_need_not_be_the_divisors_of_the_loss():
    """They are weights in proportion, such as numbers of samples for a mean over their features."""
    x, y = torch.randn(5, 2), torch.randn(5, 2)
    options = LossOptions(loss_weight=len)
    stage_loss, batch = (
        StageLoss(lambda x, y: (x - y).square().mean(), CPU, options),
        batch_of(x, y),
    )
    for number in batch.numbers:
        stage_loss.of(batch, number, batch.inputs[number].clone().requires_grad_(), [])
    assert batch.loss_weights == [0.6, 0.4]
    assert float(sum(batch.losses.values())) == pytest.approx(float(functional.mse_loss(x, y)))


@pytest.mark.parametrize("loss", [functional.mse_loss, lambda x, y: (x - y).square().mean()])
def test_a_recomputed_micro_batch_is_reported_as_it_was_first(loss):
    """Its loss has a graph again, and other numbers if something was drawn."""
    x = torch.ones(4, 2)
    stage_loss, batch = StageLoss(loss, CPU), batch_of(x, x)
    for scale, expected in ((3.0, 4.0), (2.0, 1.0)):
        value = (x[:2] * scale).requires_grad_()
        part = stage_loss.of(batch, 0, value, [])
        assert (part.item(), part.requires_grad) == (expected, True)
    assert float(batch.losses[0]) * batch.loss_factors.get(0, 1) == 2.0


def test_a_torch_loss_of_weight_zero_or_of_several_numbers_is_not_taken_as_it_is():
    """A mean over no token is NaN; a loss without a reduction is no number."""
    x = torch.randn(4, 3)
    batch = batch_of(x, torch.tensor([0, 1, -100, -100]))
    stage_loss = StageLoss(functional.cross_entropy, CPU)
    losses = [
        stage_loss.of(batch, number, batch.inputs[number].clone().requires_grad_(), [])
        for number in batch.numbers
    ]
    assert batch.loss_weights == [1.0, 0.0]
    assert (losses[1].item(), batch.losses[1].item()) == (0.0, 0.0)
    expected = functional.cross_entropy(x[:2], torch.tensor([0, 1]))
    torch.testing.assert_close(losses[0].detach(), expected)

    whole = StageLoss(lambda output, target: (output - target).square(), CPU)
    with pytest.raises(SettingError, match=r"the loss must be one number, .* is \(4, 3\)"):
        whole.of(batch_of(x, x, 1), 0, x.clone().requires_grad_(), [])


@pytest.mark.parametrize(
    ("convert", "kind"),
    [(float, "float"), (Tensor.numpy, "ndarray"), (lambda loss: None, "NoneType")],
)
def test_a_loss_that_is_no_tensor_is_refused_without_a_warning(convert, kind):
    """A warning about micro-batches before it would send the reader the wrong way."""
    x = torch.randn(4, 3)
    stage_loss = StageLoss(lambda output, target: convert(output.detach().mean()), CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SettingError, match=rf"this one is {kind}, .* Return the tensor itself"):
            stage_loss.of(batch_of(x, x), 0, x[:2].clone().requires_grad_(), [])


def test_targets_of_a_micro_batch_are_its_tensors():
    """Nested ones in order; none without targets."""
    y = {"a": torch.arange(4), "b": [torch.ones(4, 2), "text"]}
    stage_loss = StageLoss(functional.mse_loss, CPU)
    first, second = stage_loss.targets(batch_of(torch.ones(4), y), 1)
    assert (first.tolist(), second.shape) == ([2, 3], (2, 2))
    assert stage_loss.targets(batch_of(torch.ones(4), None), 0) == []


def test_a_loss_of_torch_gets_its_target_on_the_device_of_the_stage():
    """The batch has it in host memory."""
    meta = torch.device("meta")
    stage_loss, batch = StageLoss(functional.mse_loss, meta), batch_of(torch.ones(4), torch.ones(4))
    batch.loss_weights = [0.5, 0.5]
    loss = stage_loss.of(batch, 0, torch.ones(2, device=meta, requires_grad=True), [])
    assert (loss.device, loss.requires_grad, batch.loss_factors) == (meta, True, {0: 0.5})
    assert [target.device for target in stage_loss.targets(batch, 0)] == [meta]


def test_weights_are_prepared_once_and_only_where_there_is_a_loss_to_weigh():
    """Not again, not without targets, and not where one loss is computed for the whole batch."""
    x = torch.ones(4, 2)
    stage_loss = StageLoss(functional.mse_loss, CPU)
    batch = batch_of(x, x)
    stage_loss.prepare(batch)
    assert batch.loss_weights is None  # how this loss adds up is not known yet
    stage_loss.of(batch, 0, x[:2].clone().requires_grad_(), [])
    for _ in range(3):
        batch = batch_of(x, x)
        stage_loss.prepare(batch)
        if batch.loss_weights is None:
            stage_loss.of(batch, 0, x[:2].clone().requires_grad_(), [])
    assert batch.loss_weights == [0.5, 0.5]
    batch.loss_weights = [0.25, 0.75]
    stage_loss.prepare(batch)
    assert batch.loss_weights == [0.25, 0.75]
    without = batch_of(x, None)
    stage_loss.prepare(without)
    whole = batch_of(x, x, 1)
    StageLoss(functional.mse_loss, CPU, LossOptions(loss_on="batch")).prepare(whole)
    assert (without.loss_weights, whole.loss_weights) == (None, None)


def unmasked(output, target):
    """Return the sum over all tokens, divided by the number of those that are no padding."""
    return output.square().sum() / (target >= 0).sum()


@pytest.mark.parametrize("loss_weight", [None, lambda target: (target >= 0).sum()])
def test_an_infinite_loss_of_weight_zero_is_refused(loss_weight):
    """Its sum over padding counts in the loss of the batch, where the divisor is not 0."""
    y = torch.tensor([1, 1, -1, -1])
    stage_loss = StageLoss(unmasked, CPU, LossOptions(loss_weight=loss_weight))
    for x, refused in ((torch.ones(4), True), (torch.tensor([1.0, 1.0, 0.0, 0.0]), False)):
        batch = batch_of(x, y)
        first = stage_loss.of(batch, 0, x[:2].clone().requires_grad_(), [])
        assert (first.item(), batch.loss_weights) == (1.0, [1.0, 0.0])
        second = x[2:].clone().requires_grad_()
        if refused:
            with pytest.raises(SettingError, match="the loss of micro-batch 1 is infinite, and"):
                stage_loss.of(batch, 1, second, [])
        else:
            assert stage_loss.of(batch, 1, second, []).item() == 0.0


def test_on_an_accelerator_an_infinite_loss_is_reported_later():
    """To read it at once would make the host wait."""
    checks = DeferredChecks(torch.device("meta"))
    for step in range(5):
        checks.begin(step)
    stage_loss, batch = StageLoss(unmasked, CPU, checks=checks), batch_of(torch.ones(4), None)
    batch.targets, batch.loss_weights = [torch.ones(2), -torch.ones(2)], [1.0, 0.0]
    assert stage_loss.of(batch, 1, torch.ones(2, requires_grad=True), []).item() == 0.0
    with pytest.raises(RunError, match="the loss of micro-batch 1 is infinite"):
        checks.read()
