"""The rule table, case by case: all other modules read it."""

from __future__ import annotations

import pytest

from penstock.schedule.op import Kind, Op
from penstock.schedule.rules import RULES, feeds, needs, takes


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("0F3", []),
        ("1F3", [{"0F3"}]),
        ("1B3", [{"1F3"}, {"2B3", "2I3"}]),
        ("2B3", [{"2F3"}]),
        ("1I3", [{"1F3"}, {"2B3", "2I3"}]),
        ("2I3", [{"2F3"}]),
        ("0W3", [{"0I3"}]),
        ("0U1", []),
    ],
)
def test_an_op_of_three_stages_needs(op, expected):
    """Ends of the chain need nothing from beyond; a whole backward counts as one for the input."""
    assert [set(map(str, group)) for group in needs(Op.parse(op), 3)] == expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("0F3", (Kind.F, 1)),
        ("1F3", (Kind.F, 2)),
        ("2F3", None),
        ("0B3", None),
        ("1B3", (Kind.B, 0)),
        ("2B3", (Kind.B, 1)),
        ("0I3", None),
        ("2I3", (Kind.B, 1)),
        ("2W3", None),
        ("1U1", None),
    ],
)
def test_an_op_of_three_stages_feeds(op, expected):
    """Activations go up, input gradients go down, nothing else leaves a stage."""
    assert feeds(Op.parse(op), 3) == expected


def test_what_an_op_feeds_is_what_another_takes():
    """Two views of one boundary: a receiver that expects a value that no rank sends would deadlock."""
    for stages in (1, 2, 4):
        ops = [Op(kind, stage, 0) for kind in Kind for stage in range(stages)]
        fed = {(*feeds(op, stages), op.stage) for op in ops if feeds(op, stages)}
        inputs = {
            (takes(op, stages)[0], op.stage, takes(op, stages)[1])
            for op in ops
            if takes(op, stages)
        }
        assert fed == inputs
        assert len(fed) == 2 * (stages - 1)


def test_every_kind_of_op_has_a_rule():
    """A kind without a row would fail with a KeyError deep in the simulator."""
    assert set(RULES) == set(Kind)
