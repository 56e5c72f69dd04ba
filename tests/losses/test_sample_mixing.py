"""Losses of traced models in which the loss of a sample depends on other samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StageFailed


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
