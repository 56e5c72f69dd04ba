"""Weights of losses that the model computes itself, with and without terms of the caller."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.errors import SettingError
from penstock.losses.call import LossCall
from penstock.losses.loss_weights import LossWeights

CPU = torch.device("cpu")
#: Of the micro-batches of 3 and 2 samples, 1 and 2 targets count.
X = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, -100, -100, 1, 2])


class Labelled(nn.Module):
    """A model whose outputs are its scores, then its losses.

    Attributes:
        computes: functions from scores and labels to the losses.
    """

    def __init__(self, *computes) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.computes = computes

    def forward(self, x, y):
        """Return scores and losses."""
        scores = self.head(torch.tanh(self.stem(x)))
        return scores, [compute(scores, y) for compute in self.computes]


def squares(scores, _):
    """Return a mean over the samples."""
    return scores.square().mean()


def summed(scores, _):
    """Return a sum."""
    return scores.square().sum()


def features(scores, _):
    """Return a sum over features of means over samples."""
    return scores.square().mean(0).sum()


def batch():
    """Return a batch of two micro-batches."""
    return make_batch({"x": X, "y": Y}, Y, 2, step=0, training=True)


def weights_of(model, loss, *, number=0, traced=True):
    """Return the weights of a batch whose micro-batch `number` has run, and the batch."""
    inputs = {"x": X, "y": Y}
    layers = ps.chain(model, inputs).modules if traced else [model]
    weights = LossWeights(LossCall(loss, CPU), None, layers)
    whole = batch()
    return weights.of(whole, number, model(**whole.inputs[number])), whole


@pytest.mark.parametrize("number", [0, 1])
def test_the_loss_is_the_output_that_the_caller_takes(number):
    """Whatever outputs are before it. A mean over samples has the very floats of their shares."""
    model = Labelled(squares, functional.cross_entropy)
    weights, whole = weights_of(model, lambda output, _: output[1][1], number=number)
    assert weights == pytest.approx([1 / 3, 2 / 3])
    weights, whole = weights_of(model, lambda output, _: output[1][0], number=number)
    assert weights == whole.shares


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, _: output[1][0] + output[1][1],
        lambda output, _: output[1][1] + output[1][0],
        lambda output, y: output[1][1] + functional.cross_entropy(output[0], y.clamp(0)),
        lambda output, y: output[1][0] + functional.cross_entropy(output[0], y),
        lambda output, y: functional.cross_entropy(output[0], y) + output[1][0],
    ],
    ids=["two losses", "the other way round", "samples", "targets", "targets first"],
)
def test_losses_of_the_model_and_terms_of_the_caller_must_count_alike(loss):
    """One gradient begins the backward of a micro-batch, with one weight."""
    model = Labelled(squares, functional.cross_entropy)
    with pytest.raises(SettingError, match=r"the model computes its loss itself, .* differently"):
        weights_of(model, loss)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("place", "term", "expected"),
    [
        (1, functional.cross_entropy, [1 / 3, 2 / 3]),
        (0, lambda scores, _: scores.mean(), [0.6, 0.4]),
        (2, lambda scores, _: scores.sum(), [1.0, 1.0]),
    ],
)
def test_terms_of_the_caller_that_count_as_the_model_does_are_added(place, term, expected, number):
    """They are counted in every micro-batch and in the batch."""
    model = Labelled(squares, functional.cross_entropy, summed)
    weights, _ = weights_of(
        model, lambda output, y: output[1][place] + term(output[0], y), number=number
    )
    assert weights == pytest.approx(expected)


@pytest.mark.parametrize("number", [0, 1])
def test_divisors_of_a_model_that_is_not_traced_follow_from_the_micro_batch_that_has_run(number):
    """In proportion to the samples, whichever micro-batch was first; sums are not divided."""
    model = Labelled(squares, summed)
    weights, whole = weights_of(model, lambda o, _: o[1][0], number=number, traced=False)
    assert weights == whole.shares
    assert whole.loss_counts == pytest.approx({0: 9.0, 1: 6.0})
    weights, whole = weights_of(model, lambda o, _: o[1][1], number=number, traced=False)
    assert (weights, whole.loss_counts) == ([1.0, 1.0], {})


@pytest.mark.parametrize(
    "compute",
    [
        features,
        lambda scores, y: squares(scores, y) + features(scores, y),
        lambda scores, y: features(scores, y) + squares(scores, y),
    ],
)
def test_values_that_are_not_those_of_samples_are_refused_in_any_term(compute):
    """Of a model that is not traced. Their number, 3, is no multiple of the 2 samples."""
    with pytest.raises(SettingError, match="values that are not those of single samples"):
        weights_of(Labelled(compute), lambda output, _: output[1][0], number=1, traced=False)


def test_a_sum_beside_a_mean_is_no_sum():
    """Of a model that is not traced: the mean is what counts, and is checked in later batches."""
    model = Labelled(lambda scores, y: summed(scores, y) + squares(scores, y))
    weights, whole = weights_of(model, lambda output, _: output[1][0], traced=False)
    assert weights == whole.shares


class Weight(nn.Module):
    """Its output is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, y):
        """Return the weight."""
        return self.weight


def test_an_output_that_is_a_weight_has_no_divisor():
    """How it adds up is not known."""
    with pytest.raises(SettingError, match=r"cannot be read from it \(no graph\)"):
        weights_of(Weight(), lambda output, _: output * 1, traced=False)


def test_a_loss_of_the_model_itself_is_not_compared_with_counts_of_targets():
    """Its graph ends at the output, and says nothing about what it is divided by."""
    weights = LossWeights(LossCall(lambda output, _: output, CPU))
    whole = batch()
    whole.loss_counts = {0: 3.0}
    weights.check(whole, 0, torch.tensor(2.0, requires_grad=True) * 2)
