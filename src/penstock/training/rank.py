"""What every rank of a training run does."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from penstock.event import Timeline
from penstock.plan import Plan
from penstock.runtime.pipeline import Pipeline
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.metrics import Metrics
from penstock.training.optimizer import optimizer_factory
from penstock.training.progress import Progress
from penstock.training.task import Task, accuracy, make_task

#: Steps between looks at how busy the stages are.
_LOOK_EVERY = 10


@dataclass
class RankResult:
    """What a rank brings back. All but `peak_rss_bytes` is the same on every rank.

    `step_s` is the median step of the last epoch, its first step left out; `timeline` is of the last step.
    """

    steps: int = 0
    loss: float = float("nan")
    test_loss: float = float("nan")
    test_accuracy: float = 0.0
    step_s: float = 0.0
    timeline: Timeline | None = None
    peak_rss_bytes: int = 0
    seconds: float = 0.0
    step_times: list[float] = field(default_factory=list)


def train_rank(config: TrainConfig, plan: Plan, folder: Path, quiet: bool) -> RankResult:
    """Train as one rank of the plan; rank 0 writes the run's metrics and weights into `folder`."""
    task = make_task(config)
    pipe = Pipeline(task.model, plan, loss=task.loss, optimizer=optimizer_factory(config), seed=config.seed,
                    deadline_s=config.deadline_s, executor="processes")  # fmt: skip
    first = dist.get_rank() == 0
    checkpoint = folder / "checkpoint"
    if config.resume:
        pipe.load(checkpoint)
    result = RankResult(steps=pipe.step)
    per_epoch = count_batches(len(task.data.train_inputs), config.batch)
    last_step = min(config.epochs * per_epoch, config.limit_steps or sys.maxsize)
    started = time.monotonic()
    with Metrics(folder) if first else nullcontext() as metrics, Progress(last_step, not first or quiet) as progress:
        while result.steps < last_step:
            epoch = result.steps // per_epoch
            _run_epoch(pipe, task, config, result, min(last_step, (epoch + 1) * per_epoch), metrics, progress)
            result.timeline = pipe.timeline()
            result.test_loss, result.test_accuracy = _evaluate(pipe, task, config)
            if metrics is not None:
                metrics.write(result.steps, epoch=epoch + 1, test_loss=result.test_loss, test_accuracy=result.test_accuracy,
                              busy=[round(share, 4) for share in busy_shares(result.timeline)])  # fmt: skip
            done = config.target_accuracy is not None and result.test_accuracy >= config.target_accuracy
            if config.checkpoint == "epoch" or (config.checkpoint == "end" and (done or result.steps >= last_step)):
                pipe.save(checkpoint)
            progress.epoch(epoch + 1, result.test_accuracy)
            if done:
                break
    result.seconds = time.monotonic() - started
    weights = pipe.state_dict()
    if first:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors")
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.close()
    return result


def busy_shares(timeline: Timeline) -> list[float]:
    """Per rank, the share of the step in which it worked."""
    return [seconds / timeline.makespan if timeline.makespan else 0.0 for seconds in timeline.busy]


def _run_epoch(pipe: Pipeline, task: Task, config: TrainConfig, result: RankResult, until: int,
               metrics: Metrics | None, progress: Progress) -> None:  # fmt: skip
    """Train up to step `until`, at most to the end of the epoch that `result.steps` lies in."""
    result.step_times = []
    for x, y in _batches_from(task, config, result.steps):
        if result.steps >= until:
            break
        start = time.perf_counter()
        result.loss = float(pipe.train_batch(x, y))
        seconds = time.perf_counter() - start
        result.steps += 1
        result.step_times.append(seconds)
        busy = busy_shares(pipe.timeline()) if result.steps % _LOOK_EVERY == 1 else None
        if metrics is not None:
            metrics.write(result.steps, loss=result.loss, step_s=round(seconds, 6), samples_per_s=round(len(x) / seconds, 2))
        progress.step(result.steps, result.loss, len(x) / seconds, busy)
    result.step_s = statistics.median(result.step_times[1:] or result.step_times or [0.0])


def _batches_from(task: Task, config: TrainConfig, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the epoch that `step` lies in, from that step on."""
    per_epoch = count_batches(len(task.data.train_inputs), config.batch)
    epoch, skipped = divmod(step, per_epoch)
    for number, batch in enumerate(task.epoch(config, epoch)):
        if number >= skipped:
            yield batch


def _evaluate(pipe: Pipeline, task: Task, config: TrainConfig) -> tuple[float, float]:
    """Mean loss and accuracy over the test part."""
    loss = right = 0.0
    inputs, targets = task.data.test_inputs, task.data.test_targets
    for start in range(0, len(inputs), config.batch):
        x, y = inputs[start : start + config.batch], targets[start : start + config.batch]
        output = pipe.forward(x)
        with torch.no_grad():
            loss += float(task.loss(output, y.to(output.device))) * len(x)
        right += accuracy(output, y) * len(x)
    return loss / len(inputs), right / len(inputs)
