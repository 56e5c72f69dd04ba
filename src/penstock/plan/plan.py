"""A plan: partition, schedule, micro-batches, recompute, devices, and predicted time and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import final

from penstock.errors import FileError, PenstockError, PlanError
from penstock.files.read import parse_json
from penstock.files.text import read_text
from penstock.model.chain import check_fingerprint
from penstock.notebook import NotebookText
from penstock.plan.prediction import Candidate, Objective, Prediction, Remedy
from penstock.plan.segments import Selection
from penstock.plan.sharding import Sharding
from penstock.schedule.op import Schedule
from penstock.schedule.recompute import Recompute
from penstock.schedule.size_limit import check_ops
from penstock.schedule.slicing import Slicing
from penstock.schedule.streaming.streams import Stream
from penstock.store import write_json
from penstock.units import format_seconds
from penstock.weights.catalogue import WeightRule
from penstock.weights.compatibility import rule_of

SCHEMA = 4
#: Versions that can be read: 3 has no sharding.
READABLE = (3, SCHEMA)

#: Types of a schedule's options: plain values, because a plan is stored as JSON.
Option = bool | int | float | str | tuple[int, ...] | None


@final
@dataclass(frozen=True, repr=False)
class Plan(NotebookText):
    """All that a run needs apart from the model and the data.

    Attributes:
        fingerprint: of the chain of layers that this plan is for.
        layer_names: of the chain, in order.
        lengths: layers per stage.
        schedule_name: of the schedule, to print.
        programs: the schedule itself: one line of ops per rank.
        micro_batches: per batch.
        batch: samples per batch.
        cluster, cluster_ranks: name and number of devices of the cluster it was made for.
        predicted: time and memory.
        schedule_options: options that the schedule was made with, to print.
        synchronous: whether the pipeline drains before each update.
        slicing: how micro-batches are cut into slices, if they are.
        stream: how an asynchronous schedule continues after `programs`, which are periodic.
        recompute: "never", "except_last", "always" or "selective" (see `simulate_schedule`).
        weights: name of the weight rule.
        weights_options: its options that differ from the defaults.
        candidates: evaluated configurations, one per schedule and number of stages, best first;
            the first is this plan.
        devices: per rank, the index of its device in the cluster; empty: rank r is on device r.
        cluster_devices: host and kind of every device of the cluster; empty if it names no hosts.
        torch_version: of the profile; empty if it was not measured with torch.
        planner: that made it.
        objective: that the planner's paper minimises, unless it is the simulated step.
        remedies: suggested changes, best first.
        recomputed: for "selective", the indices in the chain of the layers to recompute before
            their backward.
        segment_starts: consecutive recomputed layers of a stage form one segment, of which only
            the input is saved; these layers begin a new segment nevertheless.
        optimizer: that memory was planned for; empty if none was named.
        optimizer_states: numbers that it stores per parameter.
        optimizer_fused: whether its step is one kernel.
        memory_limits: bytes that each rank may hold; empty if there are no limits.
        search_note: that the search was cut short, and by what; empty if it was not.
        pipeline: the best candidate whose ranks hold different stages, if this plan is none, as
            data parallelism is none; else None, or if there is no such candidate that fits.
        pipeline_note: why this plan is faster than `pipeline`.
        tensor_parallel: devices that share every layer of a rank: a rank of the programs is a group
            of this number of devices, and memory is that of one of them.
        sequence_parallel, zero: see `Sharding`.
        schema: version of the file format.

    Examples:
        >>> import penstock as ps
        >>> profile = ps.Profile.load("docs/funnel.profile.json")
        >>> plan = ps.plan(profile, ps.cluster("local:2"), batch=64, stages=2, schedules="1f1b")
        >>> sum(plan.lengths) == len(profile.layers)
        True
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
    recompute: Recompute = Recompute.NEVER
    weights: str = "flush"
    weights_options: tuple[tuple[str, float], ...] = ()
    candidates: tuple[Candidate, ...] = ()
    devices: tuple[int, ...] = ()
    cluster_devices: tuple[tuple[str, str], ...] = ()
    torch_version: str = ""
    planner: str = "auto"
    objective: Objective | None = None
    remedies: tuple[Remedy, ...] = ()
    recomputed: tuple[int, ...] = ()
    segment_starts: tuple[int, ...] = ()
    optimizer: str = ""
    optimizer_states: float = 1.0
    optimizer_fused: bool = False
    memory_limits: tuple[int, ...] = ()
    search_note: str = field(default="", compare=False)
    pipeline: Candidate | None = None
    pipeline_note: str = ""
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    zero: int = 0
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
        """The schedule, parsed from `programs`.

        Raises:
            ScheduleError: a program has a word that is not an op, or the ops name more stages and
                micro-batches than a schedule can have.
        """
        text = "\n".join(f"rank {rank} | {ops}" for rank, ops in enumerate(self.programs))
        schedule = Schedule.parse(text, self.schedule_name, self.synchronous)
        check_ops(self.schedule_name, schedule.programs)
        return replace(
            schedule, options=self.schedule_options, slicing=self.slicing, stream=self.stream
        )

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Index of the first layer and of the layer after the last one, per stage."""
        ends = list(accumulate(self.lengths))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", Recompute.parse(self.recompute))

    @cached_property
    def rule(self) -> WeightRule:
        """The weight rule, checked to fit the schedule.

        Raises:
            UnknownName, PlanError, ScheduleError: see `rule_of`.
        """
        return rule_of(self.schedule, self.weights)

    @property
    def sharding(self) -> Sharding:
        """How the devices of a stage share its layers and its state."""
        return Sharding(self.tensor_parallel, self.sequence_parallel, self.zero)

    @property
    def selection(self) -> Selection:
        """The layers that selective recompute runs again, and their segments."""
        return Selection(self.recomputed, self.segment_starts)

    def check(self) -> None:
        """Check that the fields agree with each other. `verify` checks whether the schedule is
        sound.

        Raises:
            PlanError: fields contradict each other; the message names them.
            ScheduleError: a program has a word that is not an op, or the weight rule does not
                support the programs.
            UnknownName: there is no such weight rule.
            SettingError: the weight rule has no such option, or the fingerprint is none.
        """
        check_fingerprint(self.fingerprint, "the model")
        sharding = self.sharding  # refuses invalid values, which the checks below rely on
        self._check_sizes()
        self._check_memory()
        self._check_devices()
        self._check_recomputed()
        self._check_stream()
        if sharding.zero and self.stream is not None:
            raise PlanError("zero is for synchronous plans, and this one is asynchronous")
        self.rule.with_defaults(dict(self.weights_options))

    def _check_sizes(self) -> None:
        """Check that layers, stages, micro-batches and batch agree with the programs."""
        if any(length < 1 for length in self.lengths) or sum(self.lengths) != self.layers:
            raise PlanError(
                f"stage lengths {list(self.lengths)} must be positive and sum to the {self.layers} "
                "layers"
            )
        schedule = self.schedule
        if schedule.stages != self.stages:
            raise PlanError(
                f"the programs have {schedule.stages} stages, the lengths {self.stages}"
            )
        if schedule.micro_batches != self.micro_batches:
            raise PlanError(
                f"the programs have {schedule.micro_batches} micro-batches, "
                f"not {self.micro_batches}"
            )
        if self.batch < self.micro_batches:
            raise PlanError(
                f"a batch of {self.batch} cannot be cut into {self.micro_batches} micro-batches"
            )

    def _check_memory(self) -> None:
        """Check the predicted memory, the limits and the optimizer states."""
        if len(self.predicted.peak_memory) != self.ranks:
            raise PlanError(
                f"memory is predicted for {len(self.predicted.peak_memory)} ranks, "
                f"the programs are for {self.ranks}"
            )
        if len(self.memory_limits) not in (0, self.ranks) or not self.optimizer_states >= 0:
            raise PlanError(
                f"memory limits for {len(self.memory_limits)} ranks and {self.optimizer_states} "
                f"optimizer states do not go with programs for {self.ranks} ranks: "
                "set one limit for each rank, and 0 states or more"
            )

    def _check_devices(self) -> None:
        """Check that each rank has a device of its own in the cluster."""
        # With tensor parallelism these are numbers of groups of devices.
        distinct = set(self.devices)
        if self.devices and not (
            len(self.devices) == len(distinct) == self.ranks
            and distinct <= set(range(self.cluster_ranks // self.tensor_parallel))
        ):
            raise PlanError(
                f"devices {list(self.devices)} must be {self.ranks} different ones "
                f"of the cluster's {self.cluster_ranks}"
            )

    def _check_recomputed(self) -> None:
        """Check the layers and segments of selective recompute."""
        if self.recompute is not Recompute.SELECTIVE and (self.recomputed or self.segment_starts):
            raise PlanError(
                'recomputed and segment_starts are for recompute="selective", '
                f"but recompute is {self.recompute!r}"
            )
        if list(self.recomputed) != sorted(set(self.recomputed) & set(range(self.layers))):
            raise PlanError(
                f"recomputed {list(self.recomputed)} must be different ones "
                f"of the {self.layers} layers, ascending"
            )
        if list(self.segment_starts) != sorted(set(self.segment_starts) & set(self.recomputed)):
            raise PlanError(
                f"segment_starts {list(self.segment_starts)} must be different ones of recomputed, "
                "ascending"
            )

    def _check_stream(self) -> None:
        """Check that exactly an asynchronous plan has a stream, of all its micro-batches."""
        if self.synchronous is not (self.stream is None):
            raise PlanError(
                "a synchronous plan has no stream, an asynchronous one has: synchronous is "
                f"{self.synchronous}, stream is {self.stream}"
            )
        schedule = self.schedule
        if self.stream is not None and schedule.slices != schedule.batches * schedule.micro_batches:
            raise PlanError(
                f"{schedule.batches} batches of {schedule.micro_batches} are not "
                f"the {schedule.slices} micro-batches of the programs"
            )

    def check_fits(self, chain_fingerprint: str, ranks: int, torch_version: str = "") -> None:
        """Check that this plan was made for a model, a number of ranks and a version of torch.

        Only the first two numbers of the version matter: 2.13.0+cpu is equal to 2.13.1.

        Raises:
            PlanError: it was not; the message has all differences.
        """
        findings = []
        if self.tensor_parallel > 1 or self.zero > 1:
            findings.append(
                f"its stages are shared ({self.sharding.words}), which a plan alone does not run: "
                "run it over a mesh with parallelize= (docs/mesh.md), export it to torchtitan or "
                "Megatron, or plan with tensor_parallel=1 and zero=0 or 1"
            )
        if chain_fingerprint != self.fingerprint:
            findings.append(
                f"it was made for a chain of {self.layers} layers with fingerprint "
                f"{self.fingerprint}, but this one's is {chain_fingerprint}: "
                "profile this model and plan again"
            )
        if ranks != self.ranks:
            findings.append(
                f"it uses {self.ranks} ranks, but there are {ranks}: "
                f"start {self.ranks} ranks, or plan for a cluster of {ranks}"
            )
        planned_release = self.torch_version.split(".")[:2]
        current_release = torch_version.split(".")[:2]
        if self.torch_version and torch_version and planned_release != current_release:
            findings.append(
                f"it was made with torch {self.torch_version}, but this is torch {torch_version}, "
                "whose times may differ: profile and plan again"
            )
        if findings:
            raise PlanError("\n  ".join(["the plan does not fit this run", *findings]))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON with a schema version.

        Raises:
            FileError: the file cannot be written.
        """
        write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote, and check it.

        Raises:
            FileError: the file is missing, is no plan, has another schema version, or its fields
                contradict each other.
        """
        return cls.parse(read_text(path, "plan"), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Plan:
        """Return the plan in a text that `save` wrote, as `load` does for a file.

        Args:
            text: the JSON.
            source: place of the text, with which every message begins.

        Raises:
            FileError: see `load`.
        """
        plan = parse_json(text, cls, source, READABLE)
        # Fields that an older version lacks have their defaults, which makes it a plan of this one.
        plan = replace(plan, schema=SCHEMA)
        try:
            plan.check()
        except PenstockError as error:
            problems = "; ".join(map(str.strip, str(error).splitlines()))
            raise FileError(f"{source} is no valid plan: {problems}") from error
        return plan

    def __repr__(self) -> str:
        step = format_seconds(self.predicted.step_s)
        return (
            f"<Plan: {self.schedule_name}, {self.stages} stages on {self.ranks} ranks of "
            f"{self.cluster}, batch {self.batch} in {self.micro_batches} micro-batches, "
            f"predicted {step} a step>"
        )

    def __str__(self) -> str:
        from penstock.plan.description import describe  # imports this module

        return describe(self)
