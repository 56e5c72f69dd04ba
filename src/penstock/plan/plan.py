"""Plan: where to cut, which schedule, how many micro-batches, and what is expected of it, in one
value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, final

from penstock.errors import FileError, PenstockError, PlanError
from penstock.plan.segments import Selection
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.stream import Stream
from penstock.store import read_json, write_json
from penstock.units import format_bytes, format_seconds
from penstock.weights.choice import rule_of

SCHEMA = 3

Recompute = Literal["never", "except_last", "always", "selective"]

#: What an option of a schedule may be: plain, so that a plan is JSON.
Option = bool | int | float | str | tuple[int, ...] | None


@final
@dataclass(frozen=True)
class Objective:
    """What a planner's own paper makes least: its name there, its value by the paper's formula, and
    the unit: `"s"`, `"bytes"` or `"1"`.
    """

    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        value = (
            format_seconds(self.value)
            if self.unit == "s"
            else format_bytes(self.value)
            if self.unit == "bytes"
            else f"{self.value:.4g}"
        )
        return f"{self.name} {value}"


@final
@dataclass(frozen=True)
class Traffic:
    """Bytes that go from one rank to another in a step (of an asynchronous plan, in a batch);
    activations and gradients of activations, not the gradients that copies of a stage add up.
    """

    from_rank: int
    to_rank: int
    bytes: int


@final
@dataclass(frozen=True)
class Remedy:
    """What would help: a change to the cluster or the plan, and a step's seconds with it."""

    change: str
    step_s: float


@final
@dataclass(frozen=True)
class Prediction:
    """What simulation says of a plan. Seconds are of one step, bytes of the fullest moment of every
    rank.

    A step of an asynchronous plan is one batch in the steady state, between filling and draining;
    so is its bubble.

    Attributes:
        step_s, bubble_ratio, samples_per_s: of a step.
        peak_memory: bytes of every rank at its fullest.
        one_device_s: a step of plain training, the whole batch at once on one device that has room
        for it. data_parallel_s: a step of data parallelism on as many devices as the cluster has,
        memory not asked; None where the batch has
            fewer samples than that, or there is one device.
        lower_bound_s: no way that the planner could choose is faster; 0 where it does not know.
        memory_parts: per rank, what `peak_memory` is for: (holder, bytes).
        traffic: bytes from rank to rank, where there are any.
        more_work: seconds of forwards that run again, over those of all work without.
        less_kept: share of a micro-batch's activations, of all stages, that recompute does not keep
        between forward and backward.
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

    @property
    def speed_up(self) -> float:
        """How many times faster than plain training on one device."""
        return self.one_device_s / self.step_s if self.step_s else 1.0

    @property
    def gap(self) -> float | None:
        """By how much, at most, another way is faster: step / lower bound - 1; None where no bound
        is known.
        """
        return self.step_s / self.lower_bound_s - 1 if self.lower_bound_s else None


@final
@dataclass(frozen=True)
class Candidate:
    """A way to run that the planner weighed. `why` is what bounds its time, or what it lacks;
    `peak_bytes` is of the fullest rank.

    `step_s` is as `Prediction` has it, `weights` the name of the weight rule, `replicas` the number
    of whole pipelines, or of ranks for every stage.
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


@final
@dataclass(frozen=True)
class Plan:
    """All that a run needs to know but the model and the data.

    Attributes:
        fingerprint: of the chain that this plan is for.
        layer_names: its layers, in order.
        lengths: layers in every stage.
        schedule_name, schedule_options, synchronous: how the schedule was made, for people.
        programs, slicing: the schedule itself, one line of ops for every rank: what runs; and how
        its micro-batches are cut
            further, if they are.
        stream: of an asynchronous schedule, how it goes on: the programs are then a stretch of it,
        which repeats itself. micro_batches, batch: parts of a batch, and samples in a batch.
        recompute: "never", "except_last", "always" or "selective" (see `simulate_schedule`).
        recomputed: if that is "selective", the layers that run again before their backward, by
        their place in the whole chain. segment_starts: consecutive ones of a stage run again
        together, as one segment, of which only the input is kept; those that
            begin another one all the same.
        weights, weights_options: name of the weight rule, and what it is given besides its
        defaults. cluster, cluster_ranks: name and size of the cluster it was made for. devices: per
        rank, which device of the cluster it is on; empty: rank r is on device r. torch_version: of
        the profile; empty where no torch was measured. planner, objective: who made it, and what
        its own paper makes least, where that is not the simulated step. predicted: time and memory.
        candidates: what was weighed, one for each schedule and number of stages, best first; the
        first is this plan. remedies: what would help most, best first. optimizer, optimizer_states:
        the optimizer that memory was planned for, empty where none was named, and the numbers that
        it
            keeps for each parameter.
        memory_limits: bytes that every rank may hold; empty where a plan does not say.
    """

    fingerprint: str
    layer_names: tuple[str, ...]
    lengths: tuple[int, ...]
    schedule_name: str
    programs: tuple[str, ...]
    micro_batches: int
    batch: int
    cluster: str
    cluster_ranks: int
    predicted: Prediction
    schedule_options: tuple[tuple[str, Option], ...] = ()
    synchronous: bool = True
    slicing: Slicing | None = None
    stream: Stream | None = None
    recompute: Recompute = "never"
    weights: str = "flush"
    weights_options: tuple[tuple[str, float], ...] = ()
    candidates: tuple[Candidate, ...] = ()
    devices: tuple[int, ...] = ()
    torch_version: str = ""
    planner: str = "auto"
    objective: Objective | None = None
    remedies: tuple[Remedy, ...] = ()
    recomputed: tuple[int, ...] = ()
    segment_starts: tuple[int, ...] = ()
    optimizer: str = ""
    optimizer_states: float = 1.0
    memory_limits: tuple[int, ...] = ()
    schema: int = SCHEMA

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_names)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.lengths)

    @property
    def ranks(self) -> int:
        """Ranks that the plan uses; the cluster may have more."""
        return len(self.programs)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, read back from its text.

        Raises:
            ScheduleError: a program has a word that is not an op.
        """
        text = "\n".join(f"rank {rank} | {ops}" for rank, ops in enumerate(self.programs))
        made = Schedule.parse(text, self.schedule_name, self.synchronous)
        return replace(
            made, options=self.schedule_options, slicing=self.slicing, stream=self.stream
        )

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First layer and one past the last layer of every stage."""
        ends = [sum(self.lengths[: stage + 1]) for stage in range(self.stages)]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def selection(self) -> Selection:
        """The layers that selective recompute runs again."""
        return Selection(self.recomputed, self.segment_starts)

    def check(self) -> None:
        """Refuse a plan whose parts do not fit each other; whether its schedule is sound, `verify`
        says.

        Raises:
            PlanError: it is so; the message names the part.
            ScheduleError: a program has a word that is not an op, or the weight rule cannot go with
            the programs. UnknownName: there is no such weight rule. SettingError: the weight rule
            has no such option.
        """
        if any(length < 1 for length in self.lengths) or sum(self.lengths) != self.layers:
            raise PlanError(
                f"stage lengths {list(self.lengths)} must be positive and sum to the {self.layers} layers"
            )
        found = self.schedule
        if found.stages != self.stages:
            raise PlanError(f"the programs have {found.stages} stages, the lengths {self.stages}")
        if found.micro_batches != self.micro_batches:
            raise PlanError(
                f"the programs have {found.micro_batches} micro-batches, not {self.micro_batches}"
            )
        if self.batch < self.micro_batches:
            raise PlanError(
                f"a batch of {self.batch} cannot be cut into {self.micro_batches} micro-batches"
            )
        if len(self.predicted.peak_memory) != self.ranks:
            raise PlanError(
                f"memory is predicted for {len(self.predicted.peak_memory)} ranks, the programs are for {self.ranks}"
            )
        if len(self.memory_limits) not in (0, self.ranks) or not self.optimizer_states >= 0:
            raise PlanError(
                f"memory limits for {len(self.memory_limits)} ranks and {self.optimizer_states} optimizer states do not go with "
                f"programs for {self.ranks} ranks: one limit for each, and 0 states or more"
            )
        if self.devices and (
            len(self.devices) != self.ranks
            or len(set(self.devices)) != self.ranks
            or not set(self.devices) <= set(range(self.cluster_ranks))
        ):
            raise PlanError(
                f"devices {list(self.devices)} must be {self.ranks} different ones of the cluster's {self.cluster_ranks}"
            )
        self._check_recomputed()
        if self.synchronous is not (self.stream is None):
            raise PlanError(
                "a synchronous plan has no stream, an asynchronous one has: synchronous is "
                f"{self.synchronous}, stream is {self.stream}"
            )
        if self.stream is not None and found.slices != found.batches * found.micro_batches:
            raise PlanError(
                f"{found.batches} batches of {found.micro_batches} are not the {found.slices} micro-batches of the programs"
            )
        rule_of(found, self.weights, dict(self.weights_options))

    def _check_recomputed(self) -> None:
        if self.recompute != "selective" and (self.recomputed or self.segment_starts):
            raise PlanError(
                f'recomputed and segment_starts say which layers recompute="selective" runs again, and recompute is '
                f"{self.recompute!r}"
            )
        if list(self.recomputed) != sorted(set(self.recomputed) & set(range(self.layers))):
            raise PlanError(
                f"recomputed {list(self.recomputed)} must be different ones of the {self.layers} layers, ascending"
            )
        if list(self.segment_starts) != sorted(set(self.segment_starts) & set(self.recomputed)):
            raise PlanError(
                f"segment_starts {list(self.segment_starts)} must be different ones of recomputed, ascending"
            )

    def check_fits(self, chain_fingerprint: str, ranks: int, torch_version: str = "") -> None:
        """Refuse a model, a number of ranks or a torch that this plan was not made for.

        Of versions the first two numbers count: 2.13.0+cpu is as good as 2.13.1.

        Raises:
            PlanError: it is another one; the message has all that differs.
        """
        findings = []
        if chain_fingerprint != self.fingerprint:
            findings.append(
                f"it was made for a chain of {self.layers} layers with fingerprint {self.fingerprint}, "
                f"and this one's is {chain_fingerprint}: profile this model and plan anew"
            )
        if ranks != self.ranks:
            findings.append(
                f"it uses {self.ranks} ranks, and there are {ranks}: "
                f"start {self.ranks} ranks, or plan for a cluster of {ranks}"
            )
        planned, here = (version.split(".")[:2] for version in (self.torch_version, torch_version))
        if self.torch_version and torch_version and planned != here:
            findings.append(
                f"it was made with torch {self.torch_version}, and this is torch {torch_version}, "
                "whose times may be others: profile and plan anew"
            )
        if findings:
            raise PlanError("\n  ".join(["the plan does not fit this run", *findings]))

    def save(self, path: str | Path) -> None:
        """Write JSON with a schema version.

        Raises:
            FileError: it cannot be written.
        """
        write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote, trusting nothing.

        Raises:
            FileError: the file is missing, is no plan, has another schema version, or its parts do
            not fit each other.
        """
        plan = read_json(path, cls, SCHEMA)
        try:
            plan.check()
        except PenstockError as error:
            raise FileError(f"{path} is no plan that can run: {error}") from error
        return plan

    def __str__(self) -> str:
        from penstock.plan.text import describe  # it needs what stands here

        return describe(self)
