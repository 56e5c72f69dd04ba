"""What a plan carries of its search: predicted time and memory, candidates, suggestions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from penstock.schedule.recompute import Recompute
from penstock.units import format_bytes, format_seconds


@final
@dataclass(frozen=True)
class Objective:
    """The objective that a planner's paper minimises, with the name and value it has there.

    Attributes:
        name: as in the paper.
        value: by the paper's formula.
        unit: `"s"`, `"bytes"` or `"1"`.
    """

    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        if self.unit == "s":
            return f"{self.name} {format_seconds(self.value)}"
        if self.unit == "bytes":
            return f"{self.name} {format_bytes(self.value)}"
        return f"{self.name} {self.value:.4g}"


@final
@dataclass(frozen=True)
class Traffic:
    """Bytes sent from one rank to another per step, or per batch of an asynchronous plan.

    Counts activations and their gradients, but not the all-reduce of weight gradients between the
    replicas of a stage.
    """

    from_rank: int
    to_rank: int
    bytes: int


@final
@dataclass(frozen=True)
class Remedy:
    """A suggested change to the cluster or the plan, and the seconds of a step with it."""

    change: str
    step_s: float


@final
@dataclass(frozen=True)
class Prediction:
    """Simulated time and memory of a plan.

    A step of an asynchronous plan is one batch in the steady state, between filling and draining;
    its bubble ratio is that of the steady state as well.

    Attributes:
        step_s: seconds of a step.
        bubble_ratio: idle share of all ranks' time in a step.
        peak_memory: largest memory of each rank, in bytes.
        samples_per_s: throughput.
        one_device_s: seconds of a step of plain training, with the whole batch at once on one
            device that is large enough for it.
        data_parallel_s: seconds of a step of data parallelism on all devices of the cluster,
            ignoring memory; None if the batch has fewer samples than the cluster has devices, or
            for one device.
        lower_bound_s: lower bound of a step over the planner's search space; 0 if unknown.
        memory_parts: per rank, what `peak_memory` consists of: (holder, bytes).
        traffic: bytes sent between ranks, where there are any.
        more_work: seconds of recomputed forwards / seconds of all work without recompute.
        less_kept: share of a micro-batch's activations, over all stages, that recompute does not
            save between forward and backward.
        busy_s: by rank, the seconds in a step in which it computes, without messages and updates;
            empty for asynchronous plans and with recompute.
    """

    step_s: float
    bubble_ratio: float
    peak_memory: tuple[int, ...]
    samples_per_s: float
    one_device_s: float
    data_parallel_s: float | None = None
    lower_bound_s: float = 0.0
    memory_parts: tuple[tuple[tuple[str, int], ...], ...] = ()
    traffic: tuple[Traffic, ...] = ()
    more_work: float = 0.0
    less_kept: float = 0.0
    busy_s: tuple[float, ...] = ()

    @property
    def speed_up(self) -> float:
        """Time of plain training on one device / time of a step."""
        return self.one_device_s / self.step_s if self.step_s else 1.0

    @property
    def gap(self) -> float | None:
        """Relative gap to the lower bound, step / lower bound - 1; None if no bound is known."""
        return self.step_s / self.lower_bound_s - 1 if self.lower_bound_s else None


@final
@dataclass(frozen=True)
class Candidate:
    """A configuration that the planner evaluated.

    Attributes:
        schedule, stages, micro_batches, recompute: of the configuration.
        lengths: layers per stage.
        step_s: seconds of a step, as in `Prediction`.
        peak_bytes: highest peak memory of a rank.
        why: what bounds its time, or why it is infeasible.
        weights: name of the weight rule.
        replicas: number of replicas of the whole pipeline, or of each stage.
    """

    schedule: str
    stages: int
    micro_batches: int
    recompute: Recompute
    lengths: tuple[int, ...]
    step_s: float
    peak_bytes: int
    why: str
    weights: str = "flush"
    replicas: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", Recompute.parse(self.recompute))
