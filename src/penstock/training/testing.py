"""How good a model is on the test part."""

from __future__ import annotations

import torch

from penstock.runtime.pipeline import Pipeline
from penstock.training.task import Task, accuracy


def test(pipe: Pipeline, task: Task, batch: int) -> tuple[float, float]:
    """Mean loss and accuracy over the test part, so many samples at a time; the same on every rank."""
    loss = right = 0.0
    inputs, targets = task.data.test_inputs, task.data.test_targets
    for start in range(0, len(inputs), batch):
        x, y = inputs[start : start + batch], targets[start : start + batch]
        output = pipe.forward(x)
        with torch.no_grad():
            loss += float(task.loss(output, y.to(output.device))) * len(x)
        right += accuracy(output, y) * len(x)
    return loss / len(inputs), right / len(inputs)
