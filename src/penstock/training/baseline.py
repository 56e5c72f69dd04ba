"""The plain way: one process, one thread, no pipeline; to say what the pipeline gained."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext

import torch
from torch import nn

from penstock.tracing.chain import chain
from penstock.tracing.materialise import materialise
from penstock.training.config import TrainConfig
from penstock.training.optimizer import autocast_dtype, optimizer_factory
from penstock.training.task import make_task


def plain_step_seconds(config: TrainConfig) -> list[float]:
    """Seconds of `config.baseline_steps` steps of plain training, after one to warm up, with as many threads as torch has now."""
    task = make_task(config)
    traced = chain(task.model)
    model = nn.Sequential(
        *materialise(traced, range(len(traced)), torch.device("cpu"), config.seed)
    )
    optimizer = optimizer_factory(config)(list(model.parameters()))
    times = []
    mixed = autocast_dtype(config)
    for number, (x, y) in enumerate(task.epoch(config, 0)):
        if number > config.baseline_steps:
            break
        start = time.perf_counter()
        optimizer.zero_grad()
        with nullcontext() if mixed is None else torch.autocast("cpu", dtype=mixed):
            loss = task.loss(model(x), y)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return times[1:] or times


def plain_step_s(config: TrainConfig) -> float:
    """The median of `plain_step_seconds`."""
    return statistics.median(plain_step_seconds(config))
