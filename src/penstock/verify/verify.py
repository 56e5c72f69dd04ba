"""Every rule that a schedule must keep, checked before anything runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from penstock.errors import Finding
from penstock.schedule.arrays import op_arrays
from penstock.schedule.graph import build, channel_depth
from penstock.schedule.op import HANDING, Kind, Op, Schedule
from penstock.schedule.rules import needs
from penstock.schedule.transfers import unsound
from penstock.verify.stream import stream_findings
from penstock.verify.weights import read_by

#: The kinds that a micro-batch goes through on its rank, in order.
_LIFE = (Kind.F, Kind.E, Kind.L, Kind.B, Kind.I, Kind.W)

#: What adding shares of micro-batches as floats may be off by.
_DUST = 1e-9

#: A file of ten thousand stray ops lacks a hundred million others.
_MOST_FINDINGS = 1000


@dataclass(frozen=True)
class Report:
    """What `verify` found out about a sound schedule.

    `staleness_max` and `staleness_mean`: per stage, how many updates newer the weights are at the
    update than those that the forward of its gradient has read by the weight rule `weights`,
    predictions not counted. `peak_in_flight`: per stage, the most micro-batches on any of its
    ranks; `peak_on_rank`: per rank, over all its stages and what it has taken in from others. Both
    are fractions where micro-batches are cut. `channel_depth`: the least number of messages a
    blocking channel must buffer. `versions`: per stage, the most versions of its weights that a
    rank keeps at once, in all copies that take turns there. `staleness_across`: for streams with
    waves, per stage, the most batches of any other copy that a batch's weights lack, of those that
    come before it in the copies' own numbering; empty for all others.
    """

    schedule: str
    staleness_max: tuple[int, ...]
    staleness_mean: tuple[float, ...]
    peak_in_flight: tuple[float, ...]
    peak_on_rank: tuple[float, ...]
    channel_depth: int
    versions: tuple[int, ...]
    weights: str
    staleness_across: tuple[int, ...] = ()


def verify(
    schedule: Schedule, in_flight_limit: int | None = None, weights: str | None = None
) -> Report:
    """Prove that the programs are sound, or say all that is wrong.

    Args:
        schedule: any schedule, ours or a user's.
        in_flight_limit: the most micro-batches that a rank may hold, over all its stages.
        weights: name of the weight rule. If it is not given, the one that the stream is made for,
        `flush` for synchronous schedules,
            and `none` for asynchronous ones that do not say how they go on.

    Raises:
        ScheduleError: a rule is broken; each of its `findings` names the rule, the op and the rank.
        UnknownName: there is no such weight rule.
    """
    findings = (
        [*islice(_completeness(schedule), _MOST_FINDINGS)]
        or [*islice(_numbers(schedule), _MOST_FINDINGS)]
        or [*islice(_handing(schedule), _MOST_FINDINGS)]
        or [*_pairs(schedule)]
        or [*_order(schedule)]
        or [*_updates(schedule)]
        or [*islice(stream_findings(schedule), _MOST_FINDINGS)]
    )
    if not findings:
        stage_peaks, rank_peaks = op_arrays(schedule).in_flight
        if in_flight_limit is not None:
            findings += _over_limit(schedule, rank_peaks, in_flight_limit)
    if findings:
        raise unsound(schedule.name, findings)
    rule, found = read_by(schedule, weights)
    return Report(
        schedule.name,
        found.oldest,
        found.mean,
        stage_peaks,
        rank_peaks,
        channel_depth(schedule),
        found.versions,
        rule.name,
        found.across,
    )


def _completeness(schedule: Schedule) -> Iterator[Finding]:
    """Every (stage, micro-batch) has one F, and one B or one I and one W, all on one rank."""
    where: dict[Op, list[int]] = {}
    for rank, program in enumerate(schedule.programs):
        for op in program:
            if op.kind not in HANDING:
                where.setdefault(op, []).append(rank)
    if not any(op.kind is Kind.F for op in where):
        yield Finding("one forward", "the schedule has no forward at all")
        return
    for op, ranks in where.items():
        if op.stage < 0 or op.micro_batch < 0:
            yield Finding(
                "numbers",
                f"{op} on rank {ranks[0]}: stages and micro-batches count from 0",
                ranks[0],
                str(op),
            )
        if op.kind is not Kind.U and len(ranks) > 1:
            yield Finding(
                "once",
                f"{op} stands {len(ranks)} times, on ranks {', '.join(map(str, ranks))}",
                ranks[1],
                str(op),
            )
    stages = sorted({op.stage for op in where})
    micro_batches = sorted({op.micro_batch for op in where if op.kind is not Kind.U})
    # Numbers that no op names are one finding, however many there are; below, only those named are
    # walked.
    for word, numbers, text in (
        ("stage", stages, "{}F0"),
        ("micro-batch", micro_batches, f"{stages[0]}F{{}}"),
    ):
        gap = next(
            (n for n, number in enumerate(n for n in numbers if n >= 0) if n != number), None
        )
        if gap is not None:
            yield Finding(
                "one forward",
                f"{word} {gap} has no op at all, but {word} {numbers[-1]} has: they count from 0 "
                "without gaps",
                None,
                text.format(gap),
            )
    for stage in stages:
        for m in micro_batches:
            forward, whole, inputs, weights = (
                Op(kind, stage, m) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            )
            if forward not in where:
                yield Finding(
                    "one forward",
                    f"{forward} is missing: every stage runs every micro-batch",
                    None,
                    str(forward),
                )
                continue
            home = where[forward][0]
            if whole in where and (inputs in where or weights in where):
                yield Finding(
                    "one backward",
                    f"stage {stage} has both {whole} and {inputs} or {weights}",
                    home,
                    str(whole),
                )
            elif whole not in where and not (inputs in where and weights in where):
                lacking = weights if inputs in where else inputs if weights in where else whole
                yield Finding(
                    "one backward",
                    f"{lacking} is missing for {forward} on rank {home}",
                    home,
                    str(lacking),
                )
            for op in (whole, inputs, weights):
                if op in where and where[op][0] != home:
                    yield Finding(
                        "one rank",
                        f"{op} stands on rank {where[op][0]}, but {forward} on rank {home} "
                        "holds its activations",
                        where[op][0],
                        str(op),
                    )


def _numbers(schedule: Schedule) -> Iterator[Finding]:
    """With slices, ops number exactly those that there are, and the slices of a sequence stay on
    one rank of each stage.
    """
    slicing = schedule.slicing
    if slicing is None:
        return
    if schedule.slices != len(slicing.share):
        yield Finding(
            "slices",
            f"forwards number {schedule.slices} slices, the micro-batches are cut into {len(slicing.share)}",
        )
        return
    if slicing.along == "samples":
        return
    for (stage, number), rank in schedule.placement.items():
        before = slicing.neighbour(number, -1)
        if before is not None and schedule.placement[stage, before] != rank:
            yield Finding(
                "slices",
                f"{stage}F{number} stands on rank {rank}, but {stage}F{before}, the slice before it of the same "
                f"micro-batch, on rank {schedule.placement[stage, before]}",
                rank,
                f"{stage}F{number}",
            )


def _handing(schedule: Schedule) -> Iterator[Finding]:
    """Every E has its L, both on the rank of the forward and on one partner; on the former, F, E, L
    and backward come in that order.
    """
    at: dict[Op, dict[int, int]] = defaultdict(dict)
    for rank, program in enumerate(schedule.programs):
        for i, op in enumerate(program):
            if op.kind in HANDING and rank in at[op]:
                yield Finding("evict and load", f"{op} stands twice on rank {rank}", rank, str(op))
            if op.kind in HANDING:
                at[op][rank] = i
    for op in list(at):
        _, stage, number = op
        owner = schedule.placement.get((stage, number))
        other = Op(Kind.L if op.kind is Kind.E else Kind.E, stage, number)
        if owner not in at[op] or len(at[op]) != 2:
            yield Finding(
                "evict and load",
                f"{op} stands on ranks {', '.join(map(str, at[op]))}: it stands on two, that of "
                f"{stage}F{number} ({'none' if owner is None else owner}) and a partner",
                next(iter(at[op])),
                str(op),
            )
        elif at.get(other, {}).keys() != at[op].keys():
            yield Finding(
                "evict and load",
                f"{op} needs {other} on the same two ranks, {' and '.join(map(str, sorted(at[op])))}",
                owner,
                str(op),
            )
        elif op.kind is Kind.E:
            yield from _in_turn(schedule, op, other, at)


def _in_turn(
    schedule: Schedule, evict: Op, load: Op, at: dict[Op, dict[int, int]]
) -> Iterator[Finding]:
    """F, E, L, backward on the owner's rank; E, L on the partner's."""
    _, stage, number = evict
    owner = schedule.placement[stage, number]
    around = [
        (i, op)
        for i, op in enumerate(schedule.programs[owner])
        if op[1:] == (stage, number) and op.kind in _LIFE
    ]
    life = [op for _, op in around if op.kind is not Kind.W]
    wanted = sorted(life, key=lambda op: _LIFE.index(op.kind))
    if life != wanted:
        yield Finding(
            "evict and load",
            f"rank {owner} runs {' '.join(map(str, life))}: the order is "
            f"{' '.join(map(str, wanted))}",
            owner,
            str(evict),
        )
    for rank, place in at[evict].items():
        if rank != owner and at[load][rank] < place:
            yield Finding(
                "evict and load",
                f"rank {rank} gives {load} back before it takes {evict} in",
                rank,
                str(load),
            )


def _pairs(schedule: Schedule) -> Iterator[Finding]:
    """The ops of a pair stand next to each other, in no other pair, and neither needs the other."""
    beside = {pair for program in schedule.programs for pair in pairwise(program)}
    seen: set[Op] = set()
    for first, second in sorted(schedule.pairs, key=str):
        if (first, second) not in beside:
            yield Finding(
                "pair",
                f"{first}&{second} do not stand next to each other in that order on any rank",
                None,
                str(first),
            )
        elif any(first in group for group in needs(second, schedule.stages, schedule.slicing)):
            yield Finding(
                "pair",
                f"{first}&{second} cannot run as one: {second} needs {first}",
                None,
                str(second),
            )
        elif {first, second} & seen or {first.kind, second.kind} & {Kind.U, *HANDING}:
            yield Finding(
                "pair",
                f"{first}&{second}: an op of compute runs with one other, no more",
                None,
                str(first),
            )
        seen |= {first, second}


def _order(schedule: Schedule) -> Iterator[Finding]:
    """The programs and the transfers between them have no cycle."""
    graph = build(schedule)
    stuck = set(graph.order()[1])
    standing: dict[int, int] = {}
    for node in sorted(stuck):
        if node < len(graph.ops):
            standing.setdefault(graph.ops[node][0], node)
    for rank, node in standing.items():
        op = graph.ops[node][1]
        for home, other in dict.fromkeys(
            graph.work(before) for before in graph.waits_for[node] if before in stuck
        ):
            yield Finding(
                "no cycle",
                f"rank {rank} cannot start {op}: it needs {other} on rank {home}",
                rank,
                str(op),
            )


def _updates(schedule: Schedule) -> Iterator[Finding]:
    """Every copy of a stage updates after its gradients, as often as the others (with waves, but
    for the last one); versions count 1, 2, 3 …, up to 1 where the schedule is synchronous.
    """
    waves = schedule.stream is not None and schedule.stream.waves is not None
    updates = Counter(
        (rank, op.stage)
        for rank, program in enumerate(schedule.programs)
        for op in program
        if op.kind is Kind.U
    )
    for rank, program in enumerate(schedule.programs):
        for stage in schedule.stages_of_rank[rank]:
            ops = [op for op in program if op.stage == stage]
            versions = [op.micro_batch for op in ops if op.kind is Kind.U]
            if not versions:
                yield Finding(
                    "update",
                    f"stage {stage} has no U on rank {rank}: its weights would never change",
                    rank,
                    f"{stage}U1",
                )
                continue
            most = max(schedule.ranks_of_stage[stage], key=lambda copy: updates[copy, stage])
            if len(versions) + waves < updates[most, stage]:
                yield Finding(
                    "update",
                    f"stage {stage} has {updates[most, stage]} U on rank {most}, but {len(versions)} on "
                    f"rank {rank}: its copies {'take batches in turn' if waves else 'synchronise at every U'}",
                    rank,
                    f"{stage}U{len(versions) + 1}",
                )
            wrong = next((n for n, version in enumerate(versions, start=1) if version != n), None)
            if wrong is not None:
                yield Finding(
                    "update",
                    f"{stage}U{versions[wrong - 1]} on rank {rank} is update {wrong} of stage {stage}: "
                    "versions count 1, 2, 3 …",
                    rank,
                    f"{stage}U{versions[wrong - 1]}",
                )
            if schedule.synchronous and len(versions) > 1:
                yield Finding(
                    "update",
                    f"stage {stage} updates {len(versions)} times on rank {rank}, a synchronous "
                    "schedule once",
                    rank,
                    f"{stage}U{versions[1]}",
                )
            late = ops[-1]
            if late.kind is not Kind.U:
                yield Finding(
                    "update",
                    f"{late} on rank {rank} comes after the last U of stage {stage}: "
                    "its gradient would be lost",
                    rank,
                    str(late),
                )


def _over_limit(schedule: Schedule, rank_peaks: tuple[float, ...], limit: int) -> Iterator[Finding]:
    """Every rank that holds too many micro-batches, fullest first, at the op with which it first
    does.
    """
    for rank in sorted(range(schedule.ranks), key=lambda rank: -rank_peaks[rank]):
        for op, held in _held(schedule, rank):
            if held > limit + _DUST:
                yield Finding(
                    "in flight",
                    f"rank {rank} holds {rank_peaks[rank]} micro-batches in flight, over the limit of "
                    f"{limit}, which {op} is the first to pass",
                    rank,
                    str(op),
                )
                break


def _held(schedule: Schedule, rank: int) -> Iterator[tuple[Op, float]]:
    """After every op of the rank's program, the micro-batches whose activations are there."""
    held = 0.0
    shares = schedule.shares
    for op in schedule.programs[rank]:
        kind, of, number = op
        if kind in HANDING:
            here = (kind is Kind.L) == (schedule.placement[of, number] == rank)
            held += shares[number] if here else -shares[number]
        elif kind is Kind.F:
            held += shares[number]
        elif kind in (Kind.B, Kind.W):
            held -= shares[number]
        yield op, held
