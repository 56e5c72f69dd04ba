"""Programs of ranks with two stages: micro-batch numbers, pairs, and W after its I."""

from __future__ import annotations

from penstock.schedule.bidirectional import BidirectionalProgram
from penstock.schedule.op import Op


def program_of(*lines, **numbers):
    """Of stages 1 and 4."""
    line = BidirectionalProgram((1, 4), **numbers)
    for times, moves in lines:
        line.write(times, moves)
    return line


def text_of(*lines, micro_batches=9, **numbers):
    """The text of the program."""
    return " ".join(map(str, program_of(*lines, **numbers).ops(micro_batches)))


def test_each_way_counts_its_own_micro_batches():
    """F, backwards and W of a stage come in the order of the micro-batches, so only the kinds are
    left to write.
    """
    assert text_of((2, "F0 F1"), (1, "I0")) == "1F0 4F0 1F1 4F1 1I0"


def test_two_pipelines_share_the_micro_batches():
    """One has the even numbers, one the odd ones."""
    assert text_of((2, "F0 F1"), first=(1, 0), step=2) == "1F1 4F0 1F3 4F2"


def test_a_backward_is_counted_whole_or_in_parts():
    """A micro-batch has a B, or an I and a W."""
    line = program_of((2, "F0"), (1, "B0 I0 W"))
    assert " ".join(map(str, line.ops(9))) == "1F0 1F1 1B0 1I1 1W1"
    assert [line.count(move) for move in ("F0", "I0", "B0", "W0", "F1")] == [2, 2, 2, 1, 0]


def test_a_bare_w_is_of_the_oldest_i_of_either_way():
    """DualPipe's queue."""
    assert text_of((1, "F0 F1 I1 I0 W W")) == "1F0 4F0 4I0 1I0 4W0 1W0"


def test_a_w_of_a_way_is_of_its_own_next_micro_batch():
    """ZB-V names the way, whichever I is the oldest."""
    assert text_of((1, "F0 F1 I1 I0 W0 W1")) == "1F0 4F0 4I0 1I0 1W0 4W0"


def test_what_is_not_there_is_left_out():
    """Closed forms are written for full pipelines; nothing is written a negative number of times."""
    assert text_of((3, "F0 B0"), (-2, "F1"), micro_batches=2) == "1F0 1B0 1F1 1B1"


def test_pairs_are_kept_if_both_of_their_ops_are_there():
    """An op whose partner is left out runs alone."""
    line = program_of((1, "F0"), (2, "F1&B0"), (1, "F0&B1"))
    assert line.pairs(1) == {(Op.parse("4F0"), Op.parse("1B0"))}
    assert line.pairs(2) == line.pairs(1) | {
        (Op.parse("4F1"), Op.parse("1B1")),
        (Op.parse("1F1"), Op.parse("4B0")),
    }


def test_waiting_weight_gradients_are_counted_by_their_way_and_three_ops_are_two_pairs():
    """A bare W belongs to the way of its I."""
    line = program_of((1, "F0 F1 F1 I1 I0 I1 W W W"))
    assert [line.count(move) for move in ("W0", "W1", "I1", "B1", "F1")] == [1, 2, 2, 2, 2]
    assert [str(op) for op in line.ops(9)][-3:] == ["4W0", "1W0", "4W1"]
    chain = program_of((1, "F0&F1&B0"))
    assert {tuple(map(str, pair)) for pair in chain.pairs(1)} == {("1F0", "4F0"), ("4F0", "1B0")}


def test_a_pair_needs_both_of_its_ops():
    """The first or the second may be of a micro-batch beyond the last."""
    line = program_of((1, "F0 F0 F1 F0&B1 F1&B0"), first=(0, 1))
    pairs = {(str(first), str(second)) for first, second in line.pairs(3)}
    assert pairs == {("1F2", "4B1"), ("4F2", "1B0")}
    assert {str(first) for first, _ in line.pairs(2)} == set()
    line = program_of((1, "F0&F1"), first=(0, 3))
    assert line.pairs(3) == set()
    assert len(line.pairs(4)) == 1
