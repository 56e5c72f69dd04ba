"""Outcome of a training run, as it stands in `outcome.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.errors import FileError
from penstock.event import MeasuredMemory
from penstock.files.json_values import json_value
from penstock.files.read import validate
from penstock.files.text import read_text
from penstock.profile.conditions import Conditions


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run, with the predicted values. Seconds are of one step; of an asynchronous
    plan, seconds and bubble are of one batch while the pipeline is full.

    Attributes:
        folder: of the run.
        steps, loss: of the whole run; of its last step.
        test_loss, test_accuracy: on the test set, after the last epoch.
        predicted_step_s, measured_step_s: seconds of a step.
        predicted_bubble_ratio, measured_bubble_ratio: share of the ranks' time that is idle.
        predicted_peak_memory, measured_peak_memory: per rank, bytes of weights, gradients,
            optimizer state and activations.
        measured_peak_rss: per process, bytes of the whole process.
        training_s: seconds of the whole training.
        one_thread_step_s: of plain training in one process with one thread, measured in the same
            run; None if it was not measured. On cards, of one process on one card.
        synchronous: whether the plan is.
        weights: the weight rule.
        predicted_weight_versions, measured_weight_versions: per stage, the most versions of the
            weights that are stored.
        device: "cpu" or the name of the cards.
        measured_peak_allocated: per process, the most bytes that torch's allocator had allocated on
            cards while it trained; None on the CPU. Where ranks share a card there is one process,
            and one number here and in `measured_peak_rss`.
        measured_memory: per rank, peak bytes of message buffers, and of the card's allocator, as
            the timeline has them.
        predicted_step_quartiles_s: lower and upper quartile of the step, from those of the layers
            in the profile; None if the hosts are of several kinds.
        measured_step_quartiles_s: likewise, of the steps of the last epoch without its first one;
            None for an asynchronous plan.
        conditions: of the machine in the last epoch; None in folders of older versions.
        timeline_step_s: seconds of the step of the measured timeline, from call to loss; None for
            an asynchronous plan, and in folders of older versions.
    """

    folder: str
    steps: int
    loss: float
    test_loss: float
    test_accuracy: float | None
    predicted_step_s: float
    measured_step_s: float
    predicted_bubble_ratio: float
    measured_bubble_ratio: float
    predicted_peak_memory: tuple[int, ...]
    measured_peak_rss: tuple[int, ...]
    training_s: float
    one_thread_step_s: float | None
    measured_peak_memory: tuple[int, ...] | None = None
    synchronous: bool = True
    weights: str = "flush"
    predicted_weight_versions: tuple[int, ...] = ()
    measured_weight_versions: tuple[int, ...] = ()
    device: str = "cpu"
    measured_peak_allocated: tuple[int, ...] | None = None
    measured_memory: tuple[MeasuredMemory, ...] | None = None
    predicted_step_quartiles_s: tuple[float, float] | None = None
    measured_step_quartiles_s: tuple[float, float] | None = None
    conditions: Conditions | None = None
    timeline_step_s: float | None = None

    @property
    def speed_up(self) -> float | None:
        """Speed-up of a step over plain training in one process with one thread."""
        if self.one_thread_step_s is None:
            return None
        return self.one_thread_step_s / self.measured_step_s


def read_outcome(path: Path) -> Outcome:
    """Read the outcome of a run; values that this version does not know are ignored.

    Raises:
        FileError: the file cannot be read, or has values that are missing or of the wrong type.
    """
    content = json_value(read_text(path, "outcome"), str(path), finite=False)
    if not isinstance(content, dict):
        raise FileError(f"{path} is no outcome of a run: it is a {type(content).__name__}")
    names = {field.name for field in fields(Outcome)}
    outcome_fields = {name: value for name, value in content.items() if name in names}
    return validate(json.dumps(outcome_fields), Outcome, str(path), kind="outcome of a run")
