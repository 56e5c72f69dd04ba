"""Evaluate a model on the test set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.pipeline import Pipeline
from penstock.training.scores import accuracy, scores_of
from penstock.training.task import Task


def test(pipe: Pipeline, task: Task, batch: int) -> tuple[float, float | None]:
    """Return mean loss and accuracy over the test set, `batch` samples at a time; the same on every
    rank.

    The accuracy is None where the targets are no classes.
    """
    loss = 0.0
    shares: list[float | None] = []
    inputs, targets = task.data.test_inputs, task.data.test_targets
    for start in range(0, len(inputs), batch):
        x, y = inputs[start : start + batch], targets[start : start + batch]
        output = pipe.forward(x)
        with torch.no_grad():
            loss += _mean_loss(task, output, y) * len(x)
        share = accuracy(output, y)
        shares.append(None if share is None else share * len(x))
    correct = [share for share in shares if share is not None]
    return loss / len(inputs), sum(correct) / len(inputs) if len(correct) == len(shares) else None


def _mean_loss(task: Task, output: Any, y: Tensor) -> float:
    """Return the loss of a batch; a loss may also be a sum and a count."""
    loss: Any = task.loss(output, y.to(scores_of(output).device))
    if isinstance(loss, tuple):
        total, count = loss
        loss = total / count
    return float(loss)
