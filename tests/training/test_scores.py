"""Scores in a model's output, and their accuracy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from penstock.errors import SettingError
from penstock.training.evaluation import test as evaluate
from penstock.training.scores import accuracy, scores_of, target_count

SCORES = torch.tensor([[1.0, 2.0], [3.0, 0.0]])


@pytest.mark.parametrize(
    "output",
    [
        SCORES,
        (SCORES, "state"),
        [SCORES],
        {"logits": SCORES, "loss": None},
        {"out": SCORES, "aux": None},
        SimpleNamespace(logits=SCORES),
    ],
)
def test_scores_are_the_output_its_logits_or_its_first_item(output):
    """Models return all of these."""
    assert scores_of(output) is SCORES
    assert accuracy(output, torch.tensor([1, 1])) == 0.5


@pytest.mark.parametrize("output", [None, {}, (), ("text",), SimpleNamespace(loss=SCORES)])
def test_an_output_without_scores_is_refused(output):
    """There is nothing to compare with the targets."""
    with pytest.raises(SettingError, match="without a tensor of scores"):
        scores_of(output)


def test_classes_may_be_in_the_second_dimension():
    """As torch's cross_entropy takes them: (samples, classes, places)."""
    scores = torch.zeros(2, 3, 5)
    scores[:, 2] = 1
    assert accuracy(scores, torch.full((2, 5), 2)) == 1.0


def test_numbers_have_no_accuracy():
    """A share of correct numbers would say nothing."""
    assert accuracy(torch.ones(4, 1), torch.ones(4, 1)) is None
    assert accuracy(torch.ones(4, 3), torch.ones(4)) is None
    assert accuracy(torch.ones(4, 3), torch.ones(4, 3, dtype=torch.int64)) is None


def test_ignored_targets_do_not_count():
    """Torch's losses leave out class -100, as of padding: it is no wrong prediction."""
    assert accuracy(SCORES, torch.tensor([1, -100])) == 1.0
    assert target_count(torch.tensor([[1, -100], [-100, 0]])) == 2
    assert target_count(torch.full((2, 3), -100.0)) == 6


def test_batches_of_an_evaluation_are_weighted_by_their_targets():
    """The loss is that of the whole test set, also if some batches have only padding."""
    targets = torch.tensor([0, -100, 1, 1, -100, -100])
    scores = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    data = SimpleNamespace(test_inputs=scores, test_targets=targets)
    pipe = SimpleNamespace(forward=lambda x: x)
    loss, share = evaluate(pipe, SimpleNamespace(data=data, loss=cross_entropy), 2)
    assert loss == pytest.approx(float(cross_entropy(scores, targets)))
    assert share == pytest.approx(
        float((scores.argmax(1) == targets)[targets >= 0].double().mean())
    )
