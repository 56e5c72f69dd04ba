"""Plain training in one process on one device, without a pipeline, for comparison."""

from __future__ import annotations

import statistics
from contextlib import nullcontext

import torch
from torch import nn

from penstock.measure.timed_passes import now
from penstock.tracing.materialise import materialise
from penstock.training.config import TrainConfig
from penstock.training.optimizer import autocast_dtype, optimizer_factory
from penstock.training.task import make_task


def plain_step_seconds(config: TrainConfig, device: torch.device) -> list[float]:
    """Measure `config.baseline_steps` steps of plain training, after one warm-up step, with torch's
    current number of threads.

    Returns:
        Seconds of each step.
    """
    task = make_task(config)
    traced = task.chain
    model = nn.Sequential(*materialise(traced, range(len(traced)), device, config.seed))
    optimizer = optimizer_factory(config)(list(model.parameters()))
    times = []
    autocast = autocast_dtype(config)
    for number, (x, y) in enumerate(task.epoch(config, 0)):
        if number > config.baseline_steps:
            break
        start = now(device)
        optimizer.zero_grad()
        with nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast):
            loss = task.loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        times.append(now(device) - start)
    return times[1:] or times


def plain_step_s(config: TrainConfig, device: torch.device) -> float:
    """Return the median of `plain_step_seconds`."""
    return statistics.median(plain_step_seconds(config, device))
