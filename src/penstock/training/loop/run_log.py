"""Reports of a run's steps and evaluations, to everything that shows or records them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from penstock.training.callbacks import Callbacks
from penstock.training.loop.rank_result import RankResult
from penstock.training.metrics import Metrics
from penstock.training.progress import Progress
from penstock.training.recovery.live_state import LiveState


@dataclass(frozen=True)
class RunLog:
    """Where the steps and evaluations of a run are reported.

    Attributes:
        metrics: the run's metrics file; None on all ranks but 0.
        progress: the display, silent on all ranks but 0.
        callbacks: the user's callbacks, none on all ranks but 0.
        live: keeps the lines of the last step for the attempt after a failure.
        learning_rate: of the run.
    """

    metrics: Metrics | None
    progress: Progress
    callbacks: Callbacks
    live: LiveState
    learning_rate: float

    def step(
        self, result: RankResult, samples: int, *, grad_norm: float | None, show_busy: bool
    ) -> None:
        """Report a step that has been trained.

        Args:
            result: after the step.
            samples: of its batch.
            grad_norm: global gradient norm before clipping; None if gradients are not clipped.
            show_busy: whether `result.busy` was measured in this step.
        """
        seconds = result.step_times[-1]
        samples_per_s = samples / seconds
        values: dict[str, object] = {
            "loss": result.loss,
            "step_s": round(seconds, 6),
            "samples_per_s": round(samples_per_s, 2),
            "lr": self.learning_rate,
        }
        if grad_norm is not None:
            values["grad_norm"] = grad_norm
        self._write(result.steps, values)
        busy = result.busy if show_busy else None
        self.progress.step(result.steps, result.loss, samples_per_s, busy)
        self.callbacks.on_step(result.steps, result.loss, seconds)

    def evaluation(self, epoch: int, result: RankResult, *, synchronous: bool) -> None:
        """Report the evaluation after an epoch to callbacks and metrics.

        Args:
            epoch: its number, from 1.
            result: after the evaluation.
            synchronous: whether the pipeline drains before each update.
        """
        self.callbacks.on_evaluation(result.steps, result.test_loss, result.test_accuracy)
        values: dict[str, object] = {
            "epoch": epoch,
            "test_loss": result.test_loss,
            "busy": [round(share, 4) for share in result.busy],
        }
        timeline = result.timeline
        if timeline is not None and timeline.peak_memory is not None:
            values["peak_memory"] = timeline.peak_memory
        if timeline is not None and timeline.measured_memory is not None:
            values["measured_memory"] = [asdict(row) for row in timeline.measured_memory]
        if result.test_accuracy is not None:
            values["test_accuracy"] = result.test_accuracy
        if not synchronous:
            values["weight_versions"] = result.weight_versions
        self._write(result.steps, values)

    def end_of_epoch(self, epoch: int, result: RankResult) -> None:
        """Display an epoch's evaluation, once its checkpoint has been begun."""
        self.progress.epoch(epoch, result.test_loss, result.test_accuracy)

    def _write(self, step: int, values: dict[str, object]) -> None:
        """Write a line of the metrics about a step."""
        if self.metrics is not None:
            self.metrics.write(step, **values)
        self.live.note(step, values)
