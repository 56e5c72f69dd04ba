"""Apply a weight rule to whole programs: versions read, staleness, and versions kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from penstock.errors import Finding, ScheduleError
from penstock.schedule.op import Kind, Program, Schedule
from penstock.schedule.streaming.period import Period, period_of, with_batches
from penstock.schedule.streaming.streams import Waves
from penstock.schedule.transfers import unsound
from penstock.weights.catalogue import WeightRule
from penstock.weights.rule_types import Place, Reads
from penstock.weights.version_count import count_versions
from penstock.weights.version_trace import BatchedOps, VersionTrace, trace_versions


@dataclass(frozen=True)
class Use:
    """What the ops of one micro-batch do with the weights of a stage.

    Attributes:
        batch, micro_batch: its batch, counted from the beginning of the stream, and its number in
            the batch.
        reads: the versions that it reads, of the copy of the weights that its batch uses.
        next_forward: the version that the next F on the same copy of the weights reads. Older
            versions may be dropped if no micro-batch in flight reads them.
        first, last: whether on its rank its F is the first of its batch, and whether its gradient
            is the last.
    """

    batch: int
    micro_batch: int
    reads: Reads
    next_forward: int
    first: bool
    last: bool


@dataclass(frozen=True)
class _TableRow:
    """A micro-batch in the table of a stage.

    Attributes:
        place: input of the weight rule.
        next_number: number of the micro-batch of the next F.
        first, last: as in Use.
        age: updates between the version that its forward reads and its gradient.
        updates, updates_of_first_stage: updates of its copy of the weights per period, on its own
            stage and on the first.
    """

    place: Place
    next_number: int
    first: bool
    last: bool
    age: int
    updates: int
    updates_of_first_stage: int

    def later(self, periods: int, batches: int) -> Place:
        """Return the equivalent place a number of periods later, each of `batches` batches."""
        return self.place.later(
            periods * batches, periods * self.updates, periods * self.updates_of_first_stage
        )


@final
@dataclass(frozen=True)
class Uses:
    """The uses of every stage's weights in an endless stream.

    They are stored up to one period into the steady state; later uses repeat, with higher numbers.

    Attributes:
        rule: the weight rule.
        micro_batches: micro-batches per batch.
        batches: batches per period.
    """

    rule: WeightRule
    micro_batches: int
    batches: int
    _tables: tuple[tuple[_TableRow, ...], ...]

    def at(self, stage: int, number: int) -> Use:
        """Return the use by a micro-batch on a stage.

        `number` counts from 0 over all batches of the stream, without limit.
        """
        row, periods = self._find(stage, number)
        place = row.later(periods, self.batches)
        next_number = row.next_number + periods * self.batches * self.micro_batches
        next_row, next_periods = self._find(stage, next_number)
        next_forward = self.rule.reads(next_row.later(next_periods, self.batches)).forward
        return Use(
            place.batch,
            number % self.micro_batches,
            self.rule.reads(place),
            next_forward,
            row.first,
            row.last,
        )

    def staleness(self, stage: int) -> float:
        """Return the mean staleness of a stage's gradients in the steady state, in updates."""
        rows = self._tables[stage][-self.batches * self.micro_batches :]
        return sum(row.age for row in rows) / len(rows)

    def _find(self, stage: int, number: int) -> tuple[_TableRow, int]:
        """Return the row equivalent to a micro-batch, and how many periods earlier it is."""
        table, period_length = self._tables[stage], self.batches * self.micro_batches
        # The last period of the table is steady: later numbers are taken back into it.
        periods = max(0, (number - len(table)) // period_length + 1)
        return table[number - periods * period_length], periods


def uses(schedule: Schedule, rule: WeightRule) -> Uses:
    """Return what the micro-batches of a schedule read, for an endless run.

    >>> from penstock.schedule.catalogue import schedule
    >>> from penstock.weights.catalogue import weight_rule
    >>> uses(schedule("pipedream", 4, 1), weight_rule("stash")).at(stage=0, number=1000).reads
    Reads(forward=997, backward=997, forward_ahead=0, backward_ahead=0)

    Args:
        schedule: a sound schedule. A stream continues as it repeats; other schedules are run again
            and again, with a flush in between.
        rule: a weight rule that fits it (see `compatibility.rule_of`).

    Raises:
        ScheduleError: a stream does not repeat; or an op reads a version that does not exist, or
            one that the rule refuses, each with its finding.
    """
    endless = _EndlessRun.of(schedule)
    # A period more than the table has: its last rows look for the F after theirs.
    rows = endless.rows(endless.steady + 2 * endless.batches)
    trace = trace_versions(rows, schedule.stages, endless.pipelines)
    reads, _ = _checked_reads(schedule, rows, trace, rule)
    numbers = range((endless.steady + endless.batches) * endless.period.micro_batches)
    tables = []
    for stage in range(schedule.stages):
        stage_reads = reads[stage]
        table = [
            _table_row(endless, trace, stage_reads[number], stage, number) for number in numbers
        ]
        tables.append(tuple(table))
    return Uses(rule, endless.period.micro_batches, endless.batches, tuple(tables))


def _table_row(
    endless: _EndlessRun, trace: VersionTrace, reads: Reads, stage: int, number: int
) -> _TableRow:
    """Return the table row of a micro-batch on a stage."""
    micro_batch, share = trace.stages[stage][number], trace.share(stage, number)
    assert micro_batch.next_number is not None, (
        "the trace is a period longer, in which every copy of the weights has an F"
    )
    return _TableRow(
        trace.place(stage, number),
        micro_batch.next_number,
        first=micro_batch.order == 0,
        last=share.last_gradient == number,
        age=micro_batch.at_gradient - reads.forward,
        updates=endless.updates(micro_batch.rank, stage),
        updates_of_first_stage=endless.updates(trace.stages[0][number].rank, 0),
    )


@dataclass(frozen=True)
class _EndlessRun:
    """The endless continuation of a schedule.

    Attributes:
        period: the endless programs.
        pipelines: number of copies of the weights that take turns.
        batches: batches per period: after them, every copy of the weights has the same ops again.
        steady: first batch of the steady state.
    """

    period: Period
    pipelines: int
    batches: int
    steady: int

    @classmethod
    def of(cls, schedule: Schedule) -> _EndlessRun:
        """Return the endless run of a stream, or of a schedule that is run again and again.

        Raises:
            ScheduleError: a stream does not repeat (see `period_of`).
        """
        if schedule.stream is None:
            updates = tuple(map(_updates_per_stage, schedule.programs))
            heads = ((),) * schedule.ranks
            period = Period(1, max(schedule.slices, 1), heads, schedule.programs, updates)
            return cls(period, pipelines=1, batches=1, steady=0)
        period, pipelines = period_of(schedule), schedule.stream.pipelines
        # The steady state begins after the batches of the heads: the loops repeat.
        steady = 0
        for head in period.heads:
            for op in head:
                if op.kind is not Kind.U:
                    steady = max(steady, op.micro_batch // period.micro_batches + 1)
        return cls(period, pipelines, math.lcm(period.batches, pipelines), steady)

    def rows(self, batches: int) -> list[BatchedOps]:
        """Return the programs of a number of batches."""
        micro_batches = self.period.micro_batches
        return [
            list(with_batches(self.period.program(rank, batches), micro_batches))
            for rank in range(len(self.period.loops))
        ]

    def updates(self, rank: int, stage: int) -> int:
        """Return the number of updates of each copy of a stage's weights on a rank per period."""
        # Exact: `batches` is a multiple of both, so that all copies have equally many.
        return (
            self.period.updates[rank][stage] * self.batches // self.period.batches // self.pipelines
        )


def _updates_per_stage(program: Program) -> Counter[int]:
    """Return the number of U ops of each stage in a program."""
    return Counter(op.stage for op in program if op.kind is Kind.U)


@dataclass(frozen=True)
class WeightReadings:
    """Staleness and versions of a schedule under a weight rule, all per stage.

    All but `ages` are those of the endless stream, unless its programs do not repeat.

    Attributes:
        ages: staleness of every gradient of the programs: number of updates between the version
            that its forward has read and the weights at the moment of the gradient.
        max_staleness, mean_staleness: maximum age, and mean age in the steady state.
        versions: maximum number of versions that any rank keeps at a time, over all its copies of
            the weights.
        across: for streams with waves, the maximum number of batches of any other copy that are
            missing in a batch's weights, of those with a lower number; empty for other schedules.
    """

    ages: tuple[tuple[int, ...], ...]
    max_staleness: tuple[int, ...]
    mean_staleness: tuple[float, ...]
    versions: tuple[int, ...]
    across: tuple[int, ...] = ()


def readings(schedule: Schedule, rule: WeightRule) -> WeightReadings:
    """Compute how stale gradients are, and how many versions are kept.

    Args:
        schedule: a sound schedule.
        rule: a weight rule that fits it (see `compatibility.rule_of`).

    Raises:
        ScheduleError: an op reads a version that does not exist, or one that the rule refuses, each
            with its finding.
    """
    stages, slices = schedule.stages, schedule.slices
    if schedule.synchronous:
        ages = ((0,) * slices,) * stages
        return WeightReadings(ages, (0,) * stages, (0.0,) * stages, (1,) * stages)
    rows, steady = _rows_to_steady_state(schedule)
    stream = schedule.stream
    trace = trace_versions(rows, stages, 1 if stream is None else stream.pipelines)
    reads, versions = _checked_reads(schedule, rows, trace, rule)
    ages_of_stage = [_ages(trace, reads, stage) for stage in range(stages)]
    across: tuple[int, ...] = ()
    if stream is not None and stream.waves is not None:
        waves = stream.waves
        across = tuple(_missing_batches(trace, reads, stage, waves) for stage in range(stages))
    return WeightReadings(
        tuple(tuple(row[:slices]) for row in ages_of_stage),
        tuple(max(row) for row in ages_of_stage),
        tuple(sum(row[steady.start : steady.stop]) / len(steady) for row in ages_of_stage),
        tuple(versions),
        across,
    )


def _ages(trace: VersionTrace, reads: Sequence[dict[int, Reads]], stage: int) -> list[int]:
    """Return the staleness of all gradients of a stage, in micro-batch order."""
    micro_batches, stage_reads = trace.stages[stage], reads[stage]
    return [micro_batches[n].at_gradient - stage_reads[n].forward for n in sorted(stage_reads)]


def _rows_to_steady_state(schedule: Schedule) -> tuple[list[BatchedOps], range]:
    """Return programs that are long enough to show the steady state.

    Returns:
        The programs with batches, and the micro-batches of one period of the steady state. If the
        schedule is not a stream that repeats, its own programs, and all micro-batches.
    """
    size, stream = schedule.micro_batches, schedule.stream
    rows: list[BatchedOps] = [list(with_batches(program, size)) for program in schedule.programs]
    if stream is None:
        return rows, range(schedule.slices)
    with suppress(ScheduleError):  # raised if it does not repeat
        endless = _EndlessRun.of(schedule)
        # The pipeline has been full for a period and stays full for another; and whole waves have
        # arrived from the other copies at their distance.
        batches = 2 * endless.steady + 3 * endless.batches
        if stream.waves is not None:
            waves = (stream.waves.distance + 3) * stream.waves.length
            batches = max(batches, waves * schedule.copies)
        if batches > schedule.batches:
            rows = endless.rows(batches)
        steady = range(endless.steady * size, (endless.steady + endless.batches) * size)
        return rows, steady
    return rows, range(schedule.slices)


def _missing_batches(
    trace: VersionTrace, reads: Sequence[dict[int, Reads]], stage: int, waves: Waves
) -> int:
    """Return the maximum number of another copy's batches that a batch's weights do not contain."""
    micro_batches = trace.stages[stage]
    if len({micro_batch.rank for micro_batch in micro_batches.values()}) == 1:
        return 0
    # Weights contain whole waves of the other copies, up to D before the last wave that their own
    # copy has completed. At the gradient, the copy has as many updates as batches before this one.
    maximum = 0
    for number, micro_batch in micro_batches.items():
        complete_waves = reads[stage][number].forward // waves.length
        contained = max(complete_waves - waves.distance, 0) * waves.length
        maximum = max(maximum, micro_batch.at_gradient - contained)
    return maximum


def _checked_reads(
    schedule: Schedule, rows: Sequence[BatchedOps], trace: VersionTrace, rule: WeightRule
) -> tuple[list[dict[int, Reads]], list[int]]:
    """Apply the rule to all micro-batches, and check that all versions read exist.

    Returns:
        The reads, by stage and number, and the maximum number of versions kept per stage.

    Raises:
        ScheduleError: a check fails; all findings are listed.
    """
    stream = schedule.stream
    pipelines, waves = (1, None) if stream is None else (stream.pipelines, stream.waves)
    reads: list[dict[int, Reads]] = []
    findings: list[Finding] = []
    # Refusals are often the same for many micro-batches: only the first is reported.
    refusals: dict[tuple[int, str], str] = {}
    for stage, micro_batches in enumerate(trace.stages):
        reads.append({})
        for number, micro_batch in micro_batches.items():
            try:
                reads[stage][number] = rule.reads(trace.place(stage, number))
            except ScheduleError as error:
                refusals.setdefault((micro_batch.rank, str(error)), f"{stage}F{number}")
            delay = micro_batch.at_gradient - micro_batch.at_forward
            if waves is not None and delay >= waves.length:
                findings.append(_wave_finding(micro_batch.rank, f"{stage}F{number}", delay, waves))
    findings += [Finding("weights", text, rank, op) for (rank, text), op in refusals.items()]
    versions, missing_versions = count_versions(rows, trace, reads, rule, pipelines)
    findings += missing_versions
    if findings:
        raise unsound(schedule.name, findings)
    return reads, versions


def _wave_finding(rank: int, op: str, delay: int, waves: Waves) -> Finding:
    """Return the finding for a micro-batch with more batches in flight than a wave has.

    Args:
        rank, op: the forward.
        delay: number of updates of batches before it that the forward does not see.
        waves: the waves of the stream.
    """
    text = (
        f"{op} on rank {rank} reads weights without {delay} updates of the batches before it, and "
        f"a wave has {waves.length}: a wave comprises all batches in flight, so at most "
        f"{waves.length - 1} may be missing"
    )
    return Finding("wave", text, rank, op)
