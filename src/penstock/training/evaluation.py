"""Evaluate a model on the test set."""

from __future__ import annotations

import torch

from penstock.runtime.pipeline import Pipeline
from penstock.training.task import Task, accuracy


def test(pipe: Pipeline, task: Task, batch: int) -> tuple[float, float]:
    """Return mean loss and accuracy over the test set, `batch` samples at a time; the same on every
    rank.
    """
    loss = correct = 0.0
    inputs, targets = task.data.test_inputs, task.data.test_targets
    for start in range(0, len(inputs), batch):
        x, y = inputs[start : start + batch], targets[start : start + batch]
        output = pipe.forward(x)
        with torch.no_grad():
            loss += float(task.loss(output, y.to(output.device))) * len(x)
        correct += accuracy(output, y) * len(x)
    return loss / len(inputs), correct / len(inputs)
