"""verify with transfers: the output of `lower` passes, and each planted fault is reported."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.lower import Direction, LoweredSchedule, Transfer, lower
from penstock.schedule.op import Kind, Op, Schedule
from penstock.schedule.torch_csv.files import parse_csv
from penstock.verify.lowered import verify_lowered
from penstock.verify.verify import verify


def lowered_from(text):
    """Rows of cells with spaces between."""
    schedule, lowered = parse_csv(
        "\n".join(",".join(row.split()) for row in text.splitlines()), "mine"
    )
    return schedule, lowered


@given(custom_schedules(synchronous=True), st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_what_lower_adds_to_any_sound_schedule_passes(schedule, ahead):
    """The runtime runs this form: a verifier that refused it would be wrong, or the runtime
    would. Receives that wait for nothing need no deeper channels than those that wait where they
    stand.
    """
    report = verify_lowered(lower(schedule, ahead))
    alone = verify(schedule)
    assert report.peak_on_rank == alone.peak_on_rank
    assert report.channel_depth <= alone.channel_depth


def finishes(schedule, programs, depth):
    """Whether lowered programs finish if receives wait for nothing, ops wait for their messages,
    and a send waits until fewer than `depth` messages of its link have no receive yet; with depth 0
    until its own receive is posted. All copies of a stage run their U together.
    """
    at = [0] * len(programs)
    sent, posted, arrived = Counter(), Counter(), set()
    copies = {op: set() for op in schedule.ops if op.kind is Kind.U}
    inputs = {}
    for rank, program in enumerate(programs):
        for action in program:
            if isinstance(action, Op) and action.kind is Kind.U:
                copies[action].add(rank)
            elif isinstance(action, Transfer) and action.direction is Direction.RECV:
                kind, stage, m = action.message
                consumer = stage + 1 if kind is Kind.F else stage - 1
                inputs[rank, kind is Kind.F, consumer, m] = action.message

    def current_action(rank):
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    def moves(rank, action):
        if isinstance(action, Transfer):
            if action.direction is Direction.RECV:
                posted[action.peer, rank] += 1
                return {rank}
            link = rank, action.peer
            if sent[link] - posted[link] >= depth:
                return set()
            sent[link] += 1
            arrived.add(action.message)
            return {rank}
        if action.kind is Kind.U:
            together = copies[action]
            return together if all(current_action(other) == action for other in together) else set()
        message = inputs.get((rank, action.kind is Kind.F, *action[1:]))
        waits = action.kind is not Kind.W and message is not None and message not in arrived
        return set() if waits else {rank}

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            action = current_action(rank)
            for mover in moves(rank, action) if action is not None else ():
                at[mover] += 1
                moved = True
    return all(place == len(program) for place, program in zip(at, programs, strict=True))


@given(custom_schedules(synchronous=True), st.integers(0, 2))
@settings(deadline=None, max_examples=150)
def test_the_channel_depth_is_the_least_with_which_posted_receives_run_through(schedule, ahead):
    """Copies that update together count: a rank that waits in its U posts no further receive."""
    lowered = lower(schedule, ahead)
    least = next(depth for depth in range(200) if finishes(schedule, lowered.programs, depth))
    assert verify_lowered(lowered, schedule=schedule).channel_depth == least


@given(custom_schedules(synchronous=True), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_a_transfer_that_lacks_or_stands_twice_or_elsewhere_is_found_whatever_the_schedule(
    schedule, rng
):
    """Whatever the schedule, the fault is named: the transfer and its rank."""
    programs = [list(program) for program in lower(schedule).programs]
    places = [
        (rank, i)
        for rank, row in enumerate(programs)
        for i, action in enumerate(row)
        if isinstance(action, Transfer)
    ]
    if not places:
        return
    rank, i = rng.choice(places)
    transfer = programs[rank].pop(i)
    for extra, message in (
        ([], "is missing on rank"),
        ([transfer, transfer], "occurs 2 times, on ranks"),
    ):
        planted = [
            row[:i] + extra + row[i:] if r == rank else row for r, row in enumerate(programs)
        ]
        with pytest.raises(
            ScheduleError, match=rf"\[one transfer\] {transfer} {message}"
        ) as caught:
            verify_lowered(LoweredSchedule(tuple(map(tuple, planted))))
        assert (rank, str(transfer)) in [
            (finding.rank, finding.op) for finding in caught.value.findings
        ]
    if schedule.ranks > 1:
        other = rng.choice([r for r in range(schedule.ranks) if r != rank])
        planted = [[*row, transfer] if r == other else row for r, row in enumerate(programs)]
        with pytest.raises(
            ScheduleError, match=rf"\[one transfer\] {transfer} is on rank {other}, but"
        ) as caught:
            verify_lowered(LoweredSchedule(tuple(map(tuple, planted))))
        assert (other, str(transfer)) in [
            (finding.rank, finding.op) for finding in caught.value.findings
        ]


@given(custom_schedules(synchronous=True), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_two_receives_of_one_link_in_each_others_places_are_found_whatever_the_schedule(
    schedule, rng
):
    """Messages are sent without tags: each receive would get the other's numbers, without an error."""
    programs = [
        list(program)
        for program in lower(schedule, ahead=schedule.micro_batches * schedule.stages * 3).programs
    ]
    by_link = {}
    for rank, row in enumerate(programs):
        for i, action in enumerate(row):
            if isinstance(action, Transfer) and action.direction is Direction.RECV:
                by_link.setdefault((action.peer, rank), []).append(i)
    links = [link for link, places in by_link.items() if len(places) > 1]
    if not links:
        return
    source, target = rng.choice(links)
    one, other = sorted(rng.sample(by_link[source, target], 2))
    row = programs[target]
    row[one], row[other] = row[other], row[one]
    with pytest.raises(
        ScheduleError,
        match=rf"\[receive order\] message \d+ from rank {source} to rank {target} is sent as",
    ) as caught:
        verify_lowered(LoweredSchedule(tuple(map(tuple, programs))))
    (finding,) = caught.value.findings
    assert (finding.rule, finding.rank, finding.op) == ("receive order", target, str(row[one]))


SOUND = """\
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"""


def test_a_sound_file_passes_with_the_depth_of_its_own_transfers():
    """What a channel must buffer depends on where the receives stand."""
    schedule, lowered = lowered_from(SOUND)
    assert verify_lowered(lowered, schedule=schedule).channel_depth == 0
    sends_first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    schedule, lowered = lowered_from(sends_first)
    assert (
        verify_lowered(lowered, schedule=schedule).channel_depth == 1
    )  # each would wait for the other to come to its receive


@pytest.mark.parametrize(
    ("old", "new", "finding", "message"),
    [
        (
            "1RECV_F0 1F0 1RECV_F1 1F1",
            "1RECV_F1 1RECV_F0 1F0 1F1",
            ("receive order", 1, "1RECV_F1"),
            (
                r"message 1 from rank 0 to rank 1 is sent as 0SEND_F0 and received as 1RECV_F1: between two ranks messages are received in "
                r"the order in which they are sent, and 1RECV_F1 would get the numbers of 0SEND_F0"
            ),
        ),
        (
            "1B0 1SEND_B0 1B1 1SEND_B1",
            "1B0 1B1 1SEND_B1 1SEND_B0",
            ("receive order", 0, "0RECV_B0"),
            "message 1 from rank 1 to rank 0 is sent as 1SEND_B1 and received as 0RECV_B0",
        ),
        (
            "0SEND_F1 ",
            "",
            ("one transfer", 0, "0SEND_F1"),
            "0SEND_F1 is missing on rank 0: 1F1 on rank 1 would wait for it for ever",
        ),
        (
            "1RECV_F1 ",
            "",
            ("one transfer", 1, "1RECV_F1"),
            "1RECV_F1 is missing on rank 1: 1F1 needs it from rank 0",
        ),
        (
            "1RECV_F1 1F1",
            "1F1 1RECV_F1",
            ("one transfer", 1, "1RECV_F1"),
            "1RECV_F1 on rank 1 comes after 1F1, which needs it",
        ),
        (
            "0F1 0SEND_F1",
            "0SEND_F1 0F1",
            ("one transfer", 0, "0SEND_F1"),
            "0SEND_F1 on rank 0 comes before 0F1, which produces its value",
        ),
        (
            "0F0 0SEND_F0",
            "0F0 0SEND_F0 0SEND_F0",
            ("one transfer", 0, "0SEND_F0"),
            "0SEND_F0 occurs 2 times, on ranks 0, 0",
        ),
        (
            "0RECV_B0 0B0",
            "0B0",
            ("one transfer", 0, "0RECV_B0"),
            "0RECV_B0 is missing on rank 0: 0B0 needs it from rank 1",
        ),
        (
            "0F0 0SEND_F0",
            "0RECV_F0 0F0 0SEND_F0",
            ("one transfer", 0, "0RECV_F0"),
            "0RECV_F0 on rank 0 receives what no op makes or no op takes: F of micro-batch 0 from stage -1 to 0",
        ),
        (
            "1F1 1B0",
            "1F1 1SEND_F1 1B0",
            ("one transfer", 1, "1SEND_F1"),
            "1SEND_F1 on rank 1 sends what no op makes or no op takes",
        ),
        (
            "0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0",
            "0F1 0RECV_B0 0B0 0SEND_F0 0SEND_F1",
            ("no cycle", 0, "0B0"),
            "rank 0 cannot start 0B0: it needs 1SEND_B0 on rank 1",
        ),
        ("0B1", "", ("one backward", 0, "0B1"), "0B1 is missing for 0F1 on rank 0"),
        ("1F1 1B0", "1B0", ("one forward", None, "1F1"), "1F1 is missing"),
    ],
)
def test_a_planted_fault_is_found_and_named(old, new, finding, message):
    """Rule, rank and transfer are the whole diagnosis; torch runs most of these files, with wrong
    numbers or for ever.
    """
    assert old in SOUND
    schedule, lowered = lowered_from(SOUND.replace(old, new, 1))
    with pytest.raises(ScheduleError, match=message) as caught:
        verify_lowered(lowered, schedule=schedule)
    assert finding in [(f.rule, f.rank, f.op) for f in caught.value.findings]


def test_ops_are_checked_before_their_transfers():
    """Without its updates a file is not sound, whatever its transfers: these are not reported."""
    programs = [list(program) for program in lower(schedule("gpipe", 2, 2)).programs]
    programs[0] = [action for action in programs[0] if not isinstance(action, Transfer)]
    programs[1].remove(Op(Kind.U, 1, 1))
    with pytest.raises(ScheduleError) as caught:
        verify_lowered(LoweredSchedule(tuple(map(tuple, programs))))
    assert [finding.rule for finding in caught.value.findings] == ["update"]


def test_a_transfer_between_stages_of_one_rank_is_needless():
    """torch hands tensors over within a rank; the transfer would go from the rank to itself."""
    schedule, lowered = lowered_from("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0")
    with pytest.raises(
        ScheduleError,
        match="0SEND_F0 on rank 0 carries a value within one rank: stages 0 and 1 are both on rank 0",
    ):
        verify_lowered(lowered, schedule=schedule)


def test_a_transfer_for_another_rank_than_holds_the_stage_is_found():
    """Files name no ranks; programs made in code do."""
    programs = [list(program) for program in lower(schedule("1f1b", 3, 2)).programs]
    place = next(i for i, action in enumerate(programs[0]) if isinstance(action, Transfer))
    programs[0][place] = programs[0][place]._replace(peer=2)
    with pytest.raises(
        ScheduleError, match=r"0SEND_F0 on rank 0 is for rank 2, but 1F0 is on rank 1"
    ):
        verify_lowered(LoweredSchedule(tuple(map(tuple, programs))))


def test_the_limit_in_flight_holds_with_transfers_too():
    """One option of the command line, for every file."""
    schedule, lowered = lowered_from(SOUND)
    with pytest.raises(ScheduleError, match="holds 2 micro-batches in flight, over the limit of 1"):
        verify_lowered(lowered, 1, schedule)


def test_handed_over_activations_are_transfers_like_others():
    """BPipe's messages go between any two ranks, not only to neighbours."""
    schedule = Schedule.parse("0F0 0F1 0E1 0B0 0L1 0B1 0U1\n1F0 0E1 1B0 0L1 1F1 1B1 1U1")
    report = verify(schedule)
    assert verify_lowered(lower(schedule, ahead=0)).peak_on_rank == report.peak_on_rank


def test_a_file_of_stray_transfers_ends_after_a_thousand_findings():
    """The message lists twelve; more would not be read."""
    schedule, lowered = lowered_from("0F0 0B0 " + " ".join(f"{n}SEND_F{n}" for n in range(1, 3000)))
    with pytest.raises(
        ScheduleError, match=r"mine is not sound \(1000 findings, worst first\)"
    ) as caught:
        verify_lowered(lowered, schedule=schedule)
    assert str(caught.value).splitlines()[-1] == "  … and 988 more"


def test_the_weight_rule_that_is_named_holds_with_transfers_too():
    """By default it is that of the stream."""
    stream = schedule("pipedream", stages=3)
    lowered = lower(stream)
    assert verify_lowered(lowered, schedule=stream).weights == "stash"
    report = verify_lowered(lowered, schedule=stream, weights="vertical-sync")
    assert (report.weights, report.versions) == ("vertical-sync", (3, 3, 3))
