"""Completeness: each finding with its rule, its words, its rank and its op."""

from __future__ import annotations

import pytest

from penstock.errors import Finding
from penstock.schedule.op import Kind, Op, Schedule
from penstock.verify.completeness import completeness_findings

STAGES = "they count from 0 without gaps"
EVERY = "every stage runs every micro-batch"


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("0F0 0B0 0U1", []),
        ("0F0 0E0 0L0 0B0 0U1\n0E0 0L0", []),
        ("0F0 0I0 0W0 0F1 0B1 0U1\n0U1", []),
        ("0B0 0U1", [("one forward", "the schedule has no forward at all", None, None)]),
        (
            "0F0 0B0\n0F0",
            [("once", "0F0 occurs 2 times, on ranks 0, 1", 1, "0F0")],
        ),
        (
            "0F0 0B0 0B0 0U1 0U1",
            [("once", "0B0 occurs 2 times, on ranks 0, 0", 0, "0B0")],
        ),
        (
            "0F0 0B0 3F0 3B0 5F0 5B0",
            [
                (
                    "one forward",
                    f"stage 1 has no op at all, but stage 5 has: {STAGES}",
                    None,
                    "1F0",
                )
            ],
        ),
        (
            "2F1 2B1 2F4 2B4",
            [
                (
                    "one forward",
                    f"stage 0 has no op at all, but stage 2 has: {STAGES}",
                    None,
                    "0F0",
                ),
                (
                    "one forward",
                    f"micro-batch 0 has no op at all, but micro-batch 4 has: {STAGES}",
                    None,
                    "2F0",
                ),
            ],
        ),
        ("0F0 0B0 0B1", [("one forward", f"0F1 is missing: {EVERY}", None, "0F1")]),
        (
            "0F0 0B0 1F0 1B0 1F1 1B1",
            [("one forward", f"0F1 is missing: {EVERY}", None, "0F1")],
        ),
        ("0F0\n0F1 0B1", [("one backward", "0B0 is missing for 0F0 on rank 0", 0, "0B0")]),
        ("0F1 0B1\n0F0 0I0", [("one backward", "0W0 is missing for 0F0 on rank 1", 1, "0W0")]),
        ("0F1 0B1\n0F0 0W0", [("one backward", "0I0 is missing for 0F0 on rank 1", 1, "0I0")]),
        (
            "0F1 0B1\n0F0 0B0 0W0",
            [("one backward", "stage 0 has both 0B0 and 0I0 or 0W0", 1, "0B0")],
        ),
        (
            "0F0 0I0\n0W0",
            [
                (
                    "one rank",
                    "0W0 is on rank 1, but 0F0 on rank 0 holds its activations",
                    1,
                    "0W0",
                )
            ],
        ),
    ],
)
def test_each_gap_is_one_finding_in_words_with_rank_and_op(text, findings):
    """A gap of many numbers is one finding; U may stand on every copy, E and L on two ranks."""
    expected = [Finding(*row) for row in findings]
    assert list(completeness_findings(Schedule.parse(text))) == expected


def test_numbers_below_0_are_findings_of_their_own():
    """They do not count as a gap."""
    schedule = Schedule.parse("0F0 0B0")
    forward = schedule.ops[0]
    for wrong in (forward._replace(stage=-1), forward._replace(micro_batch=-1)):
        case = Schedule(((), (*schedule.ops, wrong, wrong._replace(kind=schedule.ops[1].kind))))
        first, *_ = completeness_findings(case)
        message = f"{wrong} on rank 1: stages and micro-batches count from 0"
        assert first == Finding("numbers", message, 1, str(wrong))


@pytest.mark.parametrize("negative", [Op(Kind.F, -1, 0), Op(Kind.F, 0, -1), Op(Kind.B, 0, -2)])
def test_a_negative_number_is_no_gap_in_the_others(negative):
    """It is reported itself; numbers from 0 on have no gap then."""
    sound = Schedule.parse("0F0 0B0 0U1").programs[0]
    findings = list(completeness_findings(Schedule(((negative, *sound),))))
    assert ("numbers", str(negative)) in [(finding.rule, finding.op) for finding in findings]
    assert not [finding for finding in findings if "no op at all" in str(finding)]
