"""Cells of torch's CSV: the grammar, read strictly."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FileError
from penstock.schedule.lower import Direction, Message
from penstock.schedule.op import Kind, Op
from penstock.schedule.torch_csv.cells import (
    Communication,
    Compute,
    FsdpAction,
    Shards,
    overlaps,
    parse_cell,
    quoted,
)


@given(st.integers(0, 10**18 - 1), st.sampled_from("FBIW"), st.integers(0, 10**18 - 1))
def test_a_compute_cell_is_stage_kind_and_micro_batch(stage, kind, micro_batch):
    """Numbers of up to 18 digits fit into 64 bits; blanks around a cell do not count."""
    assert parse_cell(f" {stage}{kind}{micro_batch}\t") == Compute(
        (Op(Kind(kind), stage, micro_batch),)
    )


@pytest.mark.parametrize(
    ("text", "direction", "message", "stage"),
    [
        ("1SEND_F5", Direction.SEND, Message(Kind.F, 1, 5), 1),
        ("2RECV_F5", Direction.RECV, Message(Kind.F, 1, 5), 2),
        ("2SEND_B5", Direction.SEND, Message(Kind.B, 2, 5), 2),
        ("1RECV_B5", Direction.RECV, Message(Kind.B, 2, 5), 1),
    ],
)
def test_a_transfer_names_the_stage_that_sends_or_receives(text, direction, message, stage):
    """A message is named after the stage that produces it."""
    cell = parse_cell(text)
    assert cell == Communication(direction, message)
    assert cell.stage == stage


def test_shards_and_overlaps_are_read():
    """Either order of forward and backward, with blanks around each half."""
    assert [parse_cell(f"12{action.value}") for action in FsdpAction] == [
        Shards(action, 12) for action in FsdpAction
    ]
    forward, whole, inputs = Op(Kind.F, 0, 3), Op(Kind.B, 1, 2), Op(Kind.I, 1, 2)
    assert parse_cell("(0F3;1B2)OVERLAP_F_B") == Compute((forward, whole))
    assert parse_cell("( 1I2 ; 0F3 )OVERLAP_F_B") == Compute((inputs, forward))


@pytest.mark.parametrize("kinds", list(product("FBIWUEL", repeat=2)))
def test_an_overlap_is_a_forward_and_what_computes_an_input_gradient(kinds):
    """In any order, and no more than two."""
    ops = [Op(Kind(kind), 0, 0) for kind in kinds]
    expected = "F" in kinds and bool(set(kinds) & {"B", "I"})
    assert overlaps(*ops) == expected
    assert not overlaps(*ops, Op(Kind.F, 0, 1))
    assert not overlaps(ops[0])


@pytest.mark.parametrize(
    "text",
    [
        "", "0F", "F0", "0F0garbage", "0F0;1F0", "x0F0", "0U1", "0E1", "0f0", "-1F0", "0F-1",
        "1" * 19 + "F0", "0F" + "1" * 19, "1SEND_I0", "1SEND_W0", "1SENDF0", "SEND_F0", "1SEND_F",
        "1UNSHARD0", "UNSHARD", "1GATHER", "0 F0", "(0F3;1B2)", "(0F3,1B2)OVERLAP_F_B",
        "(0F3;1B2;2F0)OVERLAP_F_B", "0F0\n0F1", "٣F0",
    ],
)  # fmt: skip
def test_what_torch_would_read_as_something_else_is_refused(text):
    """The message quotes it, and gives cells that are valid."""
    with pytest.raises(FileError, match="is not an action of torch's: write stage, kind") as error:
        parse_cell(text)
    assert str(error.value).startswith(quoted(text.strip()))


@pytest.mark.parametrize(
    "text",
    ["(0F3;1F2)", "(0B3;1B2)", "(0F3;1W2)", "(0F3;)", "(;0F3)", "(0F3;1SEND_F0)", "(;)", "(0F3;x)"],
)
def test_other_overlaps_are_refused(text):
    """torch's action has a forward and a backward."""
    text += "OVERLAP_F_B"
    with pytest.raises(FileError, match="does not overlap a forward with a backward") as error:
        parse_cell(text)
    assert str(error.value).startswith(repr(text))


def test_the_format_of_torch_2_4_is_refused_by_its_name():
    """Its 2B0 meant what 2I0 means now, so that no cell of it can be trusted."""
    with pytest.raises(FileError, match=r"'2BW0' is in the format of torch 2\.4"):
        parse_cell("2BW0")


@pytest.mark.parametrize("length", [0, 59, 60, 61, 500])
def test_a_long_cell_is_quoted_in_part_with_its_length(length):
    """A cell may be as long as a file."""
    text = "ab" * 250
    expected = repr(text[:length]) if length <= 60 else f"{text[:60]!r} … ({length} characters)"
    assert quoted(text[:length]) == expected
