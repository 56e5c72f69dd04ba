"""The plain way: one process on one device, no pipeline; to say what the pipeline gained."""

from __future__ import annotations

import statistics
from contextlib import nullcontext

import torch
from torch import nn

from penstock.measure.passes import now
from penstock.tracing.chain import chain
from penstock.tracing.materialise import materialise
from penstock.training.config import TrainConfig
from penstock.training.optimizer import autocast_dtype, optimizer_factory
from penstock.training.task import make_task


def plain_step_seconds(config: TrainConfig, device: torch.device) -> list[float]:
    """Seconds of `config.baseline_steps` steps of plain training, after one to warm up, with as
    many threads as torch has now.
    """
    task = make_task(config)
    traced = chain(task.model)
    model = nn.Sequential(*materialise(traced, range(len(traced)), device, config.seed))
    optimizer = optimizer_factory(config)(list(model.parameters()))
    times = []
    mixed = autocast_dtype(config)
    for number, (x, y) in enumerate(task.epoch(config, 0)):
        if number > config.baseline_steps:
            break
        start = now(device)
        optimizer.zero_grad()
        with nullcontext() if mixed is None else torch.autocast(device.type, dtype=mixed):
            loss = task.loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        times.append(now(device) - start)
    return times[1:] or times


def plain_step_s(config: TrainConfig, device: torch.device) -> float:
    """The median of `plain_step_seconds`."""
    return statistics.median(plain_step_seconds(config, device))
