"""Which versions every micro-batch reads, for whole programs; from that, how stale gradients are
and how many versions are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from penstock.errors import Finding, ScheduleError
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.period import Period, period_of, with_batches
from penstock.schedule.stream import Waves
from penstock.schedule.transfers import unsound
from penstock.weights.catalogue import WeightRule
from penstock.weights.kept import versions_held
from penstock.weights.reads import Place, Reads
from penstock.weights.walk import Row, Walk, walk


@dataclass(frozen=True)
class Use:
    """What the ops of one micro-batch do with the weights of a stage.

    Attributes:
        batch, micro_batch: its batch, counted from the stream's beginning, and its number in there.
        reads: the versions that it reads, of the copy of the weights that its batch uses.
        next_forward: the version that the next F after its own reads on its copy of the weights:
        versions below it which nothing
            in flight reads may go.
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
class _Row:
    """A micro-batch in the table.

    Attributes:
        place: where it stands.
        after: the number of the F after its own.
        first, last: as in Use.
        age: updates between the version that its forward reads and its gradient.
        updates, updates_of_first_stage: that its copy of the weights has in a period, on its own
        stage and on the first.
    """

    place: Place
    after: int
    first: bool
    last: bool
    age: int
    updates: int
    updates_of_first_stage: int

    def later(self, periods: int, batches: int) -> Place:
        """The place of the micro-batch that stands here some periods of so many batches later."""
        return self.place.later(
            periods * batches, periods * self.updates, periods * self.updates_of_first_stage
        )


@final
@dataclass(frozen=True)
class Uses:
    """The uses of every stage's weights, without end: from some number on they come again, a period
    of batches later.

    Attributes:
        rule: whose they are.
        micro_batches: of a batch.
        batches: in a period.
    """

    rule: WeightRule
    micro_batches: int
    batches: int
    _tables: tuple[tuple[_Row, ...], ...]

    def at(self, stage: int, number: int) -> Use:
        """The use by micro-batch `number` of the stream, counted from 0 over all batches, however
        large that is.
        """
        row, periods = self._find(stage, number)
        place = row.later(periods, self.batches)
        following, more = self._find(stage, row.after + periods * self.batches * self.micro_batches)
        next_forward = self.rule.reads(following.later(more, self.batches)).forward
        return Use(
            place.batch,
            number % self.micro_batches,
            self.rule.reads(place),
            next_forward,
            row.first,
            row.last,
        )

    def staleness(self, stage: int) -> float:
        """The mean staleness of a stage's gradients once the pipeline is full: updates between
        forward and gradient.
        """
        rows = self._tables[stage][-self.batches * self.micro_batches :]
        return sum(row.age for row in rows) / len(rows)

    def _find(self, stage: int, number: int) -> tuple[_Row, int]:
        """The row in whose place a micro-batch stands, and how many periods later."""
        table, every = self._tables[stage], self.batches * self.micro_batches
        periods = max(0, (number - len(table)) // every + 1)
        return table[number - periods * every], periods


def uses(schedule: Schedule, rule: WeightRule) -> Uses:
    """What the micro-batches of a schedule read, for as long as it goes on.

    >>> from penstock.schedule.catalogue import schedule
    >>> from penstock.weights.catalogue import weight_rule
    >>> uses(schedule("pipedream", 4, 1), weight_rule("stash")).at(stage=0, number=1000).reads
    Reads(forward=997, backward=997, forward_ahead=0, backward_ahead=0)

    Args:
        schedule: sound. A stream goes on as it repeats itself; other schedules are run again and
        again, from drain to drain. rule: a weight rule that goes with it (see `choice.rule_of`).

    Raises:
        ScheduleError: a stream does not repeat itself; or an op reads a version that is not there,
        or one that the rule does not
            take, each with its finding.
    """
    going = _Going.of(schedule)
    rows = going.rows(going.steady + 2 * going.batches)
    found = walk(rows, schedule.stages, going.pipelines)
    reads, _ = _checked(schedule, rows, found, rule)

    def row(stage: int, number: int) -> _Row:
        standing, share = found.standings[stage][number], found.share(stage, number)
        assert standing.after is not None, (
            "a period later there is an F on every copy of the weights"
        )
        own, first = (going.updates(found.standings[of][number].rank, of) for of in (stage, 0))
        age = standing.at_gradient - reads[stage][number].forward
        return _Row(
            found.place(stage, number),
            standing.after,
            standing.order == 0,
            share.last == number,
            age,
            own,
            first,
        )

    numbers = range((going.steady + going.batches) * going.period.micro_batches)
    tables = tuple(
        tuple(row(stage, number) for number in numbers) for stage in range(schedule.stages)
    )
    return Uses(rule, going.period.micro_batches, going.batches, tables)


@dataclass(frozen=True)
class _Going:
    """How a schedule goes on.

    Attributes:
        period: the programs, without end.
        pipelines: copies of the weights that take turns.
        batches: after so many, every copy of the weights has had the same ops again.
        steady: from this batch on all comes again.
    """

    period: Period
    pipelines: int
    batches: int
    steady: int

    @classmethod
    def of(cls, schedule: Schedule) -> _Going:
        """That of a stream; other schedules are run again and again. Raises as `period_of`."""
        if schedule.stream is None:
            updates = tuple(
                Counter(op.stage for op in program if op.kind is Kind.U)
                for program in schedule.programs
            )
            return cls(
                Period(
                    1, max(schedule.slices, 1), ((),) * schedule.ranks, schedule.programs, updates
                ),
                1,
                1,
                0,
            )
        period, pipelines = period_of(schedule), schedule.stream.pipelines
        # Whatever is not in a head comes again.
        begun = (
            op.micro_batch // period.micro_batches
            for head in period.heads
            for op in head
            if op.kind is not Kind.U
        )
        return cls(
            period, pipelines, math.lcm(period.batches, pipelines), 1 + max(begun, default=-1)
        )

    def rows(self, batches: int) -> list[Row]:
        """The programs of so many batches."""
        size = self.period.micro_batches
        return [
            list(with_batches(self.period.program(rank, batches), size))
            for rank in range(len(self.period.loops))
        ]

    def updates(self, rank: int, stage: int) -> int:
        """Updates that each copy of a stage's weights has on a rank before all comes again."""
        return (
            self.period.updates[rank][stage] * self.batches // self.period.batches // self.pipelines
        )


@dataclass(frozen=True)
class Readings:
    """What a schedule makes of a weight rule; all per stage. All but `ages` is of the whole stream,
    however long it goes on, unless its programs do not say how.

    Attributes:
        ages: of every gradient of the programs: how many updates newer the weights are when it is
        made than the version that its
            forward has read.
        oldest, mean: the most that an age can be, and the mean of them in the steady state.
        versions: the most versions that any rank keeps at once, of all its copies of the weights.
        across: of a stream with waves, the most batches of any other copy that a batch's weights
        lack, of those that come before
            it in the copies' own numbering. Empty for other schedules.
    """

    ages: tuple[tuple[int, ...], ...]
    oldest: tuple[int, ...]
    mean: tuple[float, ...]
    versions: tuple[int, ...]
    across: tuple[int, ...] = ()


def readings(schedule: Schedule, rule: WeightRule) -> Readings:
    """How stale gradients are, and how many versions are kept.

    Args:
        schedule: sound.
        rule: a weight rule that goes with it (see `choice.rule_of`).

    Raises:
        ScheduleError: an op reads a version that is not there, or one that the rule does not take,
        each with its finding.
    """
    if schedule.synchronous:
        none = (0,) * schedule.stages
        return Readings(
            ((0,) * schedule.slices,) * schedule.stages,
            none,
            tuple(map(float, none)),
            (1,) * schedule.stages,
        )
    stream, size = schedule.stream, schedule.micro_batches
    waves = None if stream is None else stream.waves
    rows: list[Row] = [list(with_batches(program, size)) for program in schedule.programs]
    full = range(schedule.slices)
    with suppress(ScheduleError):  # it does not repeat itself: as far as it goes
        if stream is not None:
            going = _Going.of(schedule)
            # By then it has been full for a period, and will be for longer; and whole waves have
            # come from others at their distance.
            enough = [2 * going.steady + 3 * going.batches]
            enough += (
                [(waves.distance + 3) * waves.length * max(map(len, schedule.ranks_of_stage))]
                if waves is not None
                else []
            )
            if max(enough) > schedule.batches:
                rows = going.rows(max(enough))
            full = range(going.steady * size, (going.steady + going.batches) * size)
    found = walk(rows, schedule.stages, 1 if stream is None else stream.pipelines)
    reads, versions = _checked(schedule, rows, found, rule)
    ages = [
        [found.standings[stage][n].at_gradient - own[n].forward for n in sorted(own)]
        for stage, own in enumerate(reads)
    ]
    across = (
        ()
        if waves is None
        else tuple(_across(found, reads, stage, waves) for stage in range(schedule.stages))
    )
    return Readings(
        tuple(tuple(row[: schedule.slices]) for row in ages),
        tuple(max(row) for row in ages),
        tuple(sum(row[n] for n in full) / len(full) for row in ages),
        tuple(versions),
        across,
    )


def _across(found: Walk, reads: list[dict[int, Reads]], stage: int, waves: Waves) -> int:
    """The most batches that a batch's weights lack of any other copy of the stage."""
    standings = found.standings[stage]
    if len({standing.rank for standing in standings.values()}) == 1:
        return 0
    # Weights contain whole waves of the others, up to D before the last that their own copy has
    # ended. A gradient finds as many
    # updates of its copy as there are batches before its own.
    return max(
        standing.at_gradient
        - max(reads[stage][number].forward // waves.length - waves.distance, 0) * waves.length
        for number, standing in standings.items()
    )


def staleness(schedule: Schedule, rule: WeightRule) -> list[list[int]]:
    """Per stage, the ages of all gradients of the programs, in the order of their micro-batches.
    Raises as `readings`.
    """
    return [list(ages) for ages in readings(schedule, rule).ages]


def versions_kept(schedule: Schedule, rule: WeightRule) -> tuple[int, ...]:
    """Per stage, the most versions of the weights that any of its ranks keeps at once, the newest
    included, however long a stream goes on. Raises as `readings`.

    >>> from penstock.schedule.catalogue import schedule
    >>> from penstock.weights.catalogue import weight_rule
    >>> versions_kept(schedule("pipedream", 4, 1), weight_rule("stash"))
    (4, 3, 2, 1)
    """
    return readings(schedule, rule).versions


def _checked(
    schedule: Schedule, rows: Sequence[Row], found: Walk, rule: WeightRule
) -> tuple[list[dict[int, Reads]], list[int]]:
    """What all micro-batches read, by stage and number, and the most versions kept; raises unless
    all that is read is there.
    """
    stream = schedule.stream
    pipelines, waves = (1, None) if stream is None else (stream.pipelines, stream.waves)
    reads: list[dict[int, Reads]] = []
    findings: list[Finding] = []
    refused: dict[tuple[int, str], str] = {}  # the same for many micro-batches: told of the first
    for stage, standings in enumerate(found.standings):
        reads.append({})
        for number, standing in standings.items():
            try:
                reads[stage][number] = rule.reads(found.place(stage, number))
            except ScheduleError as error:
                refused.setdefault((standing.rank, str(error)), f"{stage}F{number}")
            if waves is not None and standing.at_gradient - standing.at_forward >= waves.length:
                findings.append(_too_many(found, stage, number, waves))
    findings += [Finding("weights", text, rank, op) for (rank, text), op in refused.items()]
    versions, lacking = versions_held(rows, found, reads, rule, pipelines)
    findings += lacking
    if findings:
        raise unsound(schedule.name, findings)
    return reads, versions


def _too_many(found: Walk, stage: int, number: int, waves: Waves) -> Finding:
    standing = found.standings[stage][number]
    text = (
        f"{stage}F{number} on rank {standing.rank} lacks {standing.at_gradient - standing.at_forward} updates of the batches "
        f"before it, and a wave has {waves.length}: waves are of all batches that are in flight, so it may lack "
        f"{waves.length - 1}"
    )
    return Finding("wave", text, standing.rank, f"{stage}F{number}")
