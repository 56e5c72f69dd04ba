"""What the weights of earlier batches tell about later ones: by form, class and kind of the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.errors import SettingError
from penstock.losses import loss_weights
from penstock.losses.call import LossCall
from penstock.losses.loss_weights import Knowledge, LossWeights
from penstock.schedule.slicing import Slicing

CPU = torch.device("cpu")


def batch_of(x, y, micro_batches=2, step=0, slicing=None):
    """Return a batch in training."""
    return make_batch(x, y, micro_batches, step=step, training=True, slicing=slicing)


def weigh(weights, batch):
    """Return the weights of a batch, from what is known or from its first output."""
    known = weights.known(batch)
    if known is not None:
        return known
    return weights.of(batch, 0, batch.inputs[0].clone().requires_grad_() * 1)


NESTED = pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [(lambda y: y, lambda y: y), (lambda y: {"a": [y]}, lambda y: y["a"][0])],
    ids=["plain", "nested"],
)


@NESTED
def test_batches_of_another_form_are_weighed_by_themselves(wrap, unwrap):
    """Of other numbers of micro-batches, and of targets of another shape of as many elements."""

    def loss(output, target):
        return output.square().sum() if unwrap(target).dim() == 1 else output.square().mean()

    weights = LossWeights(LossCall(loss, CPU))
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for micro_batches, shares in ((2, [0.6, 0.4]), (5, [0.2] * 5)):
            for target, expected in (
                (torch.ones(5), [1.0] * micro_batches),
                (torch.ones(5, 1), shares),
            ):
                batch = batch_of(x, wrap(target), micro_batches)
                assert weigh(weights, batch) == pytest.approx(expected)


class NestedEntropy(nn.CrossEntropyLoss):
    """A cross-entropy whose targets are in a dict, behind others."""

    def forward(self, output, target):
        """Return the loss."""
        return super().forward(output, target["classes"])


def test_options_of_a_loss_with_nested_targets_hold_from_the_next_batch():
    """They are part of the form of a batch, as for plain targets."""
    loss = NestedEntropy()
    weights = LossWeights(LossCall(loss, CPU))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    y = {"other": torch.zeros(6), "classes": torch.tensor([0, 0, 1, 2, 1, 1])}
    for step in range(3):
        assert weigh(weights, batch_of(x, y, step=step)) == pytest.approx([0.5, 0.5])
    loss.ignore_index = 0
    assert weigh(weights, batch_of(x, y, step=3)) == pytest.approx([0.25, 0.75])
    loss.reduction = "sum"
    assert weigh(weights, batch_of(x, y, step=4)) == [1.0, 1.0]


@pytest.mark.parametrize("class_weights", [None, torch.tensor([0.5, 1.0, 2.0])])
def test_classes_are_counted_in_the_leaf_of_the_targets_that_has_them(class_weights):
    """Whatever other integers of as many elements are beside it; in batches that are not tested."""
    weights = LossWeights(LossCall(NestedEntropy(class_weights, ignore_index=9), CPU))
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        x = torch.randn(6, 3, generator=generator)
        classes = torch.randint(0, 3, (6,), generator=generator)
        classes[step % 6] = 9
        y = {"ids": torch.arange(6) + 20, "classes": classes, "scores": torch.ones(6)}
        batch = batch_of(x, y, step=step)
        counts = []
        for part in classes.chunk(2):
            values = [0.0 if c == 9 else 1.0 for c in part.tolist()]
            if class_weights is not None:
                values = [0.0 if c == 9 else float(class_weights[c]) for c in part.tolist()]
            counts.append(sum(values))
        expected = [count / sum(counts) for count in counts]
        assert weigh(weights, batch) == pytest.approx(expected)
        if step not in (0, 1, 3, 7):
            assert batch.loss_counts == pytest.approx(dict(enumerate(counts)))


def over_tokens(output, target, **options):
    """Return a cross-entropy over all tokens, by a function of the caller."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def test_tokens_without_ignored_ones_are_expected_as_divisors_of_a_function():
    """It may ignore some from a batch on, and is then refused; torch's own losses may not."""
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(12).reshape(3, 4) % 5
    options: dict[str, int] = {}
    weights = LossWeights(LossCall(lambda x, y: over_tokens(x, y, **options), CPU))
    for step in range(3):
        batch = batch_of(x, y, step=step)
        assert weigh(weights, batch) == batch.shares
    assert batch.loss_counts == {0: 8.0, 1: 4.0}
    value = batch.inputs[1].clone().requires_grad_()
    weights.check(batch, 1, over_tokens(value, y[2:]))
    with pytest.raises(SettingError, match="micro-batch 1 is divided by 3, and 4 was expected"):
        weights.check(batch, 1, over_tokens(value, y[2:], ignore_index=3))
    torchs = LossWeights(LossCall(functional.cross_entropy, CPU))
    for step in range(3):
        batch = batch_of(x[:, 0], y[:, 0], step=step)
        weigh(torchs, batch)
    assert batch.loss_counts == {}


def test_only_batches_1_2_4_and_8_of_a_loss_are_tested_in_numbers():
    """Also where its counts cannot be told without another look at it."""
    tested = []

    def masked(output, target):
        if not output.is_meta:
            tested.append(len(numbers))
        counts = target[:, 0] > 0
        return ((output - target).square().sum(1) * counts).sum() / counts.sum()

    weights = LossWeights(LossCall(masked, CPU))
    numbers: list[int] = []
    generator = torch.Generator().manual_seed(0)
    for step in range(9):
        x = torch.randn(6, 2, generator=generator)
        y = torch.randn(6, 2, generator=generator)
        y[[0, 3], 0], y[[1, step % 3 + 3], 0] = 1.0, -1.0
        numbers.append(step + 1)
        counts = [int((part[:, 0] > 0).sum()) for part in y.chunk(2)]
        expected = [count / sum(counts) for count in counts]
        assert weigh(weights, batch_of(x, y, step=step)) == pytest.approx(expected)
    assert sorted(set(tested)) == [1, 2, 4, 8]


def test_what_a_test_has_shown_over_samples_and_over_tokens_is_kept_apart():
    """A loss may be a mean over samples and a sum over the tokens of slices."""
    x = torch.ones(5, 6, 2)
    slicing = Slicing("tokens", ((0.5, 0.5),) * 2)
    weights = LossWeights(LossCall(functional.mse_loss, CPU))
    weights._batches = 65  # later batches are tested at powers of two
    for adds_up, expected in (
        (("shares", "sums"), [0.6, 0.6, 0.4, 0.4]),
        (("sums", "shares"), [0.5] * 4),
    ):
        batch = batch_of(x, x, slicing=slicing)
        weights._remember(weights._key_of(batch), Knowledge(adds_up=adds_up))
        assert weights.known(batch) == pytest.approx(expected)


class Labelled(nn.Module):
    """A model that computes its loss from labels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x, y):
        """Return the loss."""
        return functional.cross_entropy(self.head(torch.tanh(self.stem(x))), y)


def test_a_weight_of_the_caller_comes_before_the_graph_of_a_traced_model():
    """The model counts 2 and 1 of the targets, and the caller says 1 and 3."""
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, -100])
    model = Labelled()
    layers = ps.chain(model, {"x": x, "y": y}).modules
    call = LossCall(lambda output, _: output, CPU)
    for loss_weight, expected in (
        (None, [2 / 3, 1 / 3]),
        (lambda target: 1 if len(target) == 2 and target[0] == 0 else 3, [0.25, 0.75]),
    ):
        weights = LossWeights(call, loss_weight, layers)
        batch = batch_of({"x": x, "y": y}, y)
        loss = model(**batch.inputs[0])
        assert weights.of(batch, 0, loss) == pytest.approx(expected)


def test_a_sum_over_classes_counts_1_in_every_batch():
    """Though its graph has the classes, of which some are ignored."""
    loss = nn.CrossEntropyLoss(reduction="sum", ignore_index=0)
    weights = LossWeights(LossCall(loss, CPU))
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 2, 1])
    for step in range(4):
        assert weigh(weights, batch_of(x, y, step=step)) == [1.0, 1.0]


def test_two_terms_over_classes_are_compared_in_every_batch():
    """Their counts may be equal in the first batches and differ in later ones."""

    def loss(output, target):
        return sum(functional.cross_entropy(output, target[key]) for key in ("a", "b"))

    weights = LossWeights(LossCall(loss, CPU))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    y = {"a": torch.tensor([0, 1, -100, 1, 2, 1]), "b": torch.tensor([-100, 1, 2, 0, 0, 0])}
    for step in range(2):
        assert weigh(weights, batch_of(x, y, step=step)) == pytest.approx([2 / 5, 3 / 5])
    y["b"] = torch.tensor([-100, -100, 2, 0, 0, 0])
    with pytest.raises(SettingError, match=r"not made of the losses|count differently"):
        weigh(weights, batch_of(x, y, step=2))


@pytest.mark.parametrize("by_samples", [True, False])
def test_a_loss_with_other_weights_over_tokens_than_over_samples_has_both(by_samples):
    """A mean over samples of sums over tokens, or a sum of means; its graph does not show it."""

    def loss(output, target):
        squares = (output - target).square().exp().log()
        over = squares.sum(1).mean() if by_samples else squares.mean(1).sum()
        return over.reciprocal().reciprocal()

    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = batch_of(x, x * 2, slicing=Slicing("tokens", ((0.5, 0.5),) * 2))
    expected = [0.6, 0.6, 0.4, 0.4] if by_samples else [0.5] * 4
    assert weigh(LossWeights(LossCall(loss, CPU)), batch) == pytest.approx(expected)


@pytest.mark.parametrize("error", [KeyError, ZeroDivisionError])
def test_counts_that_cannot_be_told_from_one_output_are_refused_with_the_error(error):
    """The function of the caller may raise anything on the targets of another micro-batch."""

    def loss(output, target):
        if float(target[0, 0]) > 0 and not output.requires_grad:
            raise error("no such target")
        return output.square().sum(), output.detach().numpy().size / 2

    y = torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 2)
    words = rf"could not be told from the output of the first \({error.__name__}: "
    with pytest.raises(SettingError, match=words):
        weigh(LossWeights(LossCall(loss, CPU)), batch_of(torch.ones(4, 2), y))


def test_the_first_test_of_a_form_looks_at_changed_outputs_and_later_ones_at_those_of_the_model():
    """With a large vocabulary the whole test takes as long as several steps."""
    calls: list[int] = []

    def loss(output, target):
        if not output.is_meta:
            calls.append(1)
        return (output - target).square().mean()

    weights = LossWeights(LossCall(loss, CPU))
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    counts = []
    for step in range(4):
        calls.clear()
        weigh(weights, batch_of(x, 2 * x, step=step))
        counts.append(len(calls))
    # Three evaluations for each change of the outputs; three more where targets repeat.
    assert counts == [18, 6, 0, 6]


@pytest.mark.parametrize("number", [0, 2])
def test_label_smoothing_without_weight_is_refused_in_a_smaller_micro_batch(number):
    """Whichever micro-batch has run, and though the last one has fewer samples."""
    class_weights = torch.tensor([0.0, 1.0, 2.0])

    def loss(output, target):
        return functional.cross_entropy(output, target, class_weights, label_smoothing=0.1)

    batch = batch_of(torch.randn(5, 3), torch.tensor([1, 2, 1, 1, 0]), 3)
    value = batch.inputs[number].clone().requires_grad_() * 1
    with pytest.raises(SettingError, match="targets of micro-batch 2 have a class weight of 0"):
        LossWeights(LossCall(loss, CPU)).of(batch, number, value)


def entropy(output, target):
    """Return a cross-entropy over single samples."""
    return functional.cross_entropy(output, target)


def among_samples(output, target):
    """Return a cross-entropy over the samples themselves."""
    return functional.cross_entropy(output @ output.t(), torch.arange(len(output)))


def with_centred(output, target):
    """Return a cross-entropy, and a mean of differences from the mean of the samples."""
    return entropy(output, target) + (output - output.mean(0)).square().mean()


def with_hook(output, target):
    """Return a cross-entropy whose gradient has a length of 1."""
    output.register_hook(lambda grad: grad / grad.norm())
    return entropy(output, target)


@pytest.mark.parametrize("loss", [among_samples, with_centred, with_hook])
def test_of_large_outputs_only_losses_over_single_samples_need_no_test_in_numbers(
    loss, monkeypatch
):
    """The copies that the test makes would take much memory; a graph shows that samples are apart,
    and neither what other terms do nor hooks.
    """
    monkeypatch.setattr(loss_weights, "_LARGE_OUTPUT", 0)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0])
    seen = []

    def noting(output, target):
        seen.append(output.is_meta)
        return entropy(output, target)

    assert weigh(LossWeights(LossCall(noting, CPU)), batch_of(x, y)) == [0.5, 0.5]
    assert all(seen)
    with pytest.raises(SettingError, match="is not made of the losses of its micro-batches"):
        weigh(LossWeights(LossCall(loss, CPU)), batch_of(x, y))


def test_small_outputs_are_tested_in_numbers_since_graphs_do_not_show_all_hooks():
    """Such as one on a copy of the output."""

    def loss(output, target):
        scores = output.clone()
        scores.register_hook(lambda grad: grad / grad.norm())
        return entropy(scores, target)

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(SettingError, match="their gradients do not"):
        weigh(LossWeights(LossCall(loss, CPU)), batch_of(x, torch.tensor([0, 1, 2, 0])))
