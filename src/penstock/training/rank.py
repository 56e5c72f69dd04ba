"""Training and profiling as one rank of a run."""

from __future__ import annotations

import math
import os
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from penstock.checkpoint.weight_files import save_weights
from penstock.errors import RunError
from penstock.event import Timeline
from penstock.measure.conditions import ConditionsMeter
from penstock.measure.profiler import profile
from penstock.plan.plan import Plan
from penstock.profile.conditions import RankConditions
from penstock.profile.profile import Profile
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.state.checkpoints import Checkpoints
from penstock.training.beginning import begin, resume
from penstock.training.callbacks import Callbacks, load_callbacks
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.devices import Devices
from penstock.training.evaluation import test
from penstock.training.metrics import Metrics
from penstock.training.optimizer import pipeline_options
from penstock.training.progress import Progress
from penstock.training.recovery.live_state import LiveState
from penstock.training.resume import last_step
from penstock.training.run_checkpoints import run_checkpoints
from penstock.training.task import Task, make_task
from penstock.training.throughput import (
    BatchFeed,
    ThroughputMeter,
    busy_shares,
    measured_steady_state,
    median_recording,
)

_CPU = torch.device("cpu")

#: Steps between measurements of the ranks' utilisation.
_TIMELINE_EVERY = 10
#: Timelines of an epoch that stay in memory; the median of the last of them is in the outcome.
_MAX_TIMELINES = 31


@dataclass
class RankResult:
    """Result of a rank. All but `peak_rss_bytes`, `peak_allocated_bytes` and `conditions` is the
    same on every rank.

    Attributes:
        steps, loss: number of the last step; its loss.
        test_loss, test_accuracy: after the last epoch; the accuracy is None for targets that are
            no classes.
        step_s: the median step of the last epoch, without its first step; of an asynchronous plan,
            the mean time per batch while the pipeline was full.
        timeline: of the median of the recorded steps of the last epoch with a full batch; of an
            asynchronous plan, of the last batches.
        timeline_step_s: seconds of the step of that timeline, from call to loss; None of an
            asynchronous plan.
        busy: per rank, the share of that time in which it worked.
        weight_versions: per stage, the most versions of the weights that were stored.
        peak_rss_bytes: of this process.
        peak_allocated_bytes: the most that torch's allocator had allocated on a card in training;
            None on the CPU.
        seconds: of the whole training.
        step_times: seconds of each step of the last epoch.
        stopped: whether training ended before its last step, because of a signal or a request for
            another number of ranks.
        conditions: that this process saw in the steps of the last epoch.
    """

    steps: int = 0
    loss: float = float("nan")
    test_loss: float = float("nan")
    test_accuracy: float | None = None
    step_s: float = 0.0
    timeline: Timeline | None = None
    timeline_step_s: float | None = None
    busy: list[float] = field(default_factory=list)
    weight_versions: tuple[int, ...] = ()
    peak_rss_bytes: int = 0
    peak_allocated_bytes: int | None = None
    seconds: float = 0.0
    step_times: list[float] = field(default_factory=list)
    stopped: bool = False
    conditions: RankConditions | None = None


def profile_rank(
    config: TrainConfig,
    threads: int,
    concurrent: bool | dist.ProcessGroup = False,
    device: torch.device = _CPU,
) -> Profile:
    """Measure the model of a run, alone or concurrently with all other ranks, or those of a group."""
    task = make_task(config)
    return profile(
        task.chain,
        task.example(),
        config.batch,
        repeats=config.profile_repeats,
        threads=threads,
        device=device,
        loss=task.loss,
        targets=task.data.train_targets[: len(task.example())],
        together=concurrent,
    )


def take_device(devices: Devices) -> torch.device:
    """Return the device of this process; a card becomes the current device, which torch uses by
    default.
    """
    device = devices.of_process(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def train_rank(
    config: TrainConfig, plan: Plan, folder: Path, quiet: bool, devices: Devices
) -> RankResult:
    """Train as one rank of the plan, or as all of them if they share a card. See `train_on`."""
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
    """Train on a device, as one rank of the plan, or as all ranks in threads.

    Args:
        config: of the run.
        plan: to execute.
        folder: into which rank 0 writes metrics and weights.
        quiet: show no progress bar.
        device: of this process.
        executor: how the ranks run.

    Raises:
        RunError: a rank failed, or the loss is no longer a number.
    """
    task = make_task(config)
    pipe = Pipeline(
        task.chain,
        plan,
        loss=task.loss,
        device=device,
        executor=executor,
        **pipeline_options(config),
    )
    first = executor == "threads" or dist.get_rank() == 0
    callbacks = load_callbacks(config.callbacks if first else None)
    live = LiveState(pipe)
    checkpoints = run_checkpoints(config, folder, callbacks.on_checkpoint, live.source)
    if config.resume:
        resume(pipe, checkpoints, config, folder, first=first)
    else:
        begin(pipe, task, config, quiet=quiet or not first)
    saves = config.checkpoint != "never"
    _reset_peak_allocated_bytes(device)
    per_epoch = count_batches(len(task.data.train_inputs), config.batch)
    end = last_step(config, per_epoch)
    started = time.monotonic()
    with (
        _open_metrics(config, folder, plan, pipe) if first else nullcontext() as metrics,
        Progress(end, not first or quiet) as progress,
        checkpoints if saves else nullcontext(),
        live.offering(),
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
            checkpoints if saves else None,
            callbacks,
            live,
        )
        live.commit(pipe.step)
        while not training.done(end):
            training.epoch(per_epoch, end)
    result = training.result
    result.seconds = time.monotonic() - started
    result.peak_allocated_bytes = _peak_allocated_bytes(device)
    if not result.stopped:
        _write_weights(pipe, folder)
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB
    pipe.close()
    return result


def _open_metrics(config: TrainConfig, folder: Path, plan: Plan, pipe: Pipeline) -> Metrics:
    """Open the log of a run, from the step at which it continues."""
    return Metrics(folder, plan.predicted.step_s, pipe.step, config.wandb)


def _reset_peak_allocated_bytes(device: torch.device) -> None:
    """Count the peak of a card anew: the self-check allocates more than training does."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_allocated_bytes(device: torch.device) -> int | None:
    """Return the most bytes that torch's allocator has had on a card; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _write_weights(pipe: Pipeline, folder: Path) -> None:
    """Write the trained model into the run's folder, on rank 0."""
    weights = pipe.state_dict()
    if weights:
        save_weights(weights, folder / "weights.safetensors")


@dataclass
class _Training:
    """State of one rank's training; `metrics` is None on all but rank 0."""

    config: TrainConfig
    task: Task
    pipe: Pipeline
    folder: Path
    metrics: Metrics | None
    progress: Progress
    result: RankResult
    synchronous: bool
    checkpoints: Checkpoints | None
    callbacks: Callbacks
    live: LiveState

    def done(self, last_step: int) -> bool:
        """Whether training is over."""
        return self.result.stopped or self.result.steps >= last_step or self.reached_target()

    def reached_target(self) -> bool:
        """Whether the target accuracy, if there is one, has been reached."""
        return (
            self.config.target_accuracy is not None
            and self.result.test_accuracy is not None
            and self.result.test_accuracy >= self.config.target_accuracy
        )

    def epoch(self, per_epoch: int, last_step: int) -> None:
        """Train to the end of the epoch or to the last step, test, and write a checkpoint."""
        result, number = self.result, self.result.steps // per_epoch
        result.step_times = []
        end = min(last_step, (number + 1) * per_epoch)
        skipped = result.steps - number * per_epoch
        reader = self.task.reader(self.pipe, self.config, number)
        batches = reader.batches(skipped, skipped + end - result.steps)
        if self.synchronous:
            # The epoch's last batch may be smaller, and its timeline would not show the planned
            # step: so the last full batch is recorded as well.
            full_batches = len(self.task.data.train_inputs) // self.config.batch
            self._train_steps(batches, {number * per_epoch + full_batches, end}, end)
        else:
            self._train_stream(batches)
        if result.stopped:
            return
        if self.synchronous:
            # Apply the gradients of the epoch's last batches, if they were too few for a step.
            self.pipe.update()
        result.test_loss, result.test_accuracy = test(self.pipe, self.task, self.config.batch)
        self.callbacks.on_evaluation(result.steps, result.test_loss, result.test_accuracy)
        self._write_epoch(number + 1)
        if not self.done(last_step):
            self.live.commit(result.steps)
        self._save_epoch(last=self.done(last_step))
        self.progress.epoch(number + 1, result.test_loss, result.test_accuracy)

    def _save_epoch(self, *, last: bool) -> None:
        """Write the checkpoint of an epoch that has ended.

        Its step has no other one: the epoch's line in the metrics belongs to what it continues
        from.

        Args:
            last: whether training is over.
        """
        if self.checkpoints is None:
            return
        due = self.checkpoints.poll(self.pipe) or self.checkpoints.ended
        if due or last or self.config.checkpoint == "epoch":
            score = self.result.test_loss
            wait = last or self.checkpoints.ended
            self.checkpoints.save(self.pipe, score=score, wait=wait)
        self.result.stopped = self.checkpoints.ended and not last

    def _write_epoch(self, epoch: int) -> None:
        """Write the metrics of an epoch that has ended."""
        result = self.result
        facts: dict[str, object] = {"busy": [round(share, 4) for share in result.busy]}
        if result.timeline is not None and result.timeline.peak_memory is not None:
            facts["peak_memory"] = result.timeline.peak_memory
        if result.timeline is not None and result.timeline.measured_memory is not None:
            facts["measured_memory"] = [asdict(row) for row in result.timeline.measured_memory]
        if result.test_accuracy is not None:
            facts["test_accuracy"] = result.test_accuracy
        if not self.synchronous:
            facts["weight_versions"] = result.weight_versions
        self._write(epoch=epoch, test_loss=result.test_loss, **facts)

    def _write(self, **values: object) -> None:
        """Write a line of the metrics about the last step, on rank 0."""
        if self.metrics is not None:
            self.metrics.write(self.result.steps, **values)
        self.live.note(self.result.steps, values)

    def _train_steps(
        self, batches: Iterator[tuple[Sized, Any]], recorded_steps: set[int], end: int
    ) -> None:
        """Train on the batches, one after the other, up to step `end`.

        The timeline is recorded every `_TIMELINE_EVERY` steps, and after `recorded_steps`.
        """
        result = self.result
        recorded: deque[tuple[Timeline, float]] = deque(maxlen=_MAX_TIMELINES)
        meter = ConditionsMeter()
        for x, y in batches:
            if len(result.step_times) == 1:
                meter.restart()  # the first step of an epoch warms up, and does not count
            start = time.perf_counter()
            loss = float(self.pipe.train_batch(x, y))
            seconds = time.perf_counter() - start
            step = result.steps + 1
            record = step % _TIMELINE_EVERY == 1 or step in recorded_steps
            if record:
                timeline = self.pipe.timeline()
                if len(x) == self.config.batch or result.timeline is None:
                    result.timeline = timeline
                    recorded.append((timeline, seconds))
                result.busy = busy_shares(result.timeline)
            self._finish_step(loss, len(x), seconds, show_busy=record)
            if step < end:  # the epoch's last step is complete with the evaluation
                self.live.commit(step)
                if self.checkpoints is not None and self.checkpoints.step(self.pipe):
                    result.stopped = True
                    break
        result.conditions = meter.conditions()
        if recorded:
            result.timeline, result.timeline_step_s = median_recording(recorded)
            result.busy = busy_shares(result.timeline)
        result.step_s = statistics.median(result.step_times[1:] or result.step_times)

    def _train_stream(self, batches: Iterator[tuple[Sized, Any]]) -> None:
        """Train on the batches as a stream, which drains for checkpoints and at its end."""
        checkpoints, result = self.checkpoints, self.result
        meter = ConditionsMeter()
        while True:
            feed = BatchFeed(batches)
            if checkpoints is not None:
                feed.pause = self._must_pause
            self._train_segment(feed)
            result.conditions = meter.conditions()
            if not feed.paused or checkpoints is None:
                return
            checkpoints.save(self.pipe, wait=checkpoints.ended)
            batches = feed.batches
            if checkpoints.ended:
                result.stopped = True
                return

    def _must_pause(self) -> bool:
        """Whether the stream has to drain for a checkpoint."""
        assert self.checkpoints is not None
        return self.checkpoints.poll(self.pipe) or self.checkpoints.ended

    def _train_segment(self, feed: BatchFeed) -> None:
        """Train on the batches of a feed as a stream, until it has drained."""
        result = self.result
        meter = ThroughputMeter(feed, self.config.batch)
        for loss, seconds in meter.losses(self.pipe.train(feed)):
            size = feed.sizes.popleft()
            # Not while the pipeline drains, nor for a smaller batch: these timelines would not show
            # the steady state that was planned.
            record = (
                not feed.exhausted
                and size == self.config.batch
                and (result.steps + 1) % _TIMELINE_EVERY == 1
            )
            if record or (feed.exhausted and not feed.sizes and result.timeline is None):
                result.timeline = self.pipe.timeline()
                result.busy = self._stream_busy(result.timeline, meter)
            self._finish_step(float(loss), size, seconds, show_busy=record)
        if not feed.count:
            return
        result.step_s = meter.seconds_per_batch
        if result.timeline is not None:
            result.busy = self._stream_busy(result.timeline, meter)
        result.weight_versions = self.pipe.weight_versions

    def _stream_busy(self, timeline: Timeline, meter: ThroughputMeter) -> list[float]:
        """Return per rank the share of time in which it works while the pipeline is full."""
        steady = measured_steady_state(
            timeline, meter.seconds_per_batch, self.pipe.setting.schedule.micro_batches
        )
        return busy_shares(timeline, steady.batches * steady.seconds_per_batch)

    def _finish_step(self, loss: float, samples: int, seconds: float, *, show_busy: bool) -> None:
        """Record a step that has been trained.

        Raises:
            RunError: its loss is not finite.
        """
        result = self.result
        result.loss = loss
        result.steps += 1
        if self.pipe._global_step.policy == "raise" and not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {result.steps}: training has diverged. A learning "
                f"rate below {self.config.lr:g} may help. Earlier checkpoints are kept"
            )
        result.step_times.append(seconds)
        norm = {} if self.pipe.grad_norm is None else {"grad_norm": self.pipe.grad_norm}
        self._write(
            loss=loss,
            step_s=round(seconds, 6),
            samples_per_s=round(samples / seconds, 2),
            lr=self.config.lr,
            **norm,
        )
        busy = result.busy if show_busy else None
        self.progress.step(result.steps, loss, samples / seconds, busy)
        self.callbacks.on_step(result.steps, loss, seconds)
