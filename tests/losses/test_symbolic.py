"""Divisors of losses on outputs without contents are those on real outputs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.losses.symbolic import (
    Unpredictable,
    evaluate,
    outputs_like,
    resized_shape,
    smooths_without_weight,
    without_stage_hooks,
)
from penstock.losses.terms import UnknownForm, terms_of

WEIGHT = torch.tensor([0.5, 1.0, 3.0, 2.0])


def chosen(x, y):
    """Rows whose target is not 2."""
    return x[y != 2], y[y != 2]


LOSSES = {
    "mean": (lambda x, y: x.square().mean(), False),
    "sum": (lambda x, y: x.square().sum(), False),
    "scaled by targets": (lambda x, y: (x * (y + 1)[:, None]).sum() / 3, False),
    "by the largest target": (lambda x, y: x.sum() / (y.max() + 1), True),
    "by shape": (lambda x, y: x.square().sum() / len(y), False),
    "cross entropy": (functional.cross_entropy, True),
    "ignoring": (lambda x, y: functional.cross_entropy(x, y, ignore_index=2), True),
    "weighted": (lambda x, y: functional.cross_entropy(x, y, WEIGHT, ignore_index=3), True),
    "two dimensions": (
        lambda x, y: functional.cross_entropy(
            x.reshape(-1, 2, 2, 1), (y % 2)[:, None, None].expand(-1, 2, 1), ignore_index=1
        ),
        True,
    ),
    "summed": (lambda x, y: functional.cross_entropy(x, y, reduction="sum"), True),
    "masked": (lambda x, y: (x.sum(1) * (y != 2)).sum() / (y != 2).sum(), True),
    "selected": (lambda x, y: functional.cross_entropy(*chosen(x, y)), True),
    "masked select": (lambda x, y: x.masked_select((y != 2)[:, None]).mean(), True),
    "indexed by mask": (lambda x, y: x[y != 2].square().mean(), True),
    "indexed by a mask of two dimensions": (
        lambda x, y: x[torch.arange(4) >= y[:, None]].square().mean(),
        True,
    ),
    "unreduced": (
        lambda x, y: (
            (functional.cross_entropy(x, y, reduction="none") * (y != 2)).sum() / (y != 2).sum()
        ),
        True,
    ),
    "by a number of Python": (lambda x, y: x.sum() / (int(y.max()) + 1), True),
    "by different targets": (lambda x, y: x.sum() / len(y.unique()), True),
    "two terms": (lambda x, y: x.abs().mean() + functional.cross_entropy(x, y), True),
    "new target": (
        lambda x, y: functional.cross_entropy(x, y.to(x.device)) / (y.to(x.device) != 2).sum(),
        True,
    ),
    "one hot": (
        lambda x, y: functional.mse_loss(x, functional.one_hot(y, 4).to(x), reduction="sum") / 3,
        True,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("count", [1, 4, 7])
def test_divisors_are_those_that_real_outputs_have(name, count):
    """For any number of samples, of one output; whether values of targets matter is known."""
    loss, by_values = LOSSES[name]
    target = torch.tensor([0, 2, 3, 1, 2, 2, 0])[:count]
    generator = torch.Generator().manual_seed(0)
    output = outputs_like(torch.randn(3, 4, generator=generator), (3, 0), (count, 0))
    assert (output.shape, output.device.type, output.requires_grad) == ((count, 4), "meta", True)
    evaluation = evaluate(loss, output, target)
    real = torch.randn(count, 4, generator=generator, requires_grad=True)
    expected = [term.divisor for term in terms_of(loss(real, target))]
    assert [term.divisor for term in evaluation.terms] == pytest.approx(expected)
    if count > 1:
        assert evaluation.by_values is by_values
    assert not evaluation.counted
    assert evaluation.leaves[0] is output


def test_a_sum_with_a_count_has_the_count_as_its_divisor():
    """If it depends on targets alone."""
    output, target = torch.empty(3, 4, device="meta"), torch.tensor([0, 2, 1])
    for count in (lambda y: (y != 2).sum(), lambda y: 2, lambda y: 2.0):
        evaluation = evaluate(lambda x, y, count=count: (x.sum(), count(y)), output, target)
        assert (evaluation.terms[0].divisor, evaluation.counted) == (2.0, True)
        assert evaluation.by_values
    with pytest.raises(Unpredictable):
        evaluate(lambda x, y: (x.sum(), (x > 0).sum()), output, target)


def test_smoothing_is_divided_by_zero_on_outputs_without_contents():
    """A loss that fails, returns no number, or takes class weights from the output has no such
    division.
    """
    weight, target = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0])
    output = outputs_like(torch.ones(3, 4), (3, 0), (3, 0))

    def smoothed(x, y):
        return functional.cross_entropy(x, y, weight, label_smoothing=0.1)

    def by_output(x, y):
        weights = x[0].detach() * 0
        return functional.cross_entropy(x, y, weights, label_smoothing=0.1)

    assert smooths_without_weight(smoothed, output, target)
    assert not smooths_without_weight(smoothed, output, target + 1)
    assert not smooths_without_weight(by_output, output, target)
    assert not smooths_without_weight(lambda x, y: (smoothed(x, y), 3), output, target)
    assert not smooths_without_weight(lambda x, y: 1 / 0, output, target)


def test_what_cannot_be_evaluated_is_an_unknown_form():
    """With the error of the loss; no exception of its own comes out."""
    output, target = torch.empty(3, 4, device="meta", requires_grad=True), torch.tensor([0, 2, 1])

    def fail(x, y):
        raise KeyError("x")

    for loss, words in (
        (fail, "KeyError: 'x'"),
        (lambda x, y: x, "no number"),
        (lambda x, y: 3.0, "no number"),
        (lambda x, y: (x.sum(), 1, 2), "no number"),
        (lambda x, y: x.sum() * x.mean().item(), "RuntimeError"),
        (lambda x, y: y.float().masked_select(x[:, 0] > 0).mean(), "a selection by outputs"),
    ):
        with pytest.raises(UnknownForm, match=words):
            evaluate(loss, output, target)


def test_shapes_follow_samples_and_tokens():
    """Rows may be samples, or tokens of all samples; other dimensions stay."""
    assert resized_shape((), (3, 0), (5, 0)) == ()
    assert resized_shape((3, 4), (3, 0), (5, 0)) == (5, 4)
    assert resized_shape((6, 4), (3, 0), (5, 0)) == (10, 4)
    assert resized_shape((3, 7, 4), (3, 7), (5, 2)) == (5, 2, 4)
    assert resized_shape((3, 7), (3, 7), (3, 2)) == (3, 2)
    assert resized_shape((21, 4), (3, 7), (5, 2)) == (10, 4)
    assert resized_shape((3, 4), (3, 7), (5, 7)) == (5, 4)
    for shape, extents, new in (
        ((4, 2), (3, 0), (5, 0)),
        ((3, 4), (3, 7), (5, 2)),
        ((6,), (3, 7), (3, 1)),
    ):
        with pytest.raises(UnknownForm, match="an output of"):
            resized_shape(shape, extents, new)


def test_only_floating_point_leaves_of_outputs_require_gradients():
    """Dtypes and constants stay."""
    value = {"a": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones(2).long(), "c": 5}
    outputs = outputs_like(value, (2, 0), (4, 0))
    assert (outputs["a"].dtype, outputs["a"].requires_grad) == (torch.float64, True)
    assert (outputs["b"].shape, outputs["b"].requires_grad) == ((4,), False)
    assert outputs["c"] == 5


def test_graphs_are_recorded_whatever_the_stage_does():
    """Without its hooks, also in inference and without gradients."""
    seen = []
    x = torch.ones(2, requires_grad=True)

    def note(tensor):
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, note), torch.no_grad():
        with without_stage_hooks():
            assert (x * x).requires_grad
        assert not (x * x).requires_grad
    with torch.inference_mode(), without_stage_hooks():
        assert (x * x).requires_grad
    assert seen == []
