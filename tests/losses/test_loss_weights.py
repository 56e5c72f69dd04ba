"""Weights of micro-batches: those of the caller, counts of classes, and when a test is due."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.batches.batch import make_batch
from penstock.errors import SettingError
from penstock.losses.call import LossCall
from penstock.losses.loss_weights import Knowledge, LossWeights, _same_contents
from penstock.modules.side_loss import collecting_side_losses, side_loss

CPU = torch.device("cpu")


def weights_of(loss, x, y, micro_batches=3, *, weights=None, number=0, loss_weight=None):
    """The weights of a batch, and the batch."""
    weights = LossWeights(LossCall(loss, CPU), loss_weight) if weights is None else weights
    batch = make_batch(x, y, micro_batches, step=0, training=True)
    value = batch.inputs[number].clone().requires_grad_() * 1
    return weights.of(batch, number, value), batch


LOSSES = {
    "mean": functional.mse_loss,
    "sum": lambda x, y: functional.mse_loss(x, y, reduction="sum"),
    "masked": lambda x, y: (x - y)[y[:, 0] > 0].square().sum() / (y[:, 0] > 0).sum(),
    "two means": lambda x, y: (x - y).square().mean() + x.abs().mean() / 3,
    "counted": lambda x, y: ((x - y)[y[:, 0] > 0].square().sum(), (y[:, 0] > 0).sum()),
    "half": lambda x, y: (x - y).square().sum() / len(x) / 2,
    "opaque mean": lambda x, y: (x - y).square().exp().log().mean().reciprocal().reciprocal(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_weighted_losses_of_micro_batches_add_up_to_that_of_the_batch(name, seed):
    """Of unlike micro-batches, whichever runs first, and also from what was remembered."""
    choose = random.Random(seed)
    loss = LOSSES[name]
    weights = LossWeights(LossCall(loss, CPU))
    count = choose.randint(5, 8)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * seed + step)
        x = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        y = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        y[choose.randrange(count)] = 1.0
        numbers, batch = weights_of(loss, x, y, weights=weights, number=choose.randrange(3))
        total = 0.0
        for part, target, weight in zip(batch.inputs, batch.targets, numbers, strict=True):
            value = loss(part, target)
            value = value[0] if isinstance(value, tuple) else value
            total += 0.0 if weight == 0 else float(value) * weight
        whole = loss(x, y)
        whole = whole[0] / whole[1] if isinstance(whole, tuple) else whole
        assert total == pytest.approx(float(whole), rel=1e-6)


def test_batches_of_other_forms_are_analysed_by_themselves():
    """Of inputs, of targets in their shape and dtype, and of the number of micro-batches."""

    def loss(output, target):
        if target.dim() == 1:
            return output.square().sum()
        return output.square().mean() if target.dtype is torch.int64 else output.abs().sum() / 7

    weights = LossWeights(LossCall(loss, CPU))
    x = torch.randn(5, 2)
    rows = [(torch.ones(5), [1.0] * 3), (torch.ones(5, 2), [1.0] * 3)]
    rows.append((torch.ones(5, 2, dtype=torch.int64), [0.4, 0.4, 0.2]))
    for _ in range(2):
        for target, expected in rows:
            assert weights_of(loss, x, target, weights=weights)[0] == pytest.approx(expected)
        for count in (2, 5):
            numbers, batch = weights_of(loss, x, rows[2][0], count, weights=weights)
            assert numbers == pytest.approx(batch.shares)


@pytest.mark.parametrize("weighted", [False, True])
def test_classes_are_counted_anew_in_every_batch(weighted):
    """Without ignored ones the weights are the shares themselves."""
    class_weights = torch.tensor([0.5, 1.0, 3.0]) if weighted else None

    def loss(output, target):
        return functional.cross_entropy(output, target, class_weights, ignore_index=9)

    weights = LossWeights(LossCall(loss, CPU))
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        x = torch.randn(7, 3, generator=generator)
        y = torch.randint(0, 3, (7,), generator=generator)
        if step % 2:
            y[:4] = 9
        numbers, batch = weights_of(loss, x, y, weights=weights)
        counts = [
            sum(
                0.0 if target == 9 else float(class_weights[target]) if weighted else 1.0
                for target in part.tolist()
            )
            for part in batch.targets
        ]
        assert numbers == pytest.approx([count / sum(counts) for count in counts])
        if not weighted and not step % 2:
            assert numbers == batch.shares


def test_options_of_a_loss_and_dtypes_of_nested_targets_are_part_of_the_form_of_a_batch():
    """What earlier batches have shown holds only for the same options and the same dtypes."""
    loss = nn.CrossEntropyLoss(ignore_index=9)
    weights = LossWeights(LossCall(loss, CPU))
    x, y = torch.randn(6, 3), torch.tensor([0, 0, 1, 2, 1, 0])
    for _ in range(2):
        numbers, batch = weights_of(loss, x, y, 2, weights=weights)
        assert numbers == batch.shares == [0.5, 0.5]
    loss.ignore_index = 0
    assert weights_of(loss, x, y, 2, weights=weights)[0] == pytest.approx([1 / 3, 2 / 3])
    loss.reduction = "sum"
    assert weights_of(loss, x, y, 2, weights=weights)[0] == [1.0, 1.0]

    def by_dtype(output, target):
        value = output.square()
        return value.sum() if target["y"].is_floating_point() else value.mean()

    weights = LossWeights(LossCall(by_dtype, CPU))
    for target, expected in ((y, [0.5, 0.5]), (y.double(), [1.0, 1.0]), (y, [0.5, 0.5])):
        assert weights_of(by_dtype, x, {"y": target}, 2, weights=weights)[0] == expected


def test_a_single_micro_batch_has_its_share_and_the_callers_numbers_come_first():
    """A total of 0 counts as the shares of samples."""
    x, y = torch.ones(5, 2), torch.arange(10.0).reshape(5, 2)
    assert weights_of(lambda *_: 1 / 0, x, y, 1)[0] == [1.0]
    numbers, batch = weights_of(
        functional.mse_loss, x, y, 2, loss_weight=lambda target: target.sum()
    )
    assert numbers == pytest.approx([15 / 45, 30 / 45])
    assert batch.loss_counts == {0: 15.0, 1: 30.0}
    numbers, batch = weights_of(functional.mse_loss, x, y, 2, loss_weight=lambda _: 0)
    assert numbers == batch.shares == [0.6, 0.4]


#: The class 0 has no weight.
UNWEIGHTED = torch.tensor([0.0, 1.0, 2.0])


def smoothed(output, target, **options):
    """Cross-entropy with label smoothing and class weights."""
    return functional.cross_entropy(output, target, UNWEIGHTED, label_smoothing=0.1, **options)


def smoothed_by_hand(output, target):
    """The same from its two terms, behind a square root of the square."""
    scores, weights = output.log_softmax(1), UNWEIGHTED[target]
    smoothing = -(scores * UNWEIGHTED).sum(1).sum() / weights.sum() / 3
    value = 0.9 * functional.nll_loss(scores, target, UNWEIGHTED) + 0.1 * smoothing
    return value.square().sqrt()


@pytest.mark.parametrize("loss", [smoothed, smoothed_by_hand])
@pytest.mark.parametrize("number", [0, 1])
def test_label_smoothing_without_any_class_weight_is_refused(loss, number):
    """Its part of the loss of the batch is not 0, also where `loss_weight` gives the weights."""
    x, y = torch.randn(6, 3), torch.tensor([1, 2, 0, 0, 2, 1])
    for loss_weight in (None, lambda target: UNWEIGHTED[target].sum()):
        if loss is smoothed_by_hand and loss_weight is None:
            continue  # a root is refused for itself
        with pytest.raises(SettingError, match="targets of micro-batch 1 have a class weight of 0"):
            weights_of(loss, x, y, number=number, loss_weight=loss_weight)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (smoothed, [1, 2, -100, -100, 2, 1]),
        (smoothed, [0, 0, 0, 0, 0, 0]),
        (smoothed, [1, 0, 0, 2, 0, 2]),
        (lambda o, y: functional.cross_entropy(o, y, UNWEIGHTED), [1, 2, 0, 0, 2, 1]),
        (lambda o, y: (smoothed(o, y, reduction="sum"), UNWEIGHTED[y].sum()), [1, 2, 0, 0, 2, 1]),
    ],
    ids=["ignored", "no weight in the batch", "some weight", "not smoothed", "sum and count"],
)
def test_label_smoothing_is_accepted_where_its_part_is_known(loss, target):
    """The weighted losses of micro-batches then add up to the loss of the batch, as far as it is a
    number.
    """
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(target)
    numbers, batch = weights_of(loss, x, y)
    values = [loss(*part) for part in zip(batch.inputs, batch.targets, strict=True)]
    values = [value[0] if isinstance(value, tuple) else value for value in values]
    pairs = zip(values, numbers, strict=True)
    total = sum(float(value) * weight for value, weight in pairs if weight)
    whole = loss(x, y)
    whole = whole[0] / whole[1] if isinstance(whole, tuple) else whole
    assert total == pytest.approx(float(whole), rel=1e-5, nan_ok=True)


def test_tests_are_due_at_powers_of_two_and_always_where_only_they_tell():
    """Up to batch 64; then at powers of two as well."""
    weights = LossWeights(LossCall(functional.mse_loss, CPU))
    due = {"graph": [], "test": []}
    for batch in range(1, 300):
        for name, knowledge in (("graph", None), ("test", ("shares", "shares"))):
            if weights._is_due(Knowledge(adds_up=knowledge), batch):
                due[name].append(batch)
    assert due["graph"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert due["test"] == [*range(1, 65), 128, 256]


def test_weights_are_known_before_an_output_where_earlier_batches_have_shown_them():
    """Batches 1, 2, 4, 8, ... are looked at, so that their weights take an output."""
    weights = LossWeights(LossCall(functional.cross_entropy, CPU))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, -100, 1])
    taken_at = []
    for number in range(1, 10):
        batch = make_batch(x, y, 2, step=number, training=True)
        known = weights.known(batch)
        if known is None:
            taken_at.append(number)
            known = weights.of(batch, 0, batch.inputs[0].clone().requires_grad_() * 1)
        else:
            assert batch.loss_counts == {0: 3.0, 1: 2.0}
        assert known == pytest.approx([3 / 5, 2 / 5])
    assert taken_at == [1, 2, 4, 8]


def test_a_loss_that_changes_is_refused_at_the_next_batch_that_is_tested():
    """Its graph has the same divisor before and after."""
    centred = False

    def loss(output, _):
        return (output - output.mean(0) if centred else output).square().mean()

    weights = LossWeights(LossCall(loss, CPU))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        weights_of(loss, x, x, 2, weights=weights)
    centred = True
    weights_of(loss, x, x, 2, weights=weights)  # batch 3
    with pytest.raises(SettingError, match="is not made of the losses of its micro-batches"):
        weights_of(loss, x, x, 2, weights=weights)


@pytest.mark.parametrize("fails", [False, True])
def test_side_losses_of_evaluations_are_dropped_and_those_of_the_batch_are_collected_on(fails):
    """Also after a refusal."""

    def loss(output, target):
        side_loss(output.sum() * 100)
        return functional.mse_loss(output, target).sqrt() if fails else output.square().sum() / 3

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    with collecting_side_losses() as sides:
        side_loss(torch.tensor(1.0))
        with pytest.raises(SettingError) if fails else nullcontext():
            weights_of(loss, x, x + 1)
        side_loss(torch.tensor(2.0))
    assert [side.item() for side in sides] == [1.0, 2.0]


def test_weights_by_the_caller_are_never_known_before():
    """The function may read what only a device has; one micro-batch needs no weight."""
    x = torch.ones(4, 2)
    weights = LossWeights(LossCall(functional.mse_loss, CPU), lambda _: 1)
    for step in range(4):
        batch = make_batch(x, x, 2, step=step, training=True)
        assert weights.known(batch) is None
        assert weights.of(batch, 0, batch.inputs[0]) == [0.5, 0.5]
    assert weights.known(make_batch(x, x, 1, step=4, training=True)) == [1.0]


def test_knowledge_is_forgotten_where_there_are_too_many_forms():
    """256 of them are kept."""
    weights = LossWeights(LossCall(functional.mse_loss, CPU))
    for key in range(256):
        weights._remember(key, Knowledge())
    assert len(weights._knowledge_by_key) == 256
    weights._remember("more", Knowledge(weights=[1.0]))
    assert weights._knowledge_by_key == {"more": Knowledge(weights=[1.0])}


def test_a_loss_with_another_divisor_than_its_weight_assumes_is_refused():
    """Up to rounding; other forms of a loss are not looked at."""
    weights = LossWeights(LossCall(functional.mse_loss, CPU))
    batch = make_batch(torch.ones(4, 2), torch.ones(4, 2), 2, step=0, training=True)
    x = torch.ones(2, 2, requires_grad=True)
    weights.check(batch, 0, x.mean())
    batch.loss_counts = {0: 4.0, 1: 5.0}
    weights.check(batch, 0, x.mean())
    weights.check(batch, 1, x.mean() * 0.8)
    weights.check(batch, 1, x.mean().detach())
    weights.check(batch, 1, x.mean() + x.sum())
    weights.check(batch, 1, x.mean().sqrt())
    with pytest.raises(SettingError, match="the loss of micro-batch 1 is divided by 4, and 5 was"):
        weights.check(batch, 1, x.mean())


def test_the_divisor_of_a_loss_that_an_untraced_model_computes_is_checked_later():
    """From the first micro-batch it is known for all, in proportion to their samples; sums have
    none.
    """
    weights = LossWeights(LossCall(lambda output, _: output, CPU))
    x = torch.ones(5, 2, requires_grad=True)

    def batch():
        return make_batch(torch.ones(5, 2), torch.ones(5), 2, step=0, training=True)

    of_means = batch()
    assert weights.of(of_means, 0, x[:3].mean()) == of_means.shares == [0.6, 0.4]
    assert of_means.loss_counts == pytest.approx({0: 6.0, 1: 4.0})
    weights.check(of_means, 1, x[3:].mean())
    with pytest.raises(SettingError, match="micro-batch 1 is divided by 2, and 4 was expected"):
        weights.check(of_means, 1, x[3:, 0].mean())
    of_sums = batch()
    assert weights.of(of_sums, 0, x[:3].sum()) == [1.0, 1.0]
    assert of_sums.loss_counts == {}
    with pytest.raises(SettingError, match="not those of single samples"):
        weights.of(batch(), 0, x[:3].mean(0).sum())
    # Without a graph, as in evaluation, the form is the one that was seen in training.
    assert weights.of(batch(), 0, x[:3].sum().detach()) == [1.0, 1.0]


def test_contents_are_the_same_in_any_order_and_number():
    """Targets are flattened or turned by losses."""
    one = torch.tensor([[1, 2], [3, 3]])
    assert _same_contents(one, torch.tensor([3, 1, 3, 2]))
    assert not _same_contents(one, torch.tensor([3, 1, 2, 2]))
    assert not _same_contents(one, torch.tensor([2, 2, 2, 3]))
    assert not _same_contents(one, torch.tensor([1, 2, 3]))
