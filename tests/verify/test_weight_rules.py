"""verify and weight rules: staleness and versions in the report, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.errors import ScheduleError, UnknownName
from penstock.schedule.catalogue import schedule
from penstock.schedule.lower import lower
from penstock.schedule.op import Kind, Schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.rule_types import Reads


@pytest.mark.parametrize(("name", "stages", "micro_batches", "weights", "staleness", "versions"), [
    ("pipedream", 4, 1, None, (3, 2, 1, 0), (4, 3, 2, 1)),
    ("pipedream", 4, 1, "stash", (3, 2, 1, 0), (4, 3, 2, 1)),
    ("pipedream", 4, 1, "vertical-sync", (3, 3, 3, 3), (4, 4, 4, 4)),
    ("pipedream", 4, 1, "none", (3, 2, 1, 0), (1, 1, 1, 1)),
    ("pipedream", 4, 1, "pipemare", (3, 2, 1, 0), (1, 1, 1, 1)),
    ("pipedream", 4, 1, "spectrain", (3, 2, 1, 0), (1, 1, 1, 1)),
    ("pipedream", 4, 1, "pipeoptim", (3, 2, 1, 0), (1, 1, 1, 1)),
    ("2bw", 4, 4, None, (1, 1, 1, 1), (2, 2, 2, 2)),
    ("2bw", 4, 4, "stash", (1, 1, 1, 0), (2, 2, 2, 1)),
    ("xpipe", 4, 4, None, (1, 1, 1, 0), (1, 1, 1, 1)),
    ("wpipe", 4, 2, None, (1, 1, 0, 0), (2, 2, 1, 1)),
    ("avgpipe", 4, 2, None, (0, 0, 0, 0), (2, 2, 2, 2)),
    ("hetpipe", 4, 1, None, (3, 2, 1, 0), (4, 3, 2, 1)),
    ("1f1b", 4, 4, None, (0, 0, 0, 0), (1, 1, 1, 1)),
])  # fmt: skip
def test_staleness_and_versions_per_stage_are_by_the_rule(
    name, stages, micro_batches, weights, staleness, versions
):
    """The papers' table, stage by stage."""
    family_schedule = schedule(name, stages, micro_batches)
    report = verify(family_schedule, weights=weights)
    assert (report.staleness_max, report.versions) == (staleness, versions)
    assert report.weights == (
        weights or ("flush" if family_schedule.stream is None else family_schedule.stream.weights)
    )
    assert (report.staleness_across != ()) == (name == "hetpipe")


def test_the_mean_staleness_of_a_stream_is_that_of_the_full_pipeline_whatever_its_batches():
    """Programs of eight batches stand for a run of thousands."""
    for batches in (8, 50):
        pipedream = schedule("pipedream", 4, 2, batches=batches)
        assert verify(pipedream).staleness_mean == (1.5, 1.0, 0.5, 0.0)


def test_asynchronous_programs_without_a_stream_read_the_newest_weights():
    """Only the order of ops is known, so no older version can be promised."""
    report = verify(Schedule.parse("0F0 0F1 0B0 0U1 0B1 0U2", synchronous=False))
    assert (report.weights, report.staleness_max, report.staleness_mean, report.versions) == (
        "none",
        (1,),
        (0.5,),
        (1,),
    )
    report = verify(Schedule.parse("0F0 0F1 0B0 0U1 0B1 0U2", synchronous=False), weights="stash")
    assert (report.weights, report.staleness_max, report.versions) == ("stash", (1,), (2,))


def test_the_public_function_passes_the_rule_on_with_and_without_transfers():
    """`ps.verify` takes schedules and lowered schedules."""
    pipedream = schedule("pipedream", 3)
    assert ps.verify(pipedream, weights="vertical-sync").versions == (3, 3, 3)
    assert ps.verify(pipedream).versions == (3, 2, 1)
    with pytest.raises(
        ScheduleError, match=r"'stash' does not go with custom, which is synchronous"
    ):
        ps.verify(lower(schedule("1f1b", 2, 2), ahead=1), weights="stash")


@pytest.mark.parametrize(
    ("name", "micro_batches", "weights", "message"),
    [
        (
            "1f1b",
            4,
            "stash",
            r"\[weights\] weight rule 'stash' does not go with 1f1b, which is synchronous",
        ),
        (
            "2bw",
            4,
            "flush",
            r"\[weights\] weight rule 'flush' does not go with 2bw, which is asynchronous",
        ),
        (
            "pipedream",
            2,
            "double-buffer",
            r"\[weights\] weight rule 'double-buffer' needs at least as many micro-batches",
        ),
        (
            "pipedream",
            4,
            "spectrain",
            r"\[weights\] weight rule 'spectrain' has distances for batches of one micro-batch",
        ),
        ("pipedream", 4, "avgpipe", r"\[weights\] weight rule 'avgpipe' averages several copies"),
        ("pipedream", 4, "hetpipe", r"\[weights\] weight rule 'hetpipe' is for copies of stages"),
        (
            "pipedream",
            1,
            "wpipe",
            r"\[weights\] weight rule 'wpipe' has no gradient more than 1 update old",
        ),
        ("avgpipe", 4, "vertical-sync", r"\[weights\] avgpipe has 2 copies of the weights"),
    ],
)
def test_a_rule_that_does_not_go_with_the_schedule_is_a_finding(
    name, micro_batches, weights, message
):
    """The message has the reason, such as too few micro-batches for a double buffer."""
    with pytest.raises(ScheduleError, match=message) as caught:
        verify(schedule(name, 4, micro_batches), weights=weights)
    assert {finding.rule for finding in caught.value.findings} == {"weights"}


def test_an_unknown_rule_is_refused_by_its_name():
    """The message suggests the nearest name."""
    with pytest.raises(UnknownName, match=r"no weight rule called 'stahs'. Did you mean 'stash'"):
        verify(schedule("pipedream", 2), weights="stahs")


def test_unsound_programs_are_reported_before_their_weights():
    """Where ops are missing, it is not defined which versions are read."""
    with pytest.raises(ScheduleError, match=r"\[one backward\] 0B1 is missing") as caught:
        verify(Schedule.parse("0F0 0F1 0B0 0U1", synchronous=False), weights="double-buffer")
    assert {finding.rule for finding in caught.value.findings} == {"one backward"}


def test_an_op_that_reads_a_version_that_does_not_exist_is_a_finding_of_its_own():
    """Every forward reads such a version here; the error has all of them, with rank and op."""
    case = schedule("pipedream", 3, 2)

    def future(place):
        """Read the version after the newest in the forward."""
        return Reads(place.at_forward + 1, place.at_backward)

    rule = replace(weight_rule("stash"), name="future", reads=future)
    with pytest.raises(ScheduleError) as caught:
        verify(case, weights=rule)
    findings = caught.value.findings
    forwards = [
        (rank, str(op))
        for rank, program in enumerate(case.programs)
        for op in program
        if op.kind is Kind.F
    ]
    assert [(finding.rank, finding.op) for finding in findings] == forwards
