"""Scores in a model's output, and their accuracy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import SettingError
from penstock.training.scores import accuracy, scores_of

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
