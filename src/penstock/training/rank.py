"""What every rank of a training run does."""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import RunError
from penstock.event import Timeline
from penstock.measure.profile import profile
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.runtime.pipeline import Pipeline
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.devices import Devices
from penstock.training.first_check import check_first_batch
from penstock.training.metrics import Metrics
from penstock.training.optimizer import optimizer_factory, training_options
from penstock.training.progress import Progress
from penstock.training.resume import CHECKPOINT, accept_run, last_step, set_options
from penstock.training.stream import Feed, Pace, steady_of
from penstock.training.task import Task, make_task
from penstock.training.testing import test

_CPU = torch.device("cpu")

#: Steps between looks at how busy the stages are.
_LOOK_EVERY = 10


@dataclass
class RankResult:
    """What a rank brings back. All but `peak_rss_bytes` and `peak_allocated_bytes` is the same on
    every rank.

    `step_s` is the median step of the last epoch, its first step left out; `timeline` is of the
    last step with a whole batch. Of an asynchronous plan it is the mean time per batch while the
    pipeline was full, and `timeline` is of the last batches. `busy` has the shares of that time in
    which the ranks worked; `weight_versions`, per stage, the most versions that were kept.
    `peak_allocated_bytes`: the most that torch's allocator had given out on a card while it
    trained; None on the CPU.
    """

    steps: int = 0
    loss: float = float("nan")
    test_loss: float = float("nan")
    test_accuracy: float = 0.0
    step_s: float = 0.0
    timeline: Timeline | None = None
    busy: list[float] = field(default_factory=list)
    weight_versions: tuple[int, ...] = ()
    peak_rss_bytes: int = 0
    peak_allocated_bytes: int | None = None
    seconds: float = 0.0
    step_times: list[float] = field(default_factory=list)


def profile_rank(
    config: TrainConfig, threads: int, together: bool = False, device: torch.device = _CPU
) -> Profile:
    """Measure the model of a run, alone or with all other ranks."""
    task = make_task(config)
    return profile(
        task.model,
        task.example(),
        config.batch,
        repeats=config.profile_repeats,
        threads=threads,
        device=device,
        loss=task.loss,
        targets=task.data.train_targets[: len(task.example())],
        together=together,
    )


def take_device(devices: Devices) -> torch.device:
    """Return the device of this process, and make a card the current one, where torch puts what
    names no card.
    """
    device = devices.of_process(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def train_rank(
    config: TrainConfig, plan: Plan, folder: Path, quiet: bool, devices: Devices
) -> RankResult:
    """Train as one rank of the plan, or as all of them where they share a card. See `train_on`."""
    executor = devices.executor(plan.ranks)
    return train_on(config, plan, folder, quiet, take_device(devices), executor)


def train_on(
    config: TrainConfig,
    plan: Plan,
    folder: Path,
    quiet: bool,
    device: torch.device,
    executor: Literal["processes", "threads"],
) -> RankResult:
    """Train on a device, as one rank of the plan or by threads as all; rank 0 writes the run's
    metrics and weights into `folder`.

    Raises:
        RunError: a rank failed, or the loss is no longer a number.
    """
    task = make_task(config)
    pipe = Pipeline(
        task.model,
        plan,
        loss=task.loss,
        optimizer=optimizer_factory(config),
        seed=config.seed,
        device=device,
        deadline_s=config.deadline_s,
        executor=executor,
        **training_options(config),
    )
    first = executor == "threads" or dist.get_rank() == 0
    if config.resume:
        pipe.load(folder / CHECKPOINT)
        set_options(pipe, config)
        if first:
            accept_run(folder, pipe.step)
    elif config.self_check:
        line = check_first_batch(pipe, task, config)
        if first and not quiet:
            print(line, file=sys.stderr, flush=True)
    if device.type == "cuda":
        # The self-check holds more than training does.
        torch.cuda.reset_peak_memory_stats(device)
    per_epoch = count_batches(len(task.data.train_inputs), config.batch)
    end = last_step(config, per_epoch)
    started = time.monotonic()
    with (
        Metrics(folder) if first else nullcontext() as metrics,
        Progress(end, not first or quiet) as progress,
    ):
        training = _Training(
            config,
            task,
            pipe,
            folder,
            metrics,
            progress,
            RankResult(steps=pipe.step),
            plan.synchronous,
        )
        while training.result.steps < end and not training.reached_target():
            training.epoch(per_epoch, end)
    result = training.result
    result.seconds = time.monotonic() - started
    if device.type == "cuda":
        result.peak_allocated_bytes = torch.cuda.max_memory_allocated(device)
    weights = pipe.state_dict()
    if first:
        save_file(_apart(weights), folder / "weights.safetensors")
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.close()
    return result


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with memory of their own, as the file wants them: a tied one has several names for
    one.
    """
    met: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if id(tensor) in met else tensor.contiguous()
        met.add(id(tensor))
    return found


def busy_shares(timeline: Timeline, whole: float | None = None) -> list[float]:
    """Per rank, the share of the step in which it worked; or of `whole` seconds, if the step's are
    not all that there was.
    """
    whole = timeline.makespan if whole is None else whole
    return [min(seconds / whole, 1.0) if whole else 0.0 for seconds in timeline.busy]


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
    synchronous: bool

    def reached_target(self) -> bool:
        """Whether the accuracy that was asked for is there."""
        return (
            self.config.target_accuracy is not None
            and self.result.test_accuracy >= self.config.target_accuracy
        )

    def epoch(self, per_epoch: int, last_step: int) -> None:
        """Train to the end of the epoch or to the last step, test, and write a checkpoint."""
        result, number = self.result, self.result.steps // per_epoch
        result.step_times = []
        until = min(last_step, (number + 1) * per_epoch)
        skipped = result.steps - number * per_epoch
        batches = islice(
            self.task.epoch(self.config, number), skipped, skipped + until - result.steps
        )
        if self.synchronous:
            # The epoch's last batch may be a small one, which would not show a step as it was
            # planned.
            last_whole = number * per_epoch + len(self.task.data.train_inputs) // self.config.batch
            self._steps(batches, {last_whole, until})
            # with what the epoch's last batches have left, if they were too few for a step
            self.pipe.update()
        else:
            self._stream(batches)
        result.test_loss, result.test_accuracy = test(self.pipe, self.task, self.config.batch)
        if self.metrics is not None:
            found: dict[str, object] = {"busy": [round(share, 4) for share in result.busy]}
            if result.timeline is not None and result.timeline.peak_memory is not None:
                found["peak_memory"] = result.timeline.peak_memory
            if not self.synchronous:
                found["weight_versions"] = result.weight_versions
            self.metrics.write(
                result.steps,
                epoch=number + 1,
                test_loss=result.test_loss,
                test_accuracy=result.test_accuracy,
                **found,
            )
        done = self.reached_target() or result.steps >= last_step
        if self.config.checkpoint == "epoch" or (self.config.checkpoint == "end" and done):
            self.pipe.save(self.folder / CHECKPOINT)
        self.progress.epoch(number + 1, result.test_accuracy)

    def _steps(self, batches: Iterator[tuple[Tensor, Tensor]], looks: set[int]) -> None:
        """Train on the batches, one after the other; look at the timeline now and then, and after
        the steps in `looks`.
        """
        result = self.result
        for x, y in batches:
            start = time.perf_counter()
            loss = float(self.pipe.train_batch(x, y))
            seconds = time.perf_counter() - start
            step = result.steps + 1
            look = step % _LOOK_EVERY == 1 or step in looks
            if look:
                found = self.pipe.timeline()
                if len(x) == self.config.batch or result.timeline is None:
                    result.timeline = found
                result.busy = busy_shares(result.timeline)
            self._trained(loss, len(x), seconds, look)
        result.step_s = statistics.median(result.step_times[1:] or result.step_times)

    def _stream(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Train on the batches as a stream, to where it has drained."""
        result, feed = self.result, Feed(batches)
        pace = Pace(feed, self.config.batch)
        for loss, seconds in pace.losses(self.pipe.train(feed)):
            size = feed.sizes.popleft()
            # What is left behind by a drain would be taken for the steady state, and a small batch
            # for one as it was planned.
            look = (
                not feed.over
                and size == self.config.batch
                and (result.steps + 1) % _LOOK_EVERY == 1
            )
            if look or (feed.over and not feed.sizes and result.timeline is None):
                result.timeline = self.pipe.timeline()
                result.busy = self._busy(result.timeline, pace)
            self._trained(float(loss), size, seconds, look)
        result.step_s = pace.seconds_per_batch
        if result.timeline is not None:
            result.busy = self._busy(result.timeline, pace)
        result.weight_versions = self.pipe.weight_versions

    def _busy(self, timeline: Timeline, pace: Pace) -> list[float]:
        """Per rank, the share of the time in which it works, the pipeline being full."""
        found = steady_of(
            timeline, pace.seconds_per_batch, self.pipe.setting.schedule.micro_batches
        )
        return busy_shares(timeline, found.batches * found.seconds_per_batch)

    def _trained(self, loss: float, samples: int, seconds: float, looked: bool) -> None:
        """Write down a step that has been trained.

        Raises:
            RunError: its loss is no number.
        """
        result = self.result
        result.loss = loss
        result.steps += 1
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {result.steps}: the weights have run away. A learning rate "
                f"below {self.config.lr:g} may help. Checkpoints of earlier epochs are kept"
            )
        result.step_times.append(seconds)
        if self.metrics is not None:
            self.metrics.write(
                result.steps,
                loss=loss,
                step_s=round(seconds, 6),
                samples_per_s=round(samples / seconds, 2),
            )
        self.progress.step(result.steps, loss, samples / seconds, result.busy if looked else None)
