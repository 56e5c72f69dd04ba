"""Evaluate a model on the test set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.pipeline import Pipeline
from penstock.training.scores import accuracy, scores_of, target_count
from penstock.training.task import Task


def test(pipe: Pipeline, task: Task, batch: int) -> tuple[float, float | None]:
    """Return mean loss and accuracy over the test set, `batch` samples at a time; the same on every
    rank.

    Batches are weighted by their targets that are not ignored. The accuracy is None where the
    targets are no classes.
    """
    loss, correct = 0.0, 0.0
    has_accuracy = True
    inputs, targets = task.data.test_inputs, task.data.test_targets
    for start in range(0, len(inputs), batch):
        x, y = inputs[start : start + batch], targets[start : start + batch]
        output = pipe.forward(x)
        count = target_count(y)
        if count == 0:
            continue
        with torch.no_grad():
            loss += _mean_loss(task, output, y) * count
        share = accuracy(output, y)
        has_accuracy = has_accuracy and share is not None
        correct += (share or 0.0) * count
    total = target_count(targets)
    if total == 0:
        return float("nan"), None
    return loss / total, correct / total if has_accuracy else None


def _mean_loss(task: Task, output: Any, y: Tensor) -> float:
    """Return the loss of a batch; a loss may also be a sum and a count."""
    loss: Any = task.loss(output, y.to(scores_of(output).device))
    if isinstance(loss, tuple):
        total, count = loss
        loss = total / count
    return float(loss)
