"""Counts in graphs of models that compute their loss; tests/losses/test_model_losses.py trains them."""

from __future__ import annotations

import pytest
import torch
from tests.losses.labelled import (
    TOKENS,
    WORDS,
    Labelled,
    batch,
    count,
    likelihood,
    micro_batches_of,
    model_loss,
    one_hot,
    summed,
)
from torch import fx, nn
from torch.nn import functional

from penstock.losses.terms import UnknownForm
from penstock.losses.traced_loss import Count, ModelLoss, _column, _depends_on_contents

aten = torch.ops.aten


def alignment(scores, labels, reduction):
    """Return the loss of the alignment of all tokens with the first two labels."""
    lengths = [torch.full_like(labels[:, 0], count) for count in (TOKENS, 2)]
    rows = scores.log_softmax(-1).transpose(0, 1)
    return functional.ctc_loss(rows, labels[:, :2].clamp(min=1), *lengths, reduction=reduction)


DIVISIBLE = {
    "mean": lambda model, s, y: likelihood(s, y),
    "other padding": lambda model, s, y: likelihood(s, y.clamp(min=0), ignore_index=2),
    "padding by a size": lambda model, s, y: likelihood(
        s, y.clamp(min=0, max=s.size(1)), ignore_index=s.size(1)
    ),
    "class weights": lambda model, s, y: likelihood(s, y, weight=model.rates),
    "computed weights": lambda model, s, y: likelihood(s, y, weight=model.rates * 2),
    "probabilities": lambda model, s, y: functional.cross_entropy(
        s.reshape(-1, WORDS), one_hot(y).reshape(-1, WORDS)
    ),
    "likelihood of logarithms": lambda model, s, y: functional.nll_loss(
        s.log_softmax(-1).reshape(-1, WORDS), y.reshape(-1)
    ),
    "sum": lambda model, s, y: summed(s, y),
    "part of a sum": lambda model, s, y: -summed(s, y) / 20 * 3,
    "chosen values": lambda model, s, y: s[y != -100].square().sum(),
    "weights made in the forward": lambda model, s, y: likelihood(
        s, y, weight=torch.tensor([0.5, 1.0, 2.0, 0.0, 4.0])
    ),
    "by hand": lambda model, s, y: summed(s, y) / count(y),
    "by a factor": lambda model, s, y: (1 / count(y)) * summed(s, y),
    "by two factors": lambda model, s, y: summed(s, y) * (2 / count(y)) / y.shape[0] * 3,
    "mean by a constant": lambda model, s, y: likelihood(s, y) * 0.25 / 3,
    "by all elements": lambda model, s, y: summed(s, y) / y.numel(),
    "smoothed": lambda model, s, y: likelihood(s, y, label_smoothing=0.1, weight=model.rates + 1),
    "smoothed padding": lambda model, s, y: likelihood(
        s, y, label_smoothing=0.1, weight=torch.tensor([0.5, 1.0, 2.0, 0.5, 4.0])
    ),
    "means of sequences": lambda model, s, y: (
        likelihood(s, y, reduction="none").view(y.shape).sum(1) / (y != -100).sum(1).clamp(min=1)
    ).mean(),
    "at least one": lambda model, s, y: summed(s, y) / count(y).clamp(min=1),
    "one more": lambda model, s, y: summed(s, y) / (count(y) + 1),
    "by the root": lambda model, s, y: summed(s, y) / count(y).float().sqrt().clamp(min=0.1),
    "by a flag": lambda model, s, y: summed(s, y) * (y != -100).any().float(),
    "alignments": lambda model, s, y: alignment(s, y, "mean"),
    "sum of alignments": lambda model, s, y: alignment(s, y, "sum"),
    "squares": lambda model, s, y: functional.mse_loss(s, one_hot(y)),
    "sum of squares": lambda model, s, y: functional.mse_loss(s, one_hot(y), reduction="sum"),
    "distances": lambda model, s, y: functional.l1_loss(s, one_hot(y)),
    "smooth distances": lambda model, s, y: functional.smooth_l1_loss(s, one_hot(y)),
    "huber": lambda model, s, y: functional.huber_loss(s, one_hot(y)),
    "binary": lambda model, s, y: functional.binary_cross_entropy_with_logits(s, one_hot(y)),
    "margins": lambda model, s, y: functional.soft_margin_loss(s, one_hot(y) * 2 - 1),
    "mean by hand": lambda model, s, y: s.square().mean(),
    "mean of a number": lambda model, s, y: likelihood(s, y).mean().sum(),
    "mean of means": lambda model, s, y: s.square().mean((1, 2)).mean(),
    "sum of means": lambda model, s, y: s.square().mean((1, 2)).sum(),
    "sum of a choice": lambda model, s, y: s[y != -100].square().sum() / count(y),
    "mean of chosen classes": lambda model, s, y: functional.cross_entropy(
        s[y != -100], y[y != -100]
    ),
    "two terms": lambda model, s, y: likelihood(s, y) - 0.5 * likelihood(s.flip(-1), y),
    "stacked terms": lambda model, s, y: torch.stack(
        [likelihood(s, y), likelihood(s.flip(-1), y), y.float().mean() * 0]
    ).mean(),
    "sum of a stack": lambda model, s, y: torch.stack([summed(s, y), s.square().sum()]).sum(0),
    "with a constant": lambda model, s, y: summed(s, y) / count(y) + 0 * y.float().mean(),
    "another shape": lambda model, s, y: likelihood(s, y).view(1).squeeze(0).double().float(),
}
#: Losses with the number of samples as a constant: the model has a graph for each number.
OF_ONE_SIZE = {
    "by samples": lambda model, s, y: summed(s, y) / len(y),
    "by a share of samples": lambda model, s, y: (2 / len(y)) * summed(s, y) * 0.5,
}
TWO_TERMS = ("two terms", "stacked terms", "sum of a stack")


@pytest.fixture(scope="module")
def divisible():
    """By loss that can be divided: its model, what reads it, and its place."""
    entries = {}
    for losses in (DIVISIBLE, OF_ONE_SIZE):
        model = Labelled(*losses.values())
        reader = model_loss(model, batch())
        entries |= {name: (model, reader, place) for place, name in enumerate(losses)}
    return entries


@pytest.mark.parametrize("name", [*DIVISIBLE, *OF_ONE_SIZE])
def test_weighted_losses_of_micro_batches_are_the_loss_of_the_batch(divisible, name):
    """Whatever a loss is divided by; micro-batches without weight count nothing."""
    model, reader, place = divisible[name]
    x = batch()
    micro_batches = micro_batches_of(x)
    columns = reader.weights(micro_batches, place + 1)
    assert len(columns) == (2 if name in TWO_TERMS else 1)
    losses = [float(model(**part)[1][place].detach()) for part in micro_batches.inputs]
    for column in columns:
        parts = zip(column, losses, strict=True)
        total = sum(weight * loss for weight, loss in parts if weight)
        assert total == pytest.approx(float(model(**x)[1][place].detach()), rel=1e-5)


def test_a_batch_that_counts_nothing_has_the_shares_of_its_samples(divisible):
    """As plain training: the mean is NaN, and the sum 0."""
    x = batch()
    x["labels"].fill_(-100)
    micro_batches = micro_batches_of(x)
    _, reader, place = divisible["mean"]
    assert reader.weights(micro_batches, place + 1) == [micro_batches.shares]


REFUSED = {
    "classes of rows": (
        lambda model, s, y: functional.cross_entropy(
            s.mean(1) @ s.mean(1).t(), torch.arange(s.shape[0])
        ),
        "classes that are the numbers of the samples",
    ),
    "computed classes": (
        lambda model, s, y: likelihood(s, s.argmax(-1)),
        "targets that depend on outputs",
    ),
    "a computed factor": (
        lambda model, s, y: summed(s, y) / s.square().sum(),
        "a factor that depends on outputs",
    ),
    "trained weights": (
        lambda model, s, y: likelihood(s, y, weight=(model.gains * s.mean((0, 1))).detach()),
        "class weights that the model computes",
    ),
    "a penalty on weights": (
        lambda model, s, y: s.square().sum() + model.head.weight.square().sum(),
        "values that are not those of single samples",
    ),
    "a rounded quotient": (
        lambda model, s, y: torch.div(summed(s, y), 3, rounding_mode="floor"),
        "a quotient that is rounded",
    ),
    "pairs of samples": (
        lambda model, s, y: (s.mean(1) @ s.mean(1).t()).square().mean(),
        "values that are not those of single samples",
    ),
    "a mean of a choice": (
        lambda model, s, y: s[y != -100].square().mean(),
        "a mean over elements that are chosen by their contents",
    ),
    "smoothing without weight": (
        lambda model, s, y: likelihood(
            s, y * 0 + 1, label_smoothing=0.1, weight=torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
        ),
        "label smoothing of targets whose class weights are all 0",
    ),
    "a root": (lambda model, s, y: likelihood(s, y).sqrt(), "sqrt"),
    "no reduction": (
        lambda model, s, y: likelihood(s, y, reduction="none").mean().exp(),
        "exp",
    ),
}


@pytest.fixture(scope="module")
def refused():
    """What reads the losses that cannot be divided."""
    return model_loss(Labelled(*(compute for compute, _ in REFUSED.values())), batch())


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_are_unknown_with_their_reason(refused, name):
    """Samples interact in them, or the divisor is not known before the forwards."""
    place = list(REFUSED).index(name)
    with pytest.raises(UnknownForm, match=REFUSED[name][1]):
        refused.weights(micro_batches_of(batch()), place + 1)


def counts_of(*values, elements=(None,) * 3):
    """Return counts of three micro-batches."""
    return [Count(value, number) for value, number in zip(values, elements, strict=True)]


def test_the_weight_of_a_micro_batch_is_its_count_by_that_of_the_batch():
    """Without any count the shares of samples are taken; a sum counts 1 in all of them."""
    shares = [0.5, 0.3, 0.2]
    assert _column(counts_of(1.0, 0.0, 4.0), Count(2.0), shares) == [0.5, 0.0, 2.0]
    assert _column(counts_of(0.0, 1.0, 0.0), Count(0.0), shares) == shares
    assert _column(counts_of(None, None, None), Count(None), shares) == [1.0] * 3
    for values, total in (((None, 1.0, 1.0), 2.0), ((1.0, 1.0, 1.0), None), ((None,) * 3, 3.0)):
        with pytest.raises(UnknownForm, match="terms that come and go"):
            _column(counts_of(*values), Count(total), shares)


def test_a_term_reduces_as_many_elements_of_every_sample():
    """Where their numbers are known; a batch without elements has no shares of them."""
    shares = [0.5, 0.3, 0.2]
    fits = counts_of(None, None, None, elements=(10, 6, 4))
    assert _column(fits, Count(None, 20), shares) == [1.0] * 3
    assert _column(fits, Count(None, None), shares) == [1.0] * 3
    assert (
        _column(counts_of(1.0, 1.0, 1.0, elements=(0, 0, 0)), Count(4.0, 0), shares) == [0.25] * 3
    )
    for elements in ((10, 6, 5), (11, 6, 4), (2, 2, 2)):
        with pytest.raises(UnknownForm, match="not those of single samples"):
            _column(counts_of(None, None, None, elements=elements), Count(None, 20), shares)
    partly = counts_of(1.0, 1.0, 1.0, elements=(None, 6, None))
    assert _column(partly, Count(4.0, 20), shares) == [0.25] * 3


def test_only_a_last_layer_that_is_traced_computes_a_loss_of_its_own():
    """A stage may have no layers."""
    assert ModelLoss.of([], torch.device("cpu")) is None
    assert ModelLoss.of([nn.Linear(1, 1)], torch.device("cpu")) is None


def test_numbers_of_rows_do_not_depend_on_contents():
    """A contrastive loss takes each sample's own place as its class."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    places = graph.call_function(aten.arange.default, (size,))
    zeros = graph.call_function(aten.zeros_like.default, (x,))
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    both = graph.call_function(aten.add.Tensor, (places, doubled))
    neither = graph.call_function(aten.add.Tensor, (places, zeros))
    answers = [
        _depends_on_contents(node) for node in (x, size, places, zeros, doubled, both, neither)
    ]
    assert answers == [True, False, False, False, True, True, False]
