"""Plan: where to cut, which schedule, how many micro-batches, and what is expected of it, in one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, final

from penstock.errors import FileError, PenstockError, PlanError
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing
from penstock.schedule.stream import Stream
from penstock.store import read_json, write_json
from penstock.units import format_bytes, format_seconds
from penstock.weights.choice import rule_of

SCHEMA = 1

Recompute = Literal["never", "except_last", "always"]

#: What an option of a schedule may be: plain, so that a plan is JSON.
Option = bool | int | float | str | tuple[int, ...] | None


@final
@dataclass(frozen=True)
class Prediction:
    """What simulation says of a plan. Seconds are of one step, bytes of the fullest moment of every rank.

    A step of an asynchronous plan is one batch in the steady state, between filling and draining; so is its bubble.
    `one_device_s` is a step of plain training, the whole batch at once on one device that has room for it.
    """

    step_s: float
    bubble_ratio: float
    peak_memory: tuple[int, ...]
    samples_per_s: float
    one_device_s: float

    @property
    def speed_up(self) -> float:
        """How many times faster than plain training on one device."""
        return self.one_device_s / self.step_s if self.step_s else 1.0


@final
@dataclass(frozen=True)
class Candidate:
    """A way to run that the planner weighed. `why` is what bounds its time, or what it lacks; `peak_bytes` is of the fullest rank.

    `step_s` is as `Prediction` has it, `weights` the name of the weight rule.
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


@final
@dataclass(frozen=True)
class Plan:
    """All that a run needs to know but the model and the data.

    Attributes:
        fingerprint: of the chain that this plan is for.
        layer_names: its layers, in order.
        lengths: layers in every stage.
        schedule_name, schedule_options, synchronous: how the schedule was made, for people.
        programs, slicing: the schedule itself, one line of ops for every rank: what runs; and how its micro-batches are cut
            further, if they are.
        stream: of an asynchronous schedule, how it goes on: the programs are then a stretch of it, which repeats itself.
        micro_batches, batch: parts of a batch, and samples in a batch.
        recompute: "never", "except_last" or "always" (see `simulate_schedule`).
        weights, weights_options: name of the weight rule, and what it is given besides its defaults.
        cluster, cluster_ranks: name and size of the cluster it was made for.
        predicted: time and memory.
        candidates: what was weighed, one for each schedule and number of stages, best first; the first is this plan.
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
        return replace(made, options=self.schedule_options, slicing=self.slicing, stream=self.stream)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First layer and one past the last layer of every stage."""
        ends = [sum(self.lengths[: stage + 1]) for stage in range(self.stages)]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def check(self) -> None:
        """Refuse a plan whose parts do not fit each other; whether its schedule is sound, `verify` says.

        Raises:
            PlanError: it is so; the message names the part.
            ScheduleError: a program has a word that is not an op, or the weight rule cannot go with the programs.
            UnknownName: there is no such weight rule.
            SettingError: the weight rule has no such option.
        """
        if any(length < 1 for length in self.lengths) or sum(self.lengths) != self.layers:
            raise PlanError(f"stage lengths {list(self.lengths)} must be positive and sum to the {self.layers} layers")
        found = self.schedule
        if found.stages != self.stages:
            raise PlanError(f"the programs have {found.stages} stages, the lengths {self.stages}")
        if found.micro_batches != self.micro_batches:
            raise PlanError(f"the programs have {found.micro_batches} micro-batches, not {self.micro_batches}")
        if self.batch < self.micro_batches:
            raise PlanError(f"a batch of {self.batch} cannot be cut into {self.micro_batches} micro-batches")
        if len(self.predicted.peak_memory) != self.ranks:
            raise PlanError(
                f"memory is predicted for {len(self.predicted.peak_memory)} ranks, the programs are for {self.ranks}"
            )
        if self.synchronous is not (self.stream is None):
            raise PlanError("a synchronous plan has no stream, an asynchronous one has: synchronous is "
                            f"{self.synchronous}, stream is {self.stream}")  # fmt: skip
        if self.stream is not None and found.slices != found.batches * found.micro_batches:
            raise PlanError(
                f"{found.batches} batches of {found.micro_batches} are not the {found.slices} micro-batches of the programs"
            )
        rule_of(found, self.weights, dict(self.weights_options))

    def check_fits(self, chain_fingerprint: str, ranks: int) -> None:
        """Refuse a model or a number of ranks that this plan was not made for.

        Raises:
            PlanError: it is another one; the message has all that differs.
        """
        findings = []
        if chain_fingerprint != self.fingerprint:
            findings.append(f"it was made for a chain of {self.layers} layers with fingerprint {self.fingerprint}, "
                            f"and this one's is {chain_fingerprint}: profile this model and plan anew")  # fmt: skip
        if ranks != self.ranks:
            findings.append(f"it uses {self.ranks} ranks, and there are {ranks}: "
                            f"start {self.ranks} ranks, or plan for a cluster of {ranks}")  # fmt: skip
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
            FileError: the file is missing, is no plan, has another schema version, or its parts do not fit each other.
        """
        plan = read_json(path, cls, SCHEMA)
        try:
            plan.check()
        except PenstockError as error:
            raise FileError(f"{path} is no plan that can run: {error}") from error
        return plan

    def __str__(self) -> str:
        expected = self.predicted
        parts = f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"
        what = (
            f"{self.schedule_name} on {self.ranks} of {self.cluster_ranks} ranks of {self.cluster}: {self.stages} stages, "
            f"batch {self.batch} in {parts}, recompute {self.recompute}, weights {self.weights}"
        )
        step = "a step" if self.synchronous else "a batch once it is full"
        time = (f"  predicted: {format_seconds(expected.step_s)} {step}, {expected.samples_per_s:.4g} samples/s, "
                f"{expected.speed_up:.2f} times one device, bubble {expected.bubble_ratio:.0%}")  # fmt: skip
        lines = [what, time] if self.synchronous else [what, time, self._asynchrony()]
        lines += _table(("stage", "rank", "layers", "from", "to", "peak memory of rank"), self._stage_rows())
        if self.candidates:
            lines.append("  weighed, best first:")
            head = ("schedule", "stages", "M", "recompute", "step", "", "peak memory", "why")
            rules = [each.weights for each in self.candidates]
            if set(rules) == {"flush"}:
                lines += _table(head, self._candidate_rows())
            else:  # which of them are asynchronous
                rows = zip(rules, self._candidate_rows(), strict=True)
                lines += _table((head[0], "weights", *head[1:]), [(row[0], rule, *row[1:]) for rule, row in rows])
        return "\n".join(lines)

    def _asynchrony(self) -> str:
        """How old gradients get, and what that takes."""
        from penstock.weights.uses import readings  # NumPy, which is not loaded to import penstock

        rule = rule_of(self.schedule, self.weights)
        given = "".join(f", {name} {value:g}" for name, value in self.weights_options)
        found = readings(self.schedule, rule)
        versions, oldest = max(found.versions), max(map(max, found.ages))
        kept = "1 version" if versions == 1 else f"up to {versions} versions"
        more = f" and {rule.extra:g} more of their size" if rule.extra else ""
        return f"  asynchronous: weights {rule.name}{given}, staleness at most {oldest}, {kept}{more}"

    def _stage_rows(self) -> list[tuple[str, ...]]:
        held, peaks = self.schedule.ranks_of_stage, self.predicted.peak_memory
        return [
            (
                str(stage), ", ".join(map(str, held[stage])), str(end - start), self.layer_names[start],
                self.layer_names[end - 1], ", ".join(format_bytes(peaks[rank]) for rank in held[stage]),
            )
            for stage, (start, end) in enumerate(self.bounds)
        ]  # fmt: skip

    def _candidate_rows(self) -> list[tuple[str, ...]]:
        best = self.predicted.step_s
        return [
            (
                each.schedule, str(each.stages), str(each.micro_batches), each.recompute, format_seconds(each.step_s),
                _against(each.step_s, best) if i else "", format_bytes(each.peak_bytes), each.why,
            )
            for i, each in enumerate(self.candidates)
        ]  # fmt: skip


def _against(seconds: float, best: float) -> str:
    """How much slower: `"+12.3%"`, or `"equal"` where that would round to nothing."""
    return f"{seconds / best - 1:+.1%}" if best and abs(seconds / best - 1) >= 0.0005 else "equal"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
