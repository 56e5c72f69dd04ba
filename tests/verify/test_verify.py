"""verify: sound schedules pass with the right figures, and each planted fault is reported."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.custom_schedules import custom_schedules
from tests.verify.findings import findings_of

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Op, Schedule
from penstock.verify.verify import verify


@given(custom_schedules(), st.integers(0, 6))
@settings(deadline=None, max_examples=150)
def test_any_schedule_that_is_sound_by_construction_passes(schedule, limit):
    """Its peaks are those of a walk through the programs, and a limit is refused only below them."""
    report = verify(schedule)
    held = [0] * schedule.ranks
    peaks = [0] * schedule.ranks
    for rank, program in enumerate(schedule.programs):
        for op in program:
            held[rank] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(op.kind, 0)
            peaks[rank] = max(peaks[rank], held[rank])
    assert report.peak_on_rank == tuple(peaks)
    if max(peaks) <= limit:
        assert verify(schedule, limit) == report
    else:
        with pytest.raises(
            ScheduleError,
            match=rf"holds {max(peaks)} micro-batches in flight, over the limit of {limit}",
        ):
            verify(schedule, limit)


@given(custom_schedules(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_any_schedule_that_lacks_an_op_or_has_one_twice_is_refused_by_its_name(schedule, rng):
    """Whatever the schedule, the fault is named: the op, and where it still stands its rank."""
    places = [
        (rank, i)
        for rank, program in enumerate(schedule.programs)
        for i, op in enumerate(program)
        if op.kind is not Kind.U
    ]
    rank, i = rng.choice(places)
    op = schedule.programs[rank][i]
    programs = list(schedule.programs)
    programs[rank] = schedule.programs[rank][:i] + schedule.programs[rank][i + 1 :]
    with pytest.raises(ScheduleError, match=r"is missing|has no op|no forward at all") as caught:
        verify(Schedule(tuple(programs), synchronous=schedule.synchronous))
    if op.kind in (Kind.I, Kind.W):
        assert any(
            finding.op == str(op) and finding.rank == rank for finding in caught.value.findings
        )
    other = rng.randrange(schedule.ranks)
    programs = list(schedule.programs)
    programs[other] = (
        schedule.programs[other] + (op,) if other != rank else (op, *schedule.programs[other])
    )
    with pytest.raises(ScheduleError, match=rf"\[once\] {op} occurs 2 times, on ranks") as caught:
        verify(Schedule(tuple(programs), synchronous=schedule.synchronous))
    assert caught.value.findings[0].op == str(op)


@pytest.mark.parametrize(
    ("text", "finding", "message"),
    [
        # an op too few
        (
            "0F0 0F1 0B1 0U1\n1F0 1B0 1F1 1B1 1U1",
            ("one backward", "0B0", 0),
            r"\[one backward\] 0B0 is missing for 0F0 on rank 0",
        ),
        (
            "0F0 0B0 0B1 0U1\n1F0 1B0 1F1 1B1 1U1",
            ("one forward", "0F1", None),
            r"0F1 is missing: every stage runs every micro-batch",
        ),
        (
            "0F0 0F1 0B0 0B1 0U1\n1F0 1B0 1U1",
            ("one forward", "1F1", None),
            r"1F1 is missing: every stage runs every micro-batch",
        ),
        ("0F0 0W0 0U1", ("one backward", "0I0", 0), r"0I0 is missing for 0F0 on rank 0"),
        ("0F0 0I0 0U1", ("one backward", "0W0", 0), r"0W0 is missing for 0F0 on rank 0"),
        ("0F0 0B0 0U1\n1B0 1U1", ("one forward", "1F0", None), r"1F0 is missing"),
        ("0U1", ("one forward", None, None), r"the schedule has no forward at all"),
        ("", ("one forward", None, None), r"the schedule has no forward at all"),
        # an op too many
        ("0F0 0F0 0B0 0U1", ("once", "0F0", 0), r"\[once\] 0F0 occurs 2 times, on ranks 0, 0"),
        ("0F0 0B0 0U1\n0F0 0B0 0U1", ("once", "0F0", 1), r"0B0 occurs 2 times, on ranks 0, 1"),
        ("0F0 0B0 0I0 0W0 0U1", ("one backward", "0B0", 0), r"stage 0 has both 0B0 and 0I0 or 0W0"),
        ("0F0 0B0 0W0 0U1", ("one backward", "0B0", 0), r"stage 0 has both 0B0 and 0I0 or 0W0"),
        # an op elsewhere
        (
            "0F0 0U1\n0B0 0U1",
            ("one rank", "0B0", 1),
            r"0B0 is on rank 1, but 0F0 on rank 0 holds its activations",
        ),
        ("0F0 0I0 0U1\n0W0 0U1", ("one rank", "0W0", 1), r"0W0 is on rank 1, but 0F0 on rank 0"),
        # an op too early
        (
            "0B0 0F0 0U1",
            ("no cycle", "0B0", 0),
            r"\[no cycle\] rank 0 cannot start 0B0: it needs 0F0 on rank 0",
        ),
        (
            "0F0 0W0 0I0 0U1",
            ("no cycle", "0W0", 0),
            r"rank 0 cannot start 0W0: it needs 0I0 on rank 0",
        ),
        (
            "1F0 0F0 1B0 0B0 0U1 1U1",
            ("no cycle", "1F0", 0),
            r"rank 0 cannot start 1F0: it needs 0F0 on rank 0",
        ),
        # updates
        (
            "0F0 0B0",
            ("update", "0U1", 0),
            r"\[update\] stage 0 has no U on rank 0: its weights would never change",
        ),
        (
            "0F0 0U1 0B0",
            ("update", "0B0", 0),
            r"0B0 on rank 0 comes after the last U of stage 0: its gradient would be lost",
        ),
        (
            "0F0 0I0 0U1 0W0",
            ("update", "0W0", 0),
            r"0W0 on rank 0 comes after the last U of stage 0",
        ),
        (
            "0F0 0B0 0U1 0F1 0B1 0U2",
            ("update", "0U2", 0),
            r"stage 0 updates 2 times on rank 0, a synchronous schedule once",
        ),
        (
            "0F0 0B0 0U2",
            ("update", "0U2", 0),
            r"0U2 on rank 0 is update 1 of stage 0: versions count 1, 2, 3",
        ),
        ("0F0 0B0 0U0", ("update", "0U0", 0), r"0U0 on rank 0 is update 1 of stage 0"),
        # numbers
        (
            "0F0 0B0 0F2 0B2 0U1",
            ("one forward", "0F1", None),
            r"micro-batch 1 has no op at all, but micro-batch 2 has",
        ),
        (
            "1F0 1B0 1U1",
            ("one forward", "0F0", None),
            r"stage 0 has no op at all, but stage 1 has: they count from 0 without gaps",
        ),
    ],
)
def test_a_planted_fault_is_found_and_named(text, finding, message):
    """Programs read rule, op and rank from the fields, people from the text."""
    with pytest.raises(ScheduleError, match=message) as caught:
        verify(Schedule.parse(text))
    assert finding in [(f.rule, f.op, f.rank) for f in caught.value.findings]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("0F0 0B0 0U1 0F1 0B1 0U1", ("update", "0U1", 0)),
        ("0F0 0B0 0U1 0F1 0B1 0U3", ("update", "0U3", 0)),
        ("0F0 0B0 0U2 0F1 0B1 0U1", ("update", "0U2", 0)),
    ],
)
def test_versions_that_do_not_count_up_are_refused_in_an_asynchronous_schedule(text, finding):
    """Weight rules index their copies by version: a gap or a repeat would read the wrong weights."""
    findings, _ = findings_of(text, synchronous=False)
    assert findings == [finding]


def test_copies_that_update_unequally_often_are_refused():
    """U synchronises gradients: the copy with more of them would wait for ever."""
    findings, message = findings_of("0F0 0B0 0U1 0F1 0B1 0U2\n0F2 0B2 0U1", synchronous=False)
    assert findings == [("update", "0U2", 1)]
    assert (
        "stage 0 has 2 U on rank 0, but 1 on rank 1: its copies synchronise at every U" in message
    )


def test_copies_that_update_in_opposite_orders_are_refused():
    """Two collectives, each waiting for the rank that stands in the other."""
    findings, message = findings_of("0F0 1F0 1B0 0B0 0U1 1U1\n0F1 1F1 1B1 0B1 1U1 0U1")
    assert findings == [("no cycle", "0U1", 0), ("no cycle", "1U1", 1)]
    assert "rank 0 cannot start 0U1: it needs 1U1 on rank 1" in message


def test_a_cycle_over_two_ranks_names_both():
    """Each rank's finding has the op that cannot start, and the op that it waits for."""
    findings, message = findings_of("0F0 0B0 0F1 0B1 0U1\n1F0 1F1 1B0 1B1 1U1")
    assert findings == [("no cycle", "0B0", 0), ("no cycle", "1F1", 1)]
    assert message.splitlines() == [
        "mine is not sound (2 findings, worst first)",
        "  [no cycle] rank 0 cannot start 0B0: it needs 1B0 on rank 1",
        "  [no cycle] rank 1 cannot start 1F1: it needs 0F1 on rank 0",
    ]


def test_a_schedule_over_the_limit_names_the_op_that_passes_it():
    """That op is the one to move."""
    findings, message = findings_of(str(schedule("1f1b", 3, 4)), limit=1)
    assert findings == [("in flight", "0F1", 0), ("in flight", "1F1", 1)]
    assert (
        "rank 0 holds 3 micro-batches in flight, over the limit of 1, which 0F1 is the first to exceed"
        in message
    )


def test_the_limit_counts_all_stages_of_a_rank():
    """Memory is the rank's, whatever stages it holds."""
    text = "0F0 1F0 1B0 0B0 0U1 1U1"
    assert verify(Schedule.parse(text)).peak_on_rank == (2,)
    assert verify(Schedule.parse(text)).peak_in_flight == (1, 1)
    findings, _ = findings_of(text, limit=1)
    assert findings == [("in flight", "1F0", 0)]


def test_many_findings_are_counted_and_the_first_twelve_listed():
    """A terminal has little space; the exception has all findings."""
    findings, message = findings_of(" ".join(f"0F{m}" for m in range(20)))
    assert len(findings) == 20
    assert "(20 findings, worst first)" in message
    assert message.splitlines()[-1] == "  … and 8 more"
    assert len(message.splitlines()) == 14


def test_negative_numbers_are_refused():
    """Text cannot contain them, code can: no other check looks at stage -1."""
    programs = (
        (
            Op(Kind.F, 0, 0),
            Op(Kind.B, 0, 0),
            Op(Kind.U, 0, 1),
            Op(Kind.F, -1, 0),
            Op(Kind.B, -1, 0),
        ),
    )
    with pytest.raises(
        ScheduleError, match=r"\[numbers\] -1F0 on rank 0: stages and micro-batches count from 0"
    ) as caught:
        verify(Schedule(programs))
    assert [(f.op, f.rank) for f in caught.value.findings] == [("-1F0", 0), ("-1B0", 0)]
    with pytest.raises(
        ScheduleError, match=r"0F-2 on rank 0: stages and micro-batches count from 0"
    ):
        verify(
            Schedule(
                (
                    (
                        Op(Kind.F, 0, 0),
                        Op(Kind.B, 0, 0),
                        Op(Kind.F, 0, -2),
                        Op(Kind.B, 0, -2),
                        Op(Kind.U, 0, 1),
                    ),
                )
            )
        )


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("0F0 0B0 0F999999999999 0B999999999999 0U1", "0F1"),
        ("0F0 0B0 0U1 999999999999F0 999999999999B0 999999999999U1", "1F0"),
        ("0F0 0B0 0U999999999999", "0U999999999999"),
        ("0F0 0B999999999999 0U1", "0F1"),
    ],
)
def test_a_huge_number_with_a_gap_below_it_is_one_finding_at_once(text, op):
    """A typing error in a number must not take the time and memory of a trillion micro-batches."""
    findings, _ = findings_of(text)
    assert op in [name for _, name, _ in findings]
    assert len(findings) < 5


def test_a_file_of_stray_ops_ends_after_a_thousand_findings():
    """Two thousand ops that share neither stage nor micro-batch lack four million others."""
    findings, _ = findings_of(" ".join(f"{n}F{n}" for n in range(2000)))
    assert len(findings) == 1000


def test_ranks_without_ops_are_sound():
    """An idle rank wastes a device, and nothing else."""
    report = verify(
        Schedule.parse("rank 0 | 0F0 0F1 0B0 0B1 0U1\nrank 1 |\nrank 2 | 1F0 1B0 1F1 1B1 1U1")
    )
    assert report.peak_on_rank == (2, 0, 1)
    assert report.peak_in_flight == (2, 1)


def test_a_synchronous_schedule_has_no_staleness():
    """Every gradient of the batch is of the weights that it updates."""
    report = verify(schedule("1f1b", 4, 8))
    assert report.schedule == "1f1b"
    assert report.staleness_max == (0, 0, 0, 0)
    assert report.staleness_mean == (0.0, 0.0, 0.0, 0.0)
    assert report.peak_in_flight == report.peak_on_rank == (4, 3, 2, 1)
    assert report.channel_depth == 1


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("batches", [6, 9])
def test_staleness_of_pipedream_is_p_minus_1_minus_s(stages, batches):
    """Harlap et al. 2019: warm-up of p - s forwards, then backward, update, forward; start-up
    batches are less stale.
    """
    rows, means = [], []
    for stage in range(stages):
        ahead = stages - stage
        ops = [f"{stage}F{m}" for m in range(ahead)]
        for m in range(batches):
            ops += [
                f"{stage}B{m}",
                f"{stage}U{m + 1}",
                *([f"{stage}F{m + ahead}"] if m + ahead < batches else []),
            ]
        rows.append(" ".join(ops))
        means.append(sum(min(m, ahead - 1) for m in range(batches)) / batches)
    report = verify(Schedule.parse("\n".join(rows), synchronous=False))
    assert report.staleness_max == tuple(range(stages - 1, -1, -1))
    assert report.staleness_mean == pytest.approx(means)
    assert report.peak_in_flight == tuple(range(stages, 0, -1))


def test_staleness_of_a_split_backward_counts_at_the_weight_gradient():
    """W computes the gradient: an update between I and W makes it older."""
    report = verify(Schedule.parse("0F0 0F1 0I0 0I1 0W0 0U1 0W1 0U2", synchronous=False))
    assert (report.staleness_max, report.staleness_mean) == ((1,), (0.5,))
    assert report.peak_in_flight == (2,)


def test_ranks_over_the_limit_come_in_the_order_of_their_peaks():
    """Of equal peaks the first rank comes first; one that meets the limit is none of them."""
    reversed_ranks = schedule("1f1b", 4, 6).on_ranks((3, 2, 1, 0))
    with pytest.raises(ScheduleError) as caught:
        verify(reversed_ranks, in_flight_limit=2)
    assert [(finding.rank, finding.op) for finding in caught.value.findings] == [
        (3, "0F2"),
        (2, "1F2"),
    ]
    with pytest.raises(ScheduleError) as caught:
        verify(schedule("gpipe", 3, 4), in_flight_limit=2)
    assert [finding.rank for finding in caught.value.findings] == [0, 1, 2]
