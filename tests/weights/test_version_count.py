"""count_versions: the weight versions that a rank keeps, op by op."""

from __future__ import annotations

import pytest

from penstock.schedule.op import Schedule
from penstock.schedule.streaming.period import with_batches
from penstock.weights.catalogue import WeightRule, weight_rule
from penstock.weights.rule_types import Reads
from penstock.weights.version_count import count_versions
from penstock.weights.version_trace import trace_versions


def held(text, rule, size=1, pipelines=1):
    """Versions per stage, and the findings, of one program."""
    rows = [list(with_batches(program, size)) for program in Schedule.parse(text).programs]
    trace = trace_versions(rows, 1, pipelines)
    reads = [{number: rule.reads(trace.place(0, number)) for number in trace.stages[0]}]
    return count_versions(rows, trace, reads, rule, pipelines)


@pytest.mark.parametrize(
    ("text", "rule", "versions"),
    [
        ("0F0 0B0 0U1 0F1 0B1 0U2", "stash", 1),  # nothing is in flight at an update
        ("0F0 0F1 0B0 0U1 0B1 0U2", "stash", 2),  # 1 has read version 0 and needs it still
        ("0F0 0F1 0F2 0B0 0U1 0B1 0U2 0B2 0U3", "stash", 2),  # 1 and 2 share version 0
        ("0F0 0F1 0B0 0U1 0F2 0B1 0U2 0B2 0U3", "stash", 2),  # 0 goes when 1 has come back
        ("0F0 0F1 0B0 0U1 0F2 0B1 0U2 0B2 0U3", "none", 1),
        (
            "0F0 0B0 0U1 0F1 0B1 0U2 0F2 0B2 0U3",
            "double-buffer",
            2,
        ),  # the next F reads the version before the newest
    ],
)
def test_a_version_is_kept_while_something_in_flight_or_to_come_reads_it(text, rule, versions):
    """Counted by hand."""
    assert held(text, weight_rule(rule)) == ([versions], [])


def test_every_copy_of_the_weights_counts():
    """Two copies of the weights are on the rank."""
    assert held("0F0 0F1 0B0 0U1 0B1 0U2", weight_rule("avgpipe"), pipelines=2) == ([2], [])
    assert held("0F0 0F1 0B0 0U1 0B1 0U2", weight_rule("none"), pipelines=3) == ([3], [])


def test_a_split_backward_holds_its_version_until_w():
    """Its weight gradient is still to be taken from what the forward has saved."""
    assert held("0F0 0I0 0F1 0I1 0W0 0U1 0W1 0U2", weight_rule("stash"))[0] == [2]


def test_what_lacks_is_found_with_the_op_that_reads_it():
    """One finding for each, at the F if it is gone by then, at the B if it is not there yet."""
    rule = WeightRule(
        "mine",
        lambda p: Reads(p.at_forward + (p.batch == 1), p.at_forward),
        synchronous=False,
        source="a test",
    )
    _, findings = held("0F0 0B0 0U1 0F1 0B1 0U2", rule)
    assert [(f.rule, f.op, f.rank) for f in findings] == [("weights", "0F1", 0)]
    assert (
        "mine: 0F1 on rank 0 reads version 2 of stage 0, where the newest is 1"
        in findings[0].message
    )


@pytest.mark.parametrize(("text", "op"), [("0F0 0B0 0U1", "0B0"), ("0F0 0I0 0W0 0U1", "0I0")])
def test_a_backward_cannot_read_a_version_that_comes_after_it(text, op):
    """It is found once, where the backward begins."""
    rule = WeightRule("mine", lambda p: Reads(0, 1), synchronous=False, source="a test")
    versions, findings = held(text, rule)
    assert (versions, [(f.op, f.rank) for f in findings]) == ([1], [(op, 0)])
    expected = f"mine: {op} on rank 0 reads version 1 of stage 0, where the newest is 0: another "
    assert findings[0].message.startswith(expected)


def test_an_older_version_that_is_dropped_is_found_once_at_the_forward():
    """The backward reads it too; a second finding would say nothing new."""
    rule = WeightRule(
        "mine",
        lambda p: Reads(p.at_forward, max(p.at_forward - 1, 0)),
        synchronous=False,
        source="a test",
    )
    versions, findings = held("0F0 0B0 0U1 0F1 0B1 0U2", rule)
    assert (versions, [finding.op for finding in findings]) == ([1], ["0F1"])
    assert "reads version 0 of stage 0, which has been dropped (kept: 1)" in findings[0].message


@pytest.mark.parametrize(
    ("facts", "ahead", "refused"),
    [({"one_version": True}, 1, []), ({"one_version": True}, 0, ["0F3"]), ({}, 1, [])],
)
def test_an_older_version_of_a_rule_with_one_is_read_only_as_a_prediction(facts, ahead, refused):
    """An update comes between the two forwards of batch 1; other rules keep the version."""
    rule = WeightRule(
        "mine",
        lambda p: Reads(p.batch_at_forward, p.at_backward, forward_ahead=ahead),
        synchronous=False,
        source="a test",
        **facts,
    )
    _, findings = held("0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U2", rule, size=2)
    assert [finding.op for finding in findings] == refused


def test_micro_batches_that_the_rule_refuses_are_left_out():
    """The caller reports the refusals; the others are counted."""
    rows = [list(with_batches(Schedule.parse("0F0 0F1 0B0 0U1 0B1 0U2").programs[0], 1))]
    trace, rule = trace_versions(rows, 1), weight_rule("stash")
    reads = {1: rule.reads(trace.place(0, 1))}
    assert count_versions(rows, trace, [reads], rule) == ([2], [])


def test_a_prediction_is_made_from_the_version_at_the_first_forward_of_its_batch():
    """Of a rule with one version, an older one that no prediction was made from is gone."""

    def rule(behind):
        return WeightRule(
            "mine",
            lambda p: Reads(max(p.batch_at_forward - behind, 0), p.at_backward, forward_ahead=1),
            synchronous=False,
            source="a test",
            one_version=True,
        )

    # Micro-batch 3 begins after the update of batch 0, and 2 of its batch before.
    text = "0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U2 0F4 0F5 0B4 0B5 0U3"
    assert held(text, rule(0), size=2) == ([1], [])
    versions, findings = held(text, rule(1), size=2)
    assert versions == [1]
    assert [(f.op, f.rank) for f in findings] == [("0F4", 0), ("0F5", 0)]
    assert "reads version 1 of stage 0, which has been dropped (kept: 2)" in findings[0].message


def test_a_version_that_forward_and_backward_lack_is_found_once():
    """Both read it; the finding is that of the F."""

    def reads(place):
        version = 0 if place.batch == 2 else place.at_forward
        return Reads(version, version)

    rule = WeightRule("mine", reads, synchronous=False, source="a test")
    _, findings = held("0F0 0B0 0U1 0F1 0B1 0U2 0F2 0B2 0U3", rule)
    assert [finding.op for finding in findings] == ["0F2"]


def test_a_forward_before_one_that_the_rule_refuses_keeps_what_it_reads():
    """What the refused one reads is not known."""
    rows = [list(with_batches(Schedule.parse("0F0 0F1 0B0 0U1 0B1 0U2").programs[0], 1))]
    trace, rule = trace_versions(rows, 1), weight_rule("stash")
    reads = {0: rule.reads(trace.place(0, 0))}
    assert count_versions(rows, trace, [reads], rule) == ([1], [])


def test_versions_of_all_copies_on_a_rank_are_added():
    """Copy 0 has batches 0 and 2, of which 2 holds version 0; copy 1 has its first version."""
    text = "0F0 0F2 0B0 0U1 0F1 0B2 0U2 0B1 0U1"
    assert held(text, weight_rule("stash"), pipelines=2) == ([3], [])
    assert held("0F0 0B0", weight_rule("stash"), pipelines=2) == ([2], [])


def test_replicas_on_two_ranks_count_their_own_versions():
    """An update of one rank makes no version on the other; the rank with most counts."""
    one = "0F0 0B0 0U1 0F2 0B2 0U2"
    two = "0F1 0F3 0B1 0U1 0B3 0U2"
    for text in (f"{one}\n{two}", f"{two}\n{one}"):
        assert held(text, weight_rule("stash"), size=2) == ([2], [])


def test_only_a_rule_with_one_version_reads_a_dropped_one_as_a_prediction():
    """Batches are interleaved, and no F after 0F2 may read version 0 of a rule that keeps versions."""
    text = "0F0 0B0 0U1 0F2 0F1 0B1 0B2 0F3 0B3 0U2"
    for one_version in (True, False):
        rule = WeightRule(
            "mine",
            lambda p: Reads(p.batch_at_forward, p.at_backward, forward_ahead=1),
            synchronous=False,
            source="a test",
            one_version=one_version,
        )
        _, findings = held(text, rule, size=2)
        assert [finding.op for finding in findings] == ([] if one_version else ["0F1"])
