"""Findings about transfers: each with its message, its rank and the transfer."""

from __future__ import annotations

import pytest

from penstock.errors import Finding
from penstock.schedule.catalogue import schedule
from penstock.schedule.lower import Direction, LoweredSchedule, Message, Transfer, lower
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.transfers import ops_alone, transfer_findings, unsound

GPIPE = schedule("gpipe", 3, 2)


def text_of(direction, kind, stage, micro_batch, peer):
    """What a transfer is called in messages."""
    return str(Transfer(direction, Message(kind, stage, micro_batch), peer))


def findings_of(change, case=GPIPE):
    """What is found after a change to the programs with transfers."""
    lowered = lower(case)
    programs = [list(program) for program in lowered.programs]
    change(programs)
    changed = LoweredSchedule(tuple(map(tuple, programs)))
    return transfer_findings(ops_alone(changed), changed)


def find(programs, rank, direction, kind, stage, micro_batch):
    """The place of a transfer in the program of a rank."""
    sought = direction, Message(kind, stage, micro_batch)
    for place, action in enumerate(programs[rank]):
        if isinstance(action, Transfer) and action[:2] == sought:
            return place
    raise AssertionError("no such transfer")


SEND = Direction.SEND, Kind.F, 1, 1
RECV = Direction.RECV, Kind.F, 1, 1
SENT, RECEIVED = text_of(*SEND, 2), text_of(*RECV, 1)


def test_what_lower_adds_has_no_findings_and_leaves_the_ops():
    """Neither have ops whose input is missing: verify reports that."""
    assert findings_of(lambda programs: None) == []
    assert ops_alone(lower(GPIPE)).programs == GPIPE.programs
    assert findings_of(lambda programs: programs[0].remove(Op(Kind.F, 0, 0))) == []


def test_a_missing_transfer_is_named_with_what_waits_for_it():
    """Whether the send is missing, or the receive."""

    def drop_send(programs):
        del programs[1][find(programs, 1, *SEND)]

    def drop_receive(programs):
        del programs[2][find(programs, 2, *RECV)]

    waits = f"{SENT} is missing on rank 1: 2F1 on rank 2 would wait for it for ever"
    assert findings_of(drop_send) == [Finding("one transfer", waits, 1, SENT)]
    needs = f"{RECEIVED} is missing on rank 2: 2F1 needs it from rank 1"
    assert findings_of(drop_receive) == [Finding("one transfer", needs, 2, RECEIVED)]


def test_a_transfer_twice_is_named_with_all_its_ranks():
    """The second is the one at fault."""

    def twice(programs):
        programs[2].append(programs[1][find(programs, 1, *SEND)])

    message = f"{SENT} occurs 2 times, on ranks 1, 2"
    assert findings_of(twice) == [Finding("one transfer", message, 2, SENT)]


def move(direction, source, target, before=None, after=None, peer=None):
    """Return a change: the transfer goes from one rank to a place in the program of another."""

    def change(programs):
        transfer = programs[source].pop(find(programs, source, direction, Kind.F, 1, 1))
        if peer is not None:
            transfer = transfer._replace(peer=peer)
        place = len(programs[target])
        if before is not None:
            place = programs[target].index(Op.parse(before))
        if after is not None:
            place = programs[target].index(Op.parse(after)) + 1
        programs[target].insert(place, transfer)

    return change


@pytest.mark.parametrize(
    ("change", "rank", "text", "words"),
    [
        (move(Direction.SEND, 1, 0), 0, SENT, " is on rank 0, but 1F1 on rank 1"),
        (move(Direction.RECV, 2, 0), 0, RECEIVED, " is on rank 0, but 2F1 on rank 2"),
        (
            move(Direction.SEND, 1, 1, peer=0),
            1,
            SENT,
            " on rank 1 is for rank 0, but 2F1 is on rank 2",
        ),
        (
            move(Direction.RECV, 2, 2, before="2F1", peer=0),
            2,
            RECEIVED,
            " on rank 2 is for rank 0, but 1F1 is on rank 1",
        ),
        (
            move(Direction.SEND, 1, 1, before="1F1"),
            1,
            SENT,
            " on rank 1 comes before 1F1, which produces its value",
        ),
        (
            move(Direction.RECV, 2, 2, after="2F1"),
            2,
            RECEIVED,
            " on rank 2 comes after 2F1, which needs it",
        ),
    ],
)
def test_a_transfer_in_a_wrong_place_is_named_with_the_right_one(change, rank, text, words):
    """On another rank, for another one, before its value is there or after it is needed."""
    (finding,) = findings_of(change)
    assert (finding.rule, finding.rank, finding.op) == ("one transfer", rank, text)
    direction = Direction.SEND if text == SENT else Direction.RECV
    carried = {str(Transfer(direction, Message(Kind.F, 1, 1), peer)) for peer in range(3)}
    assert finding.message in {other + words for other in carried}


def test_transfers_of_values_that_do_not_cross_are_needless():
    """Within a rank, or of no op at all."""
    v = schedule("zb-v", 4, 2)

    def within(programs):
        programs[1].append(Transfer(Direction.SEND, Message(Kind.F, 1, 0), 0))

    def nothing(programs):
        programs[1].append(Transfer(Direction.SEND, Message(Kind.F, 1, 9), 0))
        programs[1].append(Transfer(Direction.RECV, Message(Kind.B, 2, 8), 0))

    # Stages 1 and 2 are both on the last rank of a V of four stages.
    (finding,) = findings_of(within, v)
    assert finding.message.endswith(
        " on rank 1 carries a value within one rank: stages 1 and 2 are both on rank 1"
    )
    assert [finding.message.partition(" on rank 1 ")[2] for finding in findings_of(nothing, v)] == [
        "sends what no op makes or no op takes: F of micro-batch 9 from stage 1 to 2",
        "receives what no op makes or no op takes: B of micro-batch 8 from stage 2 to 1",
    ]


def test_whether_a_value_crosses_is_decided_for_each_micro_batch():
    """Copies of a stage: micro-batch 0 crosses from rank 0 to 1, both stages of 1 are on rank 1."""
    copies = Schedule.parse("0F0 0B0 0U1\n1F0 1B0 0F1 1F1 1B1 0B1 1U1 0U1")

    def within(programs):
        programs[1].append(Transfer(Direction.SEND, Message(Kind.F, 0, 1), 0))

    (finding,) = findings_of(within, copies)
    assert finding.message.endswith("stages 0 and 1 are both on rank 1")


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_a_receive_that_is_posted_early_waits_for_nothing(ahead):
    """Only the op that takes the value waits; a receive before its sender can run is no cycle."""
    lowered = lower(schedule("1f1b", 3, 4), ahead)
    assert transfer_findings(ops_alone(lowered), lowered) == []


def test_findings_end_at_a_thousand():
    """A file of wrong transfers would have as many as it has transfers."""

    def stray(programs):
        programs[1] += [
            Transfer(Direction.SEND, Message(Kind.F, 1, number), 2) for number in range(9, 1500)
        ]

    assert len(findings_of(stray)) == 1000


def test_receives_in_another_order_than_the_sends_are_named_with_their_number():
    """They would get each other's numbers; only the first of a link is named."""

    def swap(programs):
        first = find(programs, 2, Direction.RECV, Kind.F, 1, 0)
        second = find(programs, 2, *RECV)
        program = programs[2]
        receive = program.pop(second)
        program.insert(first, receive)

    (finding,) = findings_of(swap)
    assert (finding.rule, finding.rank, finding.op) == ("receive order", 2, RECEIVED)
    sent = text_of(Direction.SEND, Kind.F, 1, 0, 2)
    assert finding.message.startswith(
        f"message 1 from rank 1 to rank 2 is sent as {sent} and received as {RECEIVED}: "
    )
    assert finding.message.endswith(f"{RECEIVED} would get the numbers of {sent}")


def test_programs_that_wait_in_a_circle_are_named_once_per_rank():
    """Each rank with the first action that waits for another rank."""

    def late(programs):
        # Rank 0 sends the first activation only after the gradient that follows from it.
        place = find(programs, 0, Direction.SEND, Kind.F, 0, 0)
        programs[0].append(programs[0].pop(place))
        second = find(programs, 0, Direction.SEND, Kind.F, 0, 1)
        programs[0].append(programs[0].pop(second))

    findings = findings_of(late)
    assert [(finding.rule, finding.rank) for finding in findings] == [
        ("no cycle", rank) for rank in (0, 1, 2)
    ]
    awaited = text_of(Direction.SEND, Kind.B, 1, 0, 0)
    message = f"rank 0 cannot start 0B0: it needs {awaited} on rank 1"
    assert findings[0] == Finding("no cycle", message, 0, "0B0")


def test_receives_in_a_wrong_order_are_reported_before_a_cycle():
    """A cycle through wrong messages would say nothing about the right ones."""

    def late_and_swapped(programs):
        for number in (0, 1):
            place = find(programs, 0, Direction.SEND, Kind.F, 0, number)
            programs[0].append(programs[0].pop(place))
        places = [find(programs, 1, Direction.RECV, Kind.F, 0, number) for number in (0, 1)]
        row = programs[1]
        row.insert(places[0], row.pop(places[1]))

    assert [finding.rule for finding in findings_of(late_and_swapped)] == ["receive order"]


def test_a_rank_that_waits_for_several_names_one_that_cannot_go_on():
    """The copies of stage 0 on ranks 0 to 2 update together, and only rank 2 never comes to it."""
    copies = Schedule.parse("0F0 0B0 0U1\n0F1 0B1 0U1\n0F2 0B2 0U1\n1F0 1B0 1F1 1B1 1F2 1B2 1U1")

    def late(programs):
        place = find(programs, 2, Direction.SEND, Kind.F, 0, 2)
        programs[2].append(programs[2].pop(place))

    first, second, *_ = findings_of(late, copies)
    for rank, finding in enumerate((first, second)):
        assert (finding.rule, finding.rank, finding.op) == ("no cycle", rank, "0U1")
        assert finding.message.endswith("on rank 2")


@pytest.mark.parametrize("count", [1, 2, 12, 13, 20])
def test_an_error_lists_a_dozen_findings_and_counts_the_others(count):
    """All of them are in its attribute."""
    findings = [Finding("rule", f"words {number}") for number in range(count)]
    error = unsound("mine", findings)
    head, *lines = str(error).split("\n  ")
    plural = f" ({count} findings, worst first)" if count > 1 else ""
    assert head == f"mine is not sound{plural}"
    expected = [f"[rule] words {number}" for number in range(min(count, 12))]
    assert lines == expected + ([f"… and {count - 12} more"] if count > 12 else [])
    assert list(error.findings) == findings
