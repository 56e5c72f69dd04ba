"""Gradient synchronisation of stages with copies: sound for all programs, early in idle times."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from tests.schedule.custom_schedules import custom_schedules

from penstock.schedule.gradient_sync import with_gradient_sync
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.unit_times import unit_times
from penstock.verify.verify import verify


def texts_with_sync(*rows):
    """The programs with their updates, as texts."""
    return [
        " ".join(map(str, row))
        for row in with_gradient_sync([[Op.parse(word) for word in row.split()] for row in rows])
    ]


@given(custom_schedules(synchronous=True))
@settings(deadline=None, max_examples=150)
def test_any_sound_programs_stay_sound_with_their_updates(schedule):
    """For any copies there is no deadlock, and only updates are added."""
    bare = tuple(
        tuple(op for op in program if op.kind is not Kind.U) for program in schedule.programs
    )
    back = replace(schedule, programs=with_gradient_sync(bare))
    verify(back)
    assert (
        tuple(tuple(op for op in program if op.kind is not Kind.U) for program in back.programs)
        == bare
    )


def test_copies_synchronise_in_a_gap_of_both_ranks():
    """Both wait for stage 1; meanwhile stage 2, whose gradients are complete, can synchronise."""
    assert texts_with_sync("0F0 2F1 2B1 0B0", "2F0 0F1 2B0 0B1", "1F0 1F1 1B1 1B0")[:2] == [
        "0F0 2F1 2B1 2U1 0B0 0U1",
        "2F0 0F1 2B0 2U1 0B1 0U1",
    ]


def test_a_stage_without_a_copy_has_its_update_too():
    """An ordinary U, which waits for no other rank."""
    assert texts_with_sync("0F0 1F0 1B0 0B0") == ["0F0 1F0 1B0 0B0 1U1 0U1"]


def test_a_rank_without_ops_has_no_update():
    """A prefix of a batch may leave one without work."""
    programs = with_gradient_sync([[Op.parse("0F0"), Op.parse("0B0")], []])
    assert programs == Schedule.parse("0F0 0B0 0U1\nrank 1 |").programs


def test_no_update_separates_the_ops_of_a_pair():
    """Both begin at the same moment; the update is before or after both."""
    ops = [Op.parse(word) for word in ["0F0", "0F1", "0B0", "0B1"]]
    pairs = frozenset({(ops[1], ops[2])})
    schedule = Schedule(with_gradient_sync([ops], pairs), pairs=pairs)
    assert str(schedule) == "rank 0 | 0F0 0F1&0B0 0B1 0U1"


@settings(max_examples=50)
@given(custom_schedules(synchronous=True))
def test_a_stage_synchronises_at_the_first_moment_at_which_all_its_ranks_are_idle(schedule):
    """Against all moments at which an op ends: earlier ranks may have to wait for later ones again
    and again.
    """
    bare = [[op for op in program if op.kind is not Kind.U] for program in schedule.programs]
    programs = with_gradient_sync(bare)
    times = unit_times(Schedule(tuple(map(tuple, bare))), lambda op: 1.0 + (op.kind is Kind.B))
    spans = [[] for _ in bare]
    ops = [(rank, op) for rank, program in enumerate(bare) for op in program]
    rows = zip(times.start.tolist(), times.end.tolist(), ops, strict=True)
    for start, end, (rank, op) in rows:
        spans[rank].append((start, end, op))
    moments = sorted({end for row in spans for _, end, _ in row})
    sync_points = []
    for stage in range(schedule.stages):
        ranks = [rank for rank, row in enumerate(spans) if any(op.stage == stage for *_, op in row)]
        ready = max(end for rank in ranks for _, end, op in spans[rank] if op.stage == stage)
        moment = next(
            moment
            for moment in moments
            if moment >= ready
            and not any(start <= moment < end for rank in ranks for start, end, _ in spans[rank])
        )
        for rank in ranks:
            before = [op for start, _, op in spans[rank] if start < moment]
            place = programs[rank].index(Op(Kind.U, stage, 1))
            assert [op for op in programs[rank][:place] if op.kind is not Kind.U] == before
        sync_points.append((moment, ready, stage))
    for rank, program in enumerate(programs):
        stages = [stage for *_, stage in sorted(sync_points)]
        updates = [op.stage for op in program if op.kind is Kind.U]
        assert updates == [stage for stage in stages if any(op.stage == stage for op in bare[rank])]
