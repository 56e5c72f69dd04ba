"""The numeric test of how losses add up: its arithmetic, and losses of every kind."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from penstock.errors import SettingError
from penstock.losses.probe import (
    GradientFit,
    Pair,
    Reading,
    ReturnsCount,
    consistent,
    readings,
    repeat_samples,
)


@pytest.mark.parametrize("seed", range(10))
def test_the_distance_of_gradients_is_that_of_the_norm(seed):
    """Over all leaves together, also of complex ones; the factor minimises it."""
    generator = torch.Generator().manual_seed(seed)
    alone = [
        torch.randn(3, generator=generator, dtype=torch.float64),
        torch.randn(2, 2, generator=generator, dtype=torch.complex128),
    ]
    joined = [
        torch.randn(3, generator=generator, dtype=torch.float64),
        torch.randn(2, 2, generator=generator, dtype=torch.complex128),
    ]
    fit = GradientFit.of(alone, joined)

    def distance(weight):
        rest = [b - weight * a for a, b in zip(alone, joined, strict=True)]
        return math.sqrt(sum(float(part.abs().square().sum()) for part in rest))

    for weight in (0.0, 0.3, -1.0, 2.0, fit.factor):
        assert fit.distance(weight) == pytest.approx(distance(weight))
    assert fit.distance(fit.factor) == pytest.approx(fit.remainder)
    assert distance(fit.factor) <= min(distance(fit.factor + 0.01), distance(fit.factor - 0.01))
    assert fit.alone == pytest.approx(distance_of(alone))
    assert fit.joined == pytest.approx(distance_of(joined))
    zero = GradientFit.of([part * 0 for part in alone], joined)
    assert (zero.factor, zero.distance(5.0)) == (0.0, pytest.approx(distance_of(joined)))


def distance_of(parts):
    """The norm of several tensors."""
    return math.sqrt(sum(float(part.abs().square().sum()) for part in parts))


def test_values_fit_within_the_tolerance_of_their_size():
    """Of terms that cancel the size is that of the terms; a part of weight 0 may be NaN."""
    assert Reading(1.0, 3.0, 2.5, 1e-6).values_fit((0.25, 0.75))
    assert Reading(1.0, 3.0, 2.5 + 2.4e-6, 1e-6).values_fit((0.25, 0.75))
    assert not Reading(1.0, 3.0, 2.5 + 2.6e-6, 1e-6).values_fit((0.25, 0.75))
    assert Reading(1000.0, -1000.0, 0.0015, 1e-6).values_fit((1.0, 1.0))
    assert not Reading(1000.0, -1000.0, 0.0025, 1e-6).values_fit((1.0, 1.0))
    assert Reading(math.nan, 3.0, 3.0, 1e-6).values_fit((0.0, 1.0))
    assert not Reading(math.nan, 3.0, 3.0, 1e-6).finite
    assert not Reading(3.0, 3.0, math.inf, 1e-6).finite
    assert not Reading(3.0, -math.inf, 3.0, 1e-6).finite


def test_gradients_of_both_parts_count_together():
    """Each with its own weight, relative to the joined gradient."""
    exact = GradientFit(0.5, 0.0, 2.0, 1.0)
    off = GradientFit(0.5, 0.003, 2.0, 1.0)
    for gradients, fits in (((exact, exact), True), ((exact, off), False), ((off, exact), False)):
        reading = Reading(1.0, 1.0, 1.0, 1e-3, gradients)
        assert reading.fits((0.5, 0.5)) is fits
        assert Reading(1.0, 1.0, 1.0, 3e-3, gradients).fits((0.5, 0.5))
        assert not reading.fits((0.4, 0.6))
    assert Reading(1.0, 1.0, 1.0, 1e-3, (exact, off)).values_fit((0.5, 0.5))
    assert not Reading(1.0, 1.0, 1.5, 1e-3, (exact, exact)).fits((0.5, 0.5))


def test_the_first_weighting_that_fits_all_readings_is_taken():
    """In the order of the mapping; one misfit is enough."""
    weights = {"counts": (0.5, 0.5), "shares": (0.25, 0.75), "sums": (1.0, 1.0)}
    mean, both = Reading(1.0, 3.0, 2.5, 1e-6), Reading(2.0, 2.0, 2.0, 1e-6)
    assert consistent([mean, both], weights) == "shares"
    assert consistent([both], weights) == "counts"
    assert consistent([mean, both, Reading(1.0, 1.0, 2.0, 1e-6)], weights) is None
    assert consistent([Reading(1.0, 1.0, 2.0, 1e-6)], weights) == "sums"


def pair_of(sizes, *, dim=0, count=3, dtype=torch.float32):
    """Two parts with the targets of a regression."""
    generator = torch.Generator().manual_seed(3)
    shape = (count, 4, 2) if dim == 0 else (2, count, 4)

    def target(size):
        return torch.randn([*shape[:dim], size, *shape[dim + 1 :]], generator=generator).to(dtype)

    output = torch.randn(shape, generator=generator).to(dtype)
    return Pair((target(sizes[0]), target(sizes[1])), sizes, output, dim, count)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 3), (4, 1), (7, 7)])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (functional.mse_loss, "shares"),
        (lambda x, y: (x - y).square().sum(), "sums"),
        (lambda x, y: (x - y).square().mean().sqrt(), None),
        (lambda x, y: (x.flatten() - y.flatten().mean()).abs().max(), None),
        (lambda x, y: (x - y).square().mean() / (x - y).square().mean().detach(), None),
    ],
    ids=["mean", "sum", "root", "maximum", "detached"],
)
def test_how_losses_add_up_is_read_from_values_and_gradients(loss, expected, sizes, dim):
    """Parts of any sizes, of samples and of tokens."""
    pair = pair_of(sizes, dim=dim)
    total = sum(sizes)
    weights = {"shares": (sizes[0] / total, sizes[1] / total), "sums": (1.0, 1.0)}
    results = readings(loss, pair)
    assert len(results) == 5
    assert len(readings(loss, pair, brief=True)) == 1
    assert consistent(results, weights) == expected


def test_a_bend_that_no_value_shows_is_read_from_the_graph():
    """Flooding: all losses are above the level."""

    def flooded(output, target):
        loss = (output - target).square().mean()
        return (loss - 1e-9).abs() + 1e-9

    results = readings(flooded, pair_of((2, 3)))
    assert {reading.nonlinear for reading in results} == {"Abs"}
    results = readings(lambda x, y: (x - y).abs().mean(), pair_of((2, 3)))
    assert {reading.nonlinear for reading in results} == {None}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-4), (torch.bfloat16, 0.03)]
)
def test_the_tolerance_is_that_of_the_coarsest_dtype(dtype, tolerance):
    """Of losses and outputs: a loss in float32 of outputs in bfloat16 is as coarse as these."""
    pair = pair_of((2, 3), dtype=dtype)
    results = readings(lambda x, y: (x - y).double().square().mean(), pair, brief=True)
    assert results[0].tolerance == tolerance


def test_what_the_loss_refuses_of_changed_outputs_is_left_out_and_nothing_is_changed():
    """Its own outputs must do; it may change what it gets in place."""
    pair = pair_of((2, 3))
    before = [tensor.clone() for tensor in (*pair.targets, pair.output)]
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) > 3:
            raise ValueError("not such values")
        target.mul_(2)
        return (output.mul_(2) - target).square().mean()

    assert len(readings(loss, pair)) == 1
    assert all(map(torch.equal, before, (*pair.targets, pair.output)))
    assert pair.output.grad is None

    def refuse(output, target):
        raise ValueError("none at all")

    with pytest.raises(ValueError, match="none at all"):
        readings(refuse, pair)
    with pytest.raises(ReturnsCount):
        readings(lambda x, y: (x.sum(), 5), pair)
    assert readings(lambda x, y: x.sum() * math.nan, pair) == []


@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_are_repeated_to_as_many_samples(dim):
    """Several rows per sample stay together; other leaves are as they are."""
    output = torch.arange(12.0).reshape(4, 3) if dim == 0 else torch.arange(12.0).reshape(3, 4)
    for size in (1, 2, 3, 5):
        result = repeat_samples({"x": output, "n": 3}, dim, 2, size)
        rows = [place % 4 for place in range(2 * size)]
        assert torch.equal(result["x"], output.index_select(dim, torch.tensor(rows)))
        assert result["n"] == 3
    with pytest.raises(SettingError, match="has no 3 samples"):
        repeat_samples(output, dim, 3, 1)
    with pytest.raises(SettingError, match=r"an output of \(\) has no 1 samples"):
        repeat_samples(torch.ones(()), 0, 1, 1)


def test_outputs_of_the_second_part_are_changed_in_five_ways():
    """Losses behave otherwise at other values: the joined output has the changed rows behind."""
    seen = []

    def loss(output, target):
        seen.append(output.detach().clone())
        return output.sum()

    pair = pair_of((2, 3))
    readings(loss, pair)
    rows = repeat_samples(pair.output, 0, 3, 3)
    changed = [
        rows.roll(1, 0),
        rows.flip(-1),
        rows - rows.mean() - rows.std(correction=0) / 2,
        rows * -4,
        rows / 8,
    ]
    for number, expected in enumerate(changed):
        first, second, joined = seen[3 * number : 3 * number + 3]
        assert torch.equal(first, pair.output[:2])
        torch.testing.assert_close(second, expected)
        assert torch.equal(joined, torch.cat([first, second]))


def test_only_features_of_floating_point_outputs_are_changed():
    """Class indices, and the order of numbers of which every sample has one, stay as they are."""
    places, classes = torch.arange(3.0) - 5, torch.tensor([[0, 1], [2, 3], [4, 5]])
    pair = Pair((torch.ones(3), torch.ones(3)), (3, 3), (places, classes), 0, 3)
    seen = []

    def loss(output, target):
        seen.append(output)
        return output[0].sum()

    readings(loss, pair)
    rolled, *others = seen[1::3]
    assert [rolled[0].tolist(), rolled[1].tolist()] == [[-3, -5, -4], [[4, 5], [0, 1], [2, 3]]]
    assert all(torch.equal(numbers, classes) for _, numbers in others)
    assert torch.equal(others[0][0], places)


def test_probabilities_and_rates_stay_what_they_are():
    """A loss may take a logarithm of them; scores may become any numbers."""
    seen = []

    def loss(output, target):
        seen.append(output.detach().clone())
        return output.sum()

    shares = torch.tensor([[0.1, 0.9], [0.0, 1.0], [0.5, 0.5]])
    targets = torch.ones(2, 2), torch.ones(3, 2)
    readings(loss, Pair(targets, (2, 3), shares, 0, 3))
    assert all(bool(((output >= 0) & (output <= 1)).all()) for output in seen)
    changed = seen[1::3]
    assert torch.equal(changed[1], shares.flip(-1))
    assert torch.equal(changed[2], shares / 2)
    assert torch.equal(changed[3], shares.flip(-1))
    assert torch.equal(changed[4], shares / 8)
