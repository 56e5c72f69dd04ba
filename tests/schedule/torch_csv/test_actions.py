"""CSV with communication: no deadlock, checks on reading, and torch's own files."""

from __future__ import annotations

import contextlib
import csv
import io
from collections import defaultdict
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules

from penstock.errors import FileError, ScheduleError
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.lower import Direction, Message, lower, output_message
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.torch_csv.actions import unsupported_reason
from penstock.schedule.torch_csv.files import from_csv, load_csv, parse_csv, read_csv, to_csv
from penstock.verify.lowered import verify_lowered
from penstock.verify.verify import verify


def expressible(name):
    """The schedules of this name that torch's actions can express, in some sizes."""
    candidates = []
    for stages, micro_batches in product((1, 2, 4, 6, 8), (1, 4, 8)):
        try:
            candidates.append(schedule(name, stages, micro_batches))
        except ScheduleError:
            continue
    return [candidate for candidate in candidates if unsupported_reason(candidate) is None]


NAMES = [name for name, facts in schedules().items() if facts.synchronous and not facts.needs_costs]


def between_ranks(text):
    """Per rank and per rank it exchanges messages with, these in order, both directions together."""
    _, lowered = parse_csv(text)
    orders = {}
    for rank, program in enumerate(lowered.programs):
        for action in program:
            if not isinstance(action, Op):
                orders.setdefault((rank, action.peer), []).append(action.message)
    return orders


def check(schedule):
    """Written and read back, the schedule is the same, and its transfers are those that it needs,
    in one order on both sides.
    """
    text = to_csv(schedule, communication=True)
    assert from_csv(text, schedule.name) == replace(schedule, options=())
    back, lowered = parse_csv(text, schedule.name)
    assert verify_lowered(lowered, schedule=back).channel_depth == 0
    for program in lowered.programs:
        ops = [action for action in program if isinstance(action, Op)]
        place_of = {output_message(op, back.stages): place for place, op in enumerate(ops)}
        places = defaultdict(list)
        for action in program:
            if not isinstance(action, Op) and action.direction is Direction.SEND:
                places[action.peer].append(place_of[action.message])
        # A link carries its messages in the order in which its sender computes them.
        assert all(row == sorted(row) for row in places.values())
    orders = between_ranks(text)
    assert all(orders[peer, rank] == messages for (rank, peer), messages in orders.items())


@pytest.mark.parametrize("name", NAMES)
def test_any_two_ranks_have_their_messages_in_one_order_and_need_no_buffer(name):
    """NCCL queues a pair of ranks' sends and receives together, and a send may wait for its
    receive: other orders stand still.
    """
    for candidate in expressible(name):
        check(candidate)


@given(custom_schedules(synchronous=True))
@settings(deadline=None, max_examples=80)
def test_the_same_holds_for_schedules_that_nobody_named(schedule):
    """Whatever the order of the ops and the placement."""
    if unsupported_reason(schedule) is not None:
        return
    if not all(schedule.stages_of_rank):
        with pytest.raises(
            ScheduleError,
            match=r"rank \d has no op: torch's CSV with communication has no cell for that",
        ):
            to_csv(schedule, communication=True)
        return
    check(schedule)


def test_the_cells_are_torchs_and_stand_where_its_executor_needs_them():
    """Parameters are there before the first op, and gradients are divided once, after the last."""
    text = to_csv(Schedule.parse("0F0 0F1&0B0 0B1\n1F0 1I0 1F1 1W0 1B1"), communication=True)
    assert text.splitlines() == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,(0F1;0B0)OVERLAP_F_B,0SEND_F1,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1UNSHARD,1F0,1I0,1SEND_B0,1RECV_F1,1F1,1W0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD",
    ]


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("0F0 1F0 1B0 0B0 0U1 1U1", "1B0,0B0,0REDUCE_GRAD,0RESHARD,1REDUCE_GRAD,1RESHARD"),
        ("0F0 1F0 1B0 0B0 0U1", "1B0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD"),
        ("0F0 1F0 1B0 0B0", "1B0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD"),
    ],
)
def test_every_stage_of_a_rank_reduces_its_gradients(text, cells):
    """Where its update stands; if one is missing, each does so after its last backward."""
    rows = to_csv(Schedule.parse(text), communication=True)
    assert rows == f"0UNSHARD,0F0,1UNSHARD,1F0,{cells}\n"


def test_an_update_stands_where_gradients_are_reduced():
    """A file that says where is taken at its word; one that does not has them after the last
    backward.
    """
    rows = "0F0,1F0,1B0{},0B0{}"
    assert (
        str(from_csv(rows.format(",1REDUCE_GRAD", ",0REDUCE_GRAD")))
        == "rank 0 | 0F0 1F0 1B0 1U1 0B0 0U1"
    )
    assert (
        str(from_csv(rows.format("", ",0REDUCE_GRAD,1REDUCE_GRAD")))
        == "rank 0 | 0F0 1F0 1B0 0B0 0U1 1U1"
    )
    parsed, lowered = parse_csv("0UNSHARD," + rows.format("", "") + ",0RESHARD")
    assert str(parsed) == "rank 0 | 0F0 1F0 1B0 1U1 0B0 0U1"
    assert tuple(lowered.programs) == parsed.programs
    with pytest.raises(ScheduleError, match="stage 1 has no U on rank 0"):
        verify(from_csv(rows.format("", ",0REDUCE_GRAD")))
    with pytest.raises(ScheduleError, match="0B0 on rank 0 comes after the last U of stage 0"):
        verify(from_csv(rows.format(",0REDUCE_GRAD,1REDUCE_GRAD", "")))


def test_programs_that_never_finish_are_not_written():
    """There is no order for their transfers."""
    with pytest.raises(ScheduleError, match="mine deadlocks: `verify` says where"):
        to_csv(
            Schedule.parse("0F0 0B0 0F1 0B1 0U1\n1F0 1F1 1B0 1B1 1U1", "mine"), communication=True
        )


def test_receives_in_another_order_than_was_sent_are_refused_on_reading(tmp_path):
    """torch runs such a file, and its gradients are wrong without an error."""
    path = tmp_path / "swapped.csv"
    text = to_csv(schedule("gpipe", 2, 3), communication=True)
    row = (
        text.splitlines()[1]
        .replace("1RECV_F0", "x")
        .replace("1RECV_F1", "1RECV_F0")
        .replace("x", "1RECV_F1")
    )
    row = row.replace("1F0,1RECV_F0", "1RECV_F0,1F0")
    path.write_text(f"{text.splitlines()[0]}\n{row}\n")
    message = r"swapped is not sound\s+\[receive order\] message 1 from rank 0 to rank 1 is sent as 0SEND_F0 and received as 1RECV_F1"
    with pytest.raises(ScheduleError, match=message) as caught:
        read_csv(path)
    assert [(f.rule, f.rank, f.op) for f in caught.value.findings] == [
        ("receive order", 1, "1RECV_F1")
    ]
    parsed, lowered = load_csv(path)
    with pytest.raises(ScheduleError, match="receive order"):
        verify_lowered(lowered, schedule=parsed)


def test_a_transfer_for_a_stage_that_nobody_holds_is_refused():
    """Reading any file ends in a result or in one of our errors."""
    with pytest.raises(
        ScheduleError, match="5SEND_F0 on rank 0 sends what no op makes or no op takes"
    ):
        from_csv("0F0,0B0,5SEND_F0")


NUMBER = st.integers(0, 2).map(str)
ACTION = st.builds(
    str.__add__,
    NUMBER,
    st.one_of(
        st.builds(
            str.__add__,
            st.sampled_from(["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]),
            NUMBER,
        ),
        st.sampled_from(["UNSHARD", "RESHARD", "REDUCE_GRAD"]),
    ),
)
OVERLAP = st.builds("({}F{};{}B{})OVERLAP_F_B".format, NUMBER, NUMBER, NUMBER, NUMBER)
ROW = st.lists(
    st.one_of(ACTION, ACTION, ACTION, OVERLAP, st.sampled_from(["", " ", "0U1"])),
    min_size=1,
    max_size=12,
)


@given(st.lists(ROW, min_size=1, max_size=3))
@settings(deadline=None, max_examples=200)
def test_whatever_actions_stand_in_a_file_reading_and_proving_it_ends_in_our_errors(rows):
    """A file may have any content; a KeyError would mean that a case is not handled."""
    text = "\n".join(",".join(row) for row in rows)
    with contextlib.suppress(FileError, ScheduleError):
        from_csv(text)
    with contextlib.suppress(FileError, ScheduleError):
        parsed, lowered = parse_csv(text)
        verify_lowered(lowered or lower(parsed), schedule=parsed)


@given(custom_schedules(synchronous=True), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_a_file_whose_cells_were_moved_is_sound_or_refused_and_if_sound_it_finishes(schedule, rng):
    """Played cell by cell with channels that keep their order: what passes must end, with every
    op's own message.
    """
    if unsupported_reason(schedule) is not None or not all(schedule.stages_of_rank):
        return
    rows = [row.split(",") for row in to_csv(schedule, communication=True).splitlines()]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
    back, lowered = parse_csv("\n".join(map(",".join, rows)))
    try:
        verify_lowered(lowered, schedule=back)
    except ScheduleError:
        assert not finishes(lowered)
    else:
        assert finishes(lowered)


def finishes(lowered):
    """Whether every rank comes to its end, with each receive's message the one that it is for, and
    no gradient lost: by playing.
    """
    programs, at = lowered.programs, [0] * len(lowered.programs)
    stages = 1 + max(op.stage for row in programs for op in row if isinstance(op, Op))
    channels, posted, done, arrived = (
        defaultdict(list),
        defaultdict(list),
        [set() for _ in programs],
        [set() for _ in programs],
    )
    while True:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                action = program[at[rank]]
                if not isinstance(action, Op):
                    sends = action.direction is Direction.SEND
                    made_by = {Kind.F: [Kind.F], Kind.B: [Kind.B, Kind.I]}[action.message.kind]
                    if sends and not any(
                        Op(kind, *action.message[1:]) in done[rank] for kind in made_by
                    ):
                        return False
                    (channels[rank, action.peer] if sends else posted[action.peer, rank]).append(
                        action.message
                    )
                elif not ready(action, stages, done[rank], arrived[rank]):
                    break
                else:
                    done[rank].add(action)
                at[rank] += 1
                moved = True
        for link, sent in channels.items():
            for message, expected in zip(sent, posted[link], strict=False):
                if message != expected:
                    return False
                arrived[link[1]].add(message)
        if not moved:
            break
    ended = all(place == len(program) for place, program in zip(at, programs, strict=True))
    late = any(
        op.kind in (Kind.B, Kind.W) and op in row[row.index(Op(Kind.U, op.stage, 1)) :]
        for row in programs
        for op in row
        if isinstance(op, Op)
    )
    return (
        ended and not late and all(channels[link] == messages for link, messages in posted.items())
    )


def ready(op, stages, done, arrived):
    """Whether what an op needs is on its rank."""
    if op.kind is Kind.U:
        return True
    mine = op.micro_batch
    if op.kind is Kind.W:
        return Op(Kind.I, op.stage, mine) in done
    if op.kind is Kind.F:
        return (
            op.stage == 0
            or Op(Kind.F, op.stage - 1, mine) in done
            or Message(Kind.F, op.stage - 1, mine) in arrived
        )
    if Op(Kind.F, op.stage, mine) not in done:
        return False
    above = {Op(Kind.B, op.stage + 1, mine), Op(Kind.I, op.stage + 1, mine)} & done
    return op.stage == stages - 1 or bool(above) or Message(Kind.B, op.stage + 1, mine) in arrived


def torch_lowered(text, stages, micro_batches, defer):
    """The file that torch makes of compute actions."""
    from torch.distributed.pipelining import schedules as torchs

    rows = {
        rank: [torchs._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }
    home = torchs._validate_schedule(rows, len(rows), stages, micro_batches)
    gathered = {
        rank: torchs._add_reduce_grad(torchs._add_unshard_reshard(row), micro_batches)
        for rank, row in rows.items()
    }
    torch_rows = torchs._add_send_recv(gathered, home.__getitem__, stages)
    if defer:
        torch_rows = torchs._defer_recv_ops(torch_rows, home.__getitem__)
    out = io.StringIO()
    csv.writer(out).writerows(torch_rows[rank] for rank in sorted(torch_rows))
    return out.getvalue()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe-v", "hanayo"])
def test_files_that_torch_wrote_are_read_and_pass(name):
    """Users of torch have files that torch wrote."""
    family_schedule = schedule(name, 8, 8)
    back, lowered = parse_csv(torch_lowered(to_csv(family_schedule), 8, 8, defer=False), name)
    verify_lowered(lowered, schedule=back)
    assert [[op for op in row if op.kind is not Kind.U] for row in back.programs] == [
        [op for op in row if op.kind is not Kind.U] for row in family_schedule.programs
    ]


def test_torchs_own_dualpipe_v_with_its_overlaps_is_read_sound_and_written_as_it_was():
    """Its overlaps are our pairs."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    half_made = SimpleNamespace(pp_group_size=4, _n_microbatches=10)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        ScheduleDualPipeV._calculate_single_rank_operations(half_made, rank) for rank in range(4)
    )
    schedule = from_csv(out.getvalue(), "theirs")
    verify(schedule)
    assert len(schedule.pairs) > 20
    assert to_csv(schedule) == out.getvalue()
    back, lowered = parse_csv(torch_lowered(out.getvalue(), 8, 10, defer=False), "theirs")
    verify_lowered(lowered, schedule=back)
    assert (back.programs, back.pairs) == (schedule.programs, schedule.pairs)


def test_torchs_deferred_receives_are_found_out_of_order_on_v_shapes():
    """torch 2.13 with `defer_pp_recv=True`: a gradient is received where an activation was sent.
    With a V, ranks exchange both kinds in both directions, and its pass keeps the order of neither;
    ZB-V's gradients came out 20 times too large.
    """
    text = torch_lowered(to_csv(schedule("zb-v", 4, 4)), 4, 4, defer=True)
    with pytest.raises(
        ScheduleError,
        match=r"\[receive order\] message 3 from rank 0 to rank 1 is sent as 0SEND_F2 and received "
        r"as 2RECV_B0",
    ):
        from_csv(text)
