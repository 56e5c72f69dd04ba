"""What every rank of a training run does."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from penstock.errors import RunError
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

    `step_s` is the median step of the last epoch, its first step left out; `timeline` is of the last step with a whole batch.
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
    """Train as one rank of the plan; rank 0 writes the run's metrics and weights into `folder`.

    Raises:
        RunError: a rank failed, or the loss is no longer a number.
    """
    task = make_task(config)
    pipe = Pipeline(task.model, plan, loss=task.loss, optimizer=optimizer_factory(config), seed=config.seed,
                    deadline_s=config.deadline_s, executor="processes")  # fmt: skip
    first = dist.get_rank() == 0
    if config.resume:
        pipe.load(folder / "checkpoint")
    per_epoch = count_batches(len(task.data.train_inputs), config.batch)
    last_step = min(config.epochs * per_epoch, config.limit_steps or sys.maxsize)
    started = time.monotonic()
    with Metrics(folder) if first else nullcontext() as metrics, Progress(last_step, not first or quiet) as progress:
        training = _Training(config, task, pipe, folder, metrics, progress, RankResult(steps=pipe.step))
        while training.result.steps < last_step and not training.reached_target():
            training.epoch(per_epoch, last_step)
    result = training.result
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


@dataclass
class _Training:
    """One rank's run while it goes on. `metrics` is rank 0's alone."""

    config: TrainConfig
    task: Task
    pipe: Pipeline
    folder: Path
    metrics: Metrics | None
    progress: Progress
    result: RankResult

    def reached_target(self) -> bool:
        """Whether the accuracy that was asked for is there."""
        return self.config.target_accuracy is not None and self.result.test_accuracy >= self.config.target_accuracy

    def epoch(self, per_epoch: int, last_step: int) -> None:
        """Train to the end of the epoch or to the last step, test, and write a checkpoint."""
        result, number = self.result, self.result.steps // per_epoch
        self._steps(per_epoch, min(last_step, (number + 1) * per_epoch))
        assert result.timeline is not None
        result.test_loss, result.test_accuracy = self._test()
        if self.metrics is not None:
            busy = [round(share, 4) for share in busy_shares(result.timeline)]
            self.metrics.write(result.steps, epoch=number + 1, test_loss=result.test_loss,
                               test_accuracy=result.test_accuracy, busy=busy)  # fmt: skip
        done = self.reached_target() or result.steps >= last_step
        if self.config.checkpoint == "epoch" or (self.config.checkpoint == "end" and done):
            self.pipe.save(self.folder / "checkpoint")
        self.progress.epoch(number + 1, result.test_accuracy)

    def _steps(self, per_epoch: int, until: int) -> None:
        """Train up to step `until`, within the epoch that the next step lies in."""
        result = self.result
        result.step_times = []
        epoch, skipped = divmod(result.steps, per_epoch)
        # The epoch's last batch may be a small one, which would not show a step as it was planned.
        last_whole = epoch * per_epoch + len(self.task.data.train_inputs) // self.config.batch
        for x, y in islice(self.task.epoch(self.config, epoch), skipped, skipped + until - result.steps):
            start = time.perf_counter()
            result.loss = float(self.pipe.train_batch(x, y))
            seconds = time.perf_counter() - start
            result.steps += 1
            if not math.isfinite(result.loss):
                raise RunError(f"the loss is {result.loss} at step {result.steps}: the weights have run away. A learning rate "
                               f"below {self.config.lr:g} may help. Checkpoints of earlier epochs are kept")  # fmt: skip
            result.step_times.append(seconds)
            busy = None
            if result.steps % _LOOK_EVERY == 1 or result.steps in (last_whole, until):
                found = self.pipe.timeline()
                if len(x) == self.config.batch or result.timeline is None:
                    result.timeline = found
                busy = busy_shares(result.timeline)
            if self.metrics is not None:
                self.metrics.write(result.steps, loss=result.loss, step_s=round(seconds, 6),
                                   samples_per_s=round(len(x) / seconds, 2))  # fmt: skip
            self.progress.step(result.steps, result.loss, len(x) / seconds, busy)
        result.step_s = statistics.median(result.step_times[1:] or result.step_times)

    def _test(self) -> tuple[float, float]:
        """Mean loss and accuracy over the test part."""
        loss = right = 0.0
        inputs, targets = self.task.data.test_inputs, self.task.data.test_targets
        for start in range(0, len(inputs), self.config.batch):
            x, y = inputs[start : start + self.config.batch], targets[start : start + self.config.batch]
            output = self.pipe.forward(x)
            with torch.no_grad():
                loss += float(self.task.loss(output, y.to(output.device))) * len(x)
            right += accuracy(output, y) * len(x)
        return loss / len(inputs), right / len(inputs)
