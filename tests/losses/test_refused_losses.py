"""Losses that cannot be divided into micro-batches are refused; those that can are not."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from tests.losses.undivided import (
    CLASSES,
    WEIGHTS,
    batch,
    check_gradients,
    contrastive,
    cross_entropy,
    masked_mean,
    model,
    pipeline,
    plain,
    rows,
    train,
)
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import SettingError, StageFailed

REFUSED = {
    "contrastive": contrastive,
    "root": lambda output, target: masked_mean(output, target).sqrt(),
    "two means": lambda output, target: cross_entropy(output, target) + output.square().mean(),
    "mean over what the output chooses": lambda output, _: output[output > 0].mean(),
    "spread": lambda output, _: output.var(),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera", "seq1f1b"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_divided_is_refused_with_its_numbers(name, schedule):
    """Each of these trains plainly, and would train something else in micro-batches."""
    pipe = pipeline(model(), REFUSED[name], schedule)
    with pytest.raises(
        StageFailed,
        match=r"the loss of a batch is not made of .* both joined have .* Ways out: .*loss_on",
    ):
        train(pipe, 3)


@pytest.mark.parametrize("training", [False, True])
def test_label_smoothing_without_any_class_weight_is_refused(training):
    """Plain training divides the smoothing of these samples by the weights of the others."""
    weight = WEIGHTS.clone()
    weight[0] = 0.0
    x, y = batch()
    y[3:5] = 0
    loss = functools.partial(cross_entropy, weight=weight, label_smoothing=0.1)
    pipe = pipeline(model(), loss)
    with pytest.raises(StageFailed, match="all targets of micro-batch 1 have a class weight of 0"):
        (pipe.train_batch if training else pipe.eval_batch)(x, y)


def by_frequency(output, target):
    """Classes that occur often in the batch weigh less."""
    return functional.cross_entropy(
        output, target, weight=1 / target.bincount(minlength=3).clamp(1)
    )


def mean_of_classes(output, target):
    """Every class of the batch counts the same."""
    losses = [functional.cross_entropy(output[target == i], target[target == i]) for i in range(3)]
    return torch.stack([loss for loss in losses if not loss.isnan()]).mean()


def pull_together(output, target):
    """Samples of one class attract each other."""
    same = (target[:, None] == target).float()
    return (torch.cdist(output, output).square() * same).sum() / len(target)


@pytest.mark.parametrize("loss", [by_frequency, mean_of_classes, pull_together])
def test_a_loss_that_depends_on_how_often_a_class_occurs_is_refused(loss):
    """Also if the micro-batches that are compared have no class in common, so that it adds up there."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    pipe = ps.Pipeline(layers, loss=loss, balance=[1, 1], micro_batches=3, executor="threads")
    with pytest.raises(StageFailed, match="in which the same targets occur"):
        pipe.train_batch(x, y)


def compare_neighbours(output, target):
    """Samples that follow each other in the order of the targets."""
    order = (target[:-1] - target[1:]).sign().float()
    return functional.margin_ranking_loss(output[:-1, 0], output[1:, 0], order, margin=0.1)


@pytest.mark.parametrize(("seed", "micro_batches"), [(0, 3), (1, 3), (2, 3), (3, 3), (4, 6)])
def test_a_loss_that_compares_neighbours_is_refused(seed, micro_batches):
    """The pair between two micro-batches is missing, also where its margin is kept. A micro-batch of
    one sample has no pair, and would be left out as one in which nothing counts.
    """
    torch.manual_seed(seed)
    x, y = torch.randn(6, 4), torch.randint(0, 9, (6,))
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    options = {"balance": [1, 1], "micro_batches": micro_batches, "executor": "threads"}
    pipe = ps.Pipeline(layers, loss=compare_neighbours, **options)
    words = "with their neighbours" if micro_batches == 6 else "Either samples see each other"
    with pytest.raises(StageFailed, match=words):
        pipe.train_batch(x, y)


def test_a_loss_of_torch_that_broadcasts_its_samples_is_refused():
    """Outputs (n, 1) and targets (n,) give n x n differences: of a micro-batch, other ones."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pipe = ps.Pipeline(
        net, loss=functional.mse_loss, balance=[1, 1], micro_batches=2, executor="threads"
    )
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with (
        pytest.warns(UserWarning, match="broadcasting"),
        pytest.raises(StageFailed, match=r"the loss of a batch is not made of .* both joined have"),
    ):
        pipe.train_batch(x, x.sum(1))
    pipe.train_batch(x, x.sum(1, keepdim=True))


def flooding(output, target, level=0.01):
    """Ishida et al., 2020: a mean below a level is pushed up to it. Here it is always above."""
    return (functional.cross_entropy(*rows(output, target.clamp(0))) - level).abs() + level


def over_its_value(output, target):
    """A loss whose value is 1 on every batch."""
    mean = cross_entropy(output, target.clamp(0))
    return mean / mean.item()


def balanced(output, target):
    """Two terms, of which one is scaled to the size of the other."""
    mean, square = cross_entropy(output, target.clamp(0)), output.square().mean()
    return mean + square * (mean.detach() / square.detach())


def clamped(output, _):
    """Means of features, of which the small ones do not count. Here none is."""
    return output.square().mean(0).clamp(min=1e-9).sum() / 8


def larger(output, _):
    """The same with a comparison that leaves no trace in the graph."""
    return max(output.square().mean(), torch.tensor(0.02))


REFUSED_BY_GRAPH = {
    "flooding": (flooding, "nonlinear function of a mean or sum over samples: abs acts"),
    "clamped means": (clamped, "nonlinear function of a mean or sum over samples: clamp acts"),
    "over its value": (over_its_value, "These values add up, their gradients do not"),
    "balanced": (balanced, "is not made of"),
    "larger": (larger, "is not made of"),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera"])
@pytest.mark.parametrize("name", REFUSED_BY_GRAPH)
def test_a_loss_whose_values_add_up_but_whose_gradients_do_not_is_refused(name, schedule):
    """Of each, the losses of micro-batches add up to the loss of the first batches."""
    loss, message = REFUSED_BY_GRAPH[name]
    pipe = pipeline(model(), loss, schedule)
    with pytest.raises(StageFailed, match=message):
        train(pipe, 1)


MIXED = {
    "softmax over samples": lambda o, y: functional.cross_entropy(
        o[:, 0].T.log_softmax(-1).T, y[:, 0].clamp(0)
    ),
    "samples left out": lambda o, y: functional.cross_entropy(
        torch.narrow(o, -3, 0, len(o) - 1)[:, 0], y[1:, 0].clamp(0)
    ),
    "targets of other samples": lambda o, y: functional.cross_entropy(
        o[:, 0], y[:, 0].clamp(0).roll(1)
    ),
    "weights of the targets": lambda o, y: functional.cross_entropy(
        o[:, 0],
        y[:, 0].clamp(0),
        weight=torch.bincount(y[:, 0].clamp(0), minlength=CLASSES).float(),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_cross_entropy_over_several_samples_does_not_count_as_one_per_row(name, monkeypatch):
    """The graph of each ends in the likelihood that the numeric test is left out for, where outputs
    are large.
    """
    monkeypatch.setattr("penstock.losses.loss_weights._LARGE_OUTPUT", 0)
    with pytest.raises(StageFailed, match="is not made of"):
        train(pipeline(model(), MIXED[name], "gpipe"), 1)


@pytest.mark.parametrize("large", [False, True], ids=["tested", "by its graph"])
def test_a_hook_that_rescales_the_gradient_of_the_output_is_refused(large, monkeypatch):
    """By the norm over the whole batch, which no micro-batch has; the graph is that of a plain
    cross entropy.
    """

    def loss(output, target):
        output.register_hook(lambda grad: grad / grad.norm())
        return functional.cross_entropy(*rows(output, target.clamp(0)))

    if large:
        monkeypatch.setattr("penstock.losses.loss_weights._LARGE_OUTPUT", 0)
    with pytest.raises(StageFailed, match="their gradients do not"):
        train(pipeline(model(), loss), 1)


def test_nonlinear_functions_of_single_samples_are_no_obstacle():
    """Each sample's loss is one number, and the graph has as many of them as there are samples."""

    def loss(output, target):
        means = [
            cross_entropy(output[i : i + 1], target.clamp(0)[i : i + 1]) for i in range(len(output))
        ]
        return sum((mean - 0.01).abs().exp() for mean in means) / len(means)

    expected, gradients = plain(loss, *batch())
    net = model()
    assert math.isclose(train(pipeline(net, loss), 1)[0], expected, rel_tol=1e-5)
    check_gradients(net, gradients)


def test_a_loss_that_draws_is_said_to_be_untested():
    """Its numbers are others for each part of a batch, so they cannot be compared."""

    def loss(output, target):
        order = torch.randperm(len(target))
        return cross_entropy(output, target.clamp(0)[order])

    with pytest.warns(UserWarning, match="could not be tested, for the loss draws random"):
        train(pipeline(model(), loss), 1)


def test_one_micro_batch_allows_any_loss():
    """Nothing is divided."""
    x, y = batch()
    for loss in REFUSED.values():
        net = model()
        expected, grads = plain(loss, x, y)
        total = float(pipeline(net, loss, micro_batches=1).train_batch(x, y))
        assert total == pytest.approx(expected, rel=1e-5)
        check_gradients(net, grads)


def test_a_count_that_depends_on_the_output_is_refused():
    """It is known too late."""

    def loss(output, _):
        positive = output > 0
        return output[positive].sum(), positive.sum()

    pipe = pipeline(model(), loss)
    with pytest.raises(StageFailed, match=r"micro-batch \d is divided by .* Ways out"):
        pipe.train_batch(*batch())


def test_a_divisor_that_needs_real_values_is_computed_by_an_evaluation():
    """The loss goes through NumPy, and its count does not depend on the output."""

    def loss(output, target):
        assert output.detach().numpy().size
        return cross_entropy(output, target, reduction="sum"), (target != -100).sum()

    x, y = batch()
    for schedule in ("1f1b", "seq1f1b"):
        net = model()
        expected, grads = plain(loss, x, y)
        total = float(pipeline(net, loss, schedule).train_batch(x, y))
        assert total == pytest.approx(expected, rel=1e-5)
        check_gradients(net, grads)


def test_a_loss_that_is_no_function_and_words_that_mean_nothing_are_refused():
    """Before anything runs."""
    for options, words in (
        ({"loss_weight": 3}, "loss_weight must be a function"),
        ({"loss_on": "sample"}, "loss_on must be 'micro_batch' or 'batch'"),
        (
            {"loss_on": "batch", "loss_weight": len, "schedule": "gpipe"},
            "loss_weight has no effect",
        ),
    ):
        with pytest.raises(SettingError, match=words):
            pipeline(model(), cross_entropy, **options)
    with pytest.raises(SettingError, match="loss must be a function of output and target"):
        pipeline(model(), 3)
