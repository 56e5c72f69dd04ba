"""The rule table, case by case: all other modules read it."""

from __future__ import annotations

import pytest

from penstock.schedule.arrays import OpArrays
from penstock.schedule.lower import Message, input_message, output_message
from penstock.schedule.op import BACKWARD_ENDS, BACKWARD_STARTS, Kind, Op
from penstock.schedule.rules import ACTIVATION_CHANGE, FLOWS, RULES, feeds, needs, takes
from penstock.schedule.slicing import Slicing


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


def test_the_values_between_stages_follow_from_the_rules():
    """By hand: activations go up, gradients down; lower, simulate and the runtime read this."""
    backward = (Kind.B, Kind.I)
    assert {
        Kind.F: (1, (Kind.F,), (Kind.F,)),
        Kind.B: (-1, backward, backward),
    } == FLOWS


@pytest.mark.parametrize(
    ("op", "received", "produced"),
    [
        ("0F3", None, (Kind.F, 0, 3)),
        ("1F3", (Kind.F, 0, 3), (Kind.F, 1, 3)),
        ("2F3", (Kind.F, 1, 3), None),
        ("2B3", None, (Kind.B, 2, 3)),
        ("1I3", (Kind.B, 2, 3), (Kind.B, 1, 3)),
        ("0B3", (Kind.B, 1, 3), None),
        ("1W3", None, None),
        ("1U1", None, None),
        ("1E3", (Kind.E, 1, 3), (Kind.E, 1, 3)),
        ("1L3", (Kind.L, 1, 3), (Kind.L, 1, 3)),
    ],
)
def test_an_op_of_three_stages_has_these_messages(op, received, produced):
    """The runtime waits for a message under this name; another name would wait for ever."""
    assert input_message(Op.parse(op), 3) == (received and Message(*received))
    assert output_message(Op.parse(op), 3) == (produced and Message(*produced))


def test_a_backward_is_whole_or_starts_with_i_and_ends_with_w():
    """Readers ask for the start or the end, and never list the kinds themselves."""
    assert BACKWARD_STARTS == (Kind.B, Kind.I)
    assert BACKWARD_ENDS == (Kind.B, Kind.W)


def test_activations_live_from_the_forward_to_the_end_of_the_backward():
    """Memory limits rely on it: released at I, the activations that W reads would not count."""
    assert dict(ACTIVATION_CHANGE) == {
        "F": 1,
        "B": -1,
        "I": 0,
        "W": -1,
        "U": 0,
        "E": -1,
        "L": 1,
    }
    owner = [Op.parse(text) for text in ["0F0", "0E0", "0L0", "0I0", "0W0", "0U1"]]
    partner = [Op.parse(text) for text in ["0E0", "0L0"]]
    assert OpArrays.of([owner, partner]).activation_change.tolist() == [1, -1, 1, 0, -1, 0, 1, -1]


@pytest.mark.parametrize("along", ["tokens", "samples"])
@pytest.mark.parametrize(
    ("op", "neighbours"),
    [
        ("1F0", []),
        ("1F1", [{"1F0"}]),
        ("1F2", []),
        ("1B0", [{"1B1", "1I1"}]),
        ("1B1", []),
        ("1I0", [{"1B1", "1I1"}]),
        ("1W0", []),
        ("1U0", []),
    ],
)
def test_slices_of_a_sequence_need_their_neighbours_and_slices_of_samples_nothing(
    along, op, neighbours
):
    """Attention reads earlier tokens of the same micro-batch; samples are independent."""
    slicing = Slicing(along, ((0.5, 0.5), (1.0,)))
    whole = list(needs(Op.parse(op), 2))
    sliced = list(needs(Op.parse(op), 2, slicing))
    more = [set(map(str, group)) for group in sliced[len(whole) :]]
    assert sliced[: len(whole)] == whole
    assert more == (neighbours if along == "tokens" else [])
