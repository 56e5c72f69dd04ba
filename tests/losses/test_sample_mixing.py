"""Losses of traced models in which the loss of a sample depends on other samples."""

from __future__ import annotations

import pytest
import torch
from tests.losses.labelled import (
    TOKENS,
    WORDS,
    Labelled,
    batch,
    likelihood,
    micro_batches_of,
    model_loss,
    one_hot,
)
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StageFailed
from penstock.losses.terms import UnknownForm


class Model(nn.Module):
    """A model that computes its loss itself, and may mix samples between its layers."""

    def __init__(self, loss, between=torch.tanh):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 5)
        self.loss, self.between = loss, between

    def forward(self, x, y):
        """Return the loss."""
        return self.loss(self.second(self.between(self.first(x))), y)


def train(loss, **options):
    """Return the losses of the pipeline and of the whole batch."""
    model = Model(loss, **options)
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 3, 4, 0])
    pipe = ps.Pipeline(
        ps.chain(model, (x, y)),
        loss=lambda output, _: output,
        balance=[1, 1],
        schedule="gpipe",
        micro_batches=2,
        executor="threads",
    )
    return float(pipe.train_batch((x, y), y)), float(model(x, y))


def centred(value):
    """Return the differences from the mean over the samples."""
    return value - value.mean(0)


def test_a_loss_over_differences_from_the_mean_of_the_samples_is_refused():
    """That of a micro-batch has another mean: the sum of such losses is not that of the batch."""
    with pytest.raises(StageFailed, match="the model computes its loss itself"):
        train(lambda output, _: centred(output).square().mean())


def test_a_loss_of_a_sample_over_the_targets_of_others_is_refused():
    """A micro-batch has other targets than the batch, also where no output is among them."""
    with pytest.raises(StageFailed, match=r"\(mean over samples, whose losses then depend on"):
        train(lambda output, y: (output - y.float().mean()).square().mean())


def test_a_factor_over_all_targets_belongs_to_the_divisor():
    """It is known for every micro-batch and for the batch."""
    total, whole = train(lambda output, y: output.square().mean() * y.float().max() / y.sum())
    assert total == pytest.approx(whole, rel=1e-5)


def by_frequency(output, y):
    """Return a loss that weighs classes by how often they occur in the batch."""
    counts = functional.one_hot(y, 5).sum(0)
    return functional.cross_entropy(output, y, weight=1.0 / (counts + 1))


def by_equal_samples(output, y):
    """Return a loss that divides by the number of samples of the same class."""
    loss = functional.cross_entropy(output, y, reduction="none")
    return (loss / (y[:, None] == y).sum(1)).sum()


def divided_first(output, y):
    """Return a mean over the samples that count, as a sum of parts of the mean."""
    counts = y != 0
    return (functional.cross_entropy(output, y, reduction="none") * counts / counts.sum()).sum()


@pytest.mark.parametrize("loss", [by_frequency, by_equal_samples, divided_first])
def test_a_loss_that_combines_targets_of_samples_is_refused(loss):
    """They are other ones in a micro-batch; a divisor of the whole loss may combine them."""
    with pytest.raises(StageFailed, match="over samples, whose losses then depend on others"):
        train(loss)


def test_targets_may_select_samples_and_be_counted_in_the_divisor():
    """The weight of a micro-batch follows from its count."""

    def selected(output, y):
        loss = functional.cross_entropy(output[y > 0], y[y > 0], reduction="sum")
        return loss / (y > 0).sum()

    total, whole = train(selected)
    assert total == pytest.approx(whole, rel=1e-5)


def test_layers_may_mix_samples_and_then_work_per_micro_batch():
    """As batch normalisation does; only what lies behind the last weights is the loss."""
    loss, _ = train(functional.cross_entropy, between=centred)
    model = Model(functional.cross_entropy, between=centred)
    torch.manual_seed(0)
    Model(functional.cross_entropy)
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 3, 4, 0])
    parts = zip(x.chunk(2), y.chunk(2), strict=True)
    assert loss == pytest.approx(sum(float(model(*part)) for part in parts) / 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, y: (output - output.mean(1, keepdim=True)).square().mean(),
        lambda output, y: (output / output.detach().norm(dim=1, keepdim=True)).sum(),
        lambda output, y: functional.cross_entropy(output + output.new_zeros(5), y),
    ],
)
def test_what_combines_values_of_one_sample_is_the_loss_of_the_batch(loss):
    """Along other dimensions, and with values that take their type alone from the output."""
    total, whole = train(loss)
    assert total == pytest.approx(whole, rel=1e-5)


#: Losses whose samples do not see each other, though ops in them combine other values.
SINGLE = {
    "values about a mean over tokens": lambda model, s, y: (s - s.mean(1, True)).square().mean(),
    "shares in tokens": lambda model, s, y: s.cumsum(1).softmax(1).square().sum(),
    "pairs of tokens": lambda model, s, y: torch.cdist(s, s).amax(2).mean(),
    "products of samples": lambda model, s, y: torch.einsum("itd,itd->i", s, s).mean(),
    "products of one operand": lambda model, s, y: torch.einsum("i...->i", s).square().mean(),
    "attention to tokens": lambda model, s, y: (
        functional.scaled_dot_product_attention(s, s, s).square().mean()
    ),
    "normalised features": lambda model, s, y: functional.layer_norm(s, (WORDS,)).exp().mean(),
    "tokens by targets": lambda model, s, y: s[
        torch.arange(len(s)), y.clamp(0, TOKENS - 1)[:, 0]
    ].sum(),
    "places by targets": lambda model, s, y: s[(y[:, 0] > 1).nonzero()[:, 0]].square().sum(),
}


@pytest.fixture(scope="module")
def single():
    """A model with the losses of single samples, and what reads them."""
    model = Labelled(*SINGLE.values())
    return model, model_loss(model, batch())


@pytest.mark.parametrize("name", SINGLE)
def test_ops_within_single_samples_are_accepted(single, name):
    """Along tokens and features, and by targets of the same sample: the losses add up."""
    (model, reader), place, x = single, list(SINGLE).index(name), batch()
    micro_batches = micro_batches_of(x)
    (weights,) = reader.weights(micro_batches, place + 1)
    losses = [float(model(**part)[1][place].detach()) for part in micro_batches.inputs]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    assert total == pytest.approx(float(model(**x)[1][place].detach()), rel=1e-5)


MIXING = {
    "a mean of sums over samples": (
        lambda model, s, y: s.square().sum(0).mean(),
        "sum over samples",
    ),
    "a sum of means over samples": (
        lambda model, s, y: s.square().mean(0).sum(),
        "mean over samples",
    ),
    "squares of means over samples": (
        lambda model, s, y: functional.mse_loss(s.mean(0), one_hot(y).mean(0), reduction="sum"),
        "mean over samples",
    ),
    "rows in a stack": (
        lambda model, s, y: torch.stack([s.mean((0, 1)), s[0, 0]]).mean(),
        "select over samples",
    ),
    "values about a mean over samples": (
        lambda model, s, y: (s - s.mean(0)).square().mean(),
        "mean over samples",
    ),
    "values by the largest of all": (
        lambda model, s, y: (s / s.abs().amax((0, 2), keepdim=True)).square().sum(),
        "amax over samples",
    ),
    "shares in all samples": (lambda model, s, y: s.softmax(0).square().mean(), "softmax over"),
    "a cumulative sum": (lambda model, s, y: s.cumsum(0).square().sum(), "cumsum over samples"),
    "differences of neighbours": (lambda model, s, y: (s - s.roll(1, 0)).abs().mean(), "roll over"),
    "a roll of all elements": (lambda model, s, y: (s - s.roll(1)).abs().mean(), "roll over"),
    "products with others": (lambda model, s, y: (s * s.flip(-1, 0)).sum(), "flip over samples"),
    "rows of pairs": (
        lambda model, s, y: (s.mean(1) @ s.mean(1).t()).mean(1).square().mean(),
        "mean over samples",
    ),
    "nearest samples": (
        lambda model, s, y: torch.cdist(s.mean(1), s.mean(1)).amax(1).mean(),
        "amax over samples",
    ),
    "products with all samples": (
        lambda model, s, y: (s.mean(1) @ s.mean(1).t() @ s.mean(1)).square().mean(),
        "matmul over samples",
    ),
    "samples of the same target": (
        lambda model, s, y: (s.mean((1, 2)) * (y[:, :1] == y[:, 0]).sum(1)).sum(),
        "sum over samples",
    ),
    "products of pairs": (
        lambda model, s, y: torch.einsum("itd,jtd->it", s, s).square().mean(),
        "einsum over samples",
    ),
    "products with any dimensions": (
        lambda model, s, y: torch.einsum("i...,j... -> i...", s, s).square().mean(),
        "einsum over samples",
    ),
    "normalised over the batch": (
        lambda model, s, y: (
            functional.batch_norm(s[:, 0], None, None, training=True).square().mean()
        ),
        "batch_norm over samples",
    ),
    "attention to samples": (
        lambda model, s, y: (
            functional.scaled_dot_product_attention(*[s.transpose(0, 1)] * 3).square().mean()
        ),
        "scaled_dot_product_attention over samples",
    ),
    "samples by targets": (
        lambda model, s, y: (s[:, 0] * s[y[:, 0].clamp(0, 1), 0]).sum(),
        "index over samples",
    ),
    "gathered samples": (
        lambda model, s, y: (s * s.gather(0, y.clamp(0, 1)[..., None].expand_as(s))).sum(),
        "gather over samples",
    ),
    "selected samples": (
        lambda model, s, y: (s * s.index_select(0, y[:, 0].clamp(0, 1))).sum(),
        "index_select over samples",
    ),
    "by the number of a target": (
        lambda model, s, y: (s.mean((1, 2)) / y[:, 0].clamp(0).bincount()[y[:, 0].clamp(0)]).sum(),
        "index over samples",
    ),
    "taken elements": (lambda model, s, y: (s * s.take(y.clamp(0))[..., None]).sum(), "take over"),
    "shares in all targets": (
        lambda model, s, y: (s.mean((1, 2)) * y.abs().sum(1) / y.abs().sum()).sum(),
        "sum over samples",
    ),
    "values by the largest target": (
        lambda model, s, y: (s / (y.max() + 1)).square().mean(),
        "max over samples",
    ),
    "targets of neighbours": (lambda model, s, y: likelihood(s, y.roll(1, 0)), "roll over samples"),
    "weights by earlier targets": (
        lambda model, s, y: (s.mean(2) * y.cumsum(0)).sum(),
        "cumsum over samples",
    ),
    "ranks among the samples": (
        lambda model, s, y: (s.sort(0).values * s).mean(),
        "sort over samples",
    ),
}


@pytest.fixture(scope="module")
def mixing():
    """What reads the losses in which samples see each other."""
    return model_loss(Labelled(*(compute for compute, _ in MIXING.values())), batch())


@pytest.mark.parametrize("name", MIXING)
def test_ops_over_several_samples_are_refused_by_name(mixing, name):
    """The loss of a sample then depends on others, which may be in another micro-batch."""
    place = list(MIXING).index(name)
    with pytest.raises(UnknownForm, match=MIXING[name][1]):
        mixing.weights(micro_batches_of(batch()), place + 1)
