"""The training loop of one rank: steps, evaluations and checkpoints of a run."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

from penstock.draw.facts import busy_shares
from penstock.errors import RunError
from penstock.event import Timeline
from penstock.measure.conditions import ConditionsMeter
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.state.checkpoints import Checkpoints
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.evaluation import test
from penstock.training.loop.rank_result import RankResult
from penstock.training.loop.run_log import RunLog
from penstock.training.recovery.live_state import LiveState
from penstock.training.resume import last_step
from penstock.training.task import Task
from penstock.training.throughput import (
    BatchFeed,
    ThroughputMeter,
    measured_steady_state,
    median_recording,
)

#: Steps between measurements of the ranks' utilisation.
_TIMELINE_EVERY = 10
#: Timelines of an epoch that stay in memory; the median of the last of them is in the outcome.
_MAX_TIMELINES = 31


@dataclass(frozen=True)
class TrainingLoop:
    """Trains one rank, from the pipeline's step to the end of the run.

    A synchronous plan is trained batch by batch. An asynchronous one is trained as a stream, in
    which batches overlap; it drains for checkpoints and at the end of an epoch.

    Attributes:
        config: of the run.
        task: model, data and loss.
        pipe: the pipeline, at the step from which the run continues.
        checkpoints: of the run; None if it writes none.
        log: for steps and evaluations.
        live: notes every complete step, for the attempt after a failure.
        result: so far; complete up to the last step when `run` returns.
    """

    config: TrainConfig
    task: Task
    pipe: Pipeline
    checkpoints: Checkpoints | None
    log: RunLog
    live: LiveState
    result: RankResult

    def run(self) -> None:
        """Train to the last step, to the target accuracy, or until the run is asked to stop.

        Raises:
            RunError: a rank failed, or the loss is no longer a number.
        """
        self.live.commit(self.pipe.step)
        while not self._is_done():
            self._train_epoch()

    @property
    def _synchronous(self) -> bool:
        """Whether the pipeline drains before each update."""
        return self.pipe.setting.schedule.synchronous

    @property
    def _batches_per_epoch(self) -> int:
        """Batches of an epoch; the last may be smaller than the others."""
        return count_batches(len(self.task.data.train_inputs), self.config.batch)

    @property
    def _last_step(self) -> int:
        """The last step of the run, unless it stops before."""
        return last_step(self.config, self._batches_per_epoch)

    def _is_done(self) -> bool:
        """Return whether training is over."""
        result = self.result
        return result.stopped or result.steps >= self._last_step or self._has_reached_target()

    def _has_reached_target(self) -> bool:
        """Return whether the target accuracy, if there is one, has been reached."""
        target, accuracy = self.config.target_accuracy, self.result.test_accuracy
        return target is not None and accuracy is not None and accuracy >= target

    def _train_epoch(self) -> None:
        """Train to the end of the epoch or to the last step, evaluate, and write a checkpoint."""
        result, per_epoch = self.result, self._batches_per_epoch
        epoch = result.steps // per_epoch
        first_step = epoch * per_epoch
        end = min(self._last_step, first_step + per_epoch)
        reader = self.task.reader(self.pipe, self.config, epoch)
        batches = reader.batches(result.steps - first_step, end - first_step)
        result.step_times = []
        if self._synchronous:
            # The epoch's last batch may be smaller, and its timeline would not show the planned
            # step: so the last full batch is recorded as well.
            full_batches = len(self.task.data.train_inputs) // self.config.batch
            self._train_steps(batches, {first_step + full_batches, end}, end)
        else:
            self._train_stream(batches)
        if result.stopped:
            return
        if self._synchronous:
            # Apply the gradients of the epoch's last batches, if they were too few for a step.
            self.pipe.update()
        result.test_loss, result.test_accuracy = test(self.pipe, self.task, self.config.batch)
        self.log.evaluation(epoch + 1, result, synchronous=self._synchronous)
        is_last = self._is_done()
        if not is_last:
            self.live.commit(result.steps)
        self._save_epoch(is_last=is_last)
        self.log.end_of_epoch(epoch + 1, result)

    def _save_epoch(self, *, is_last: bool) -> None:
        """Write the checkpoint of an epoch that has ended, if one is due.

        `_train_steps` writes none at the epoch's last step: a run that continues from there must
        have the line of the evaluation in its metrics.

        Args:
            is_last: whether training is over.
        """
        checkpoints = self.checkpoints
        if checkpoints is None:
            return
        # All ranks must poll, whether or not a checkpoint is due for another reason.
        is_due = checkpoints.poll(self.pipe) or checkpoints.ended
        if is_due or is_last or self.config.checkpoint == "epoch":
            wait = is_last or checkpoints.ended
            checkpoints.save(self.pipe, score=self.result.test_loss, wait=wait)
        self.result.stopped = checkpoints.ended and not is_last

    def _train_steps(
        self, batches: Iterator[tuple[Sized, Any]], recorded_steps: set[int], end: int
    ) -> None:
        """Train on the batches, one after the other, up to step `end`.

        The timeline is recorded every `_TIMELINE_EVERY` steps, and after `recorded_steps`.
        """
        result = self.result
        recordings: deque[tuple[Timeline, float]] = deque(maxlen=_MAX_TIMELINES)
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
                    recordings.append((timeline, seconds))
                result.busy = busy_shares(result.timeline)
            self._finish_step(loss, len(x), seconds, show_busy=record)
            if step == end:
                break  # the epoch's last step is complete with the evaluation
            self.live.commit(step)
            if self.checkpoints is not None and self.checkpoints.step(self.pipe):
                result.stopped = True
                break
        result.conditions = meter.conditions()
        if recordings:
            result.timeline, result.timeline_step_s = median_recording(recordings)
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
        """Return whether the stream has to drain for a checkpoint."""
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
            is_last = feed.exhausted and not feed.sizes
            if record or (is_last and result.timeline is None):
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
        """Add a step that has been trained to the result, and report it.

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
        self.log.step(result, samples, grad_norm=self.pipe.grad_norm, show_busy=show_busy)
