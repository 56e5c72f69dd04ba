"""Pairs of ops that run as one."""

from __future__ import annotations

from penstock.draw.pairs import pair_halves, split_pairs
from penstock.event import Event
from penstock.schedule.op import Kind, Op


def event(kind, start, end):
    return Event(0, Op(kind, 0, 0), start, end)


ROW = [
    event(Kind.F, 0, 1),
    event(Kind.F, 1, 4),
    event(Kind.B, 1, 4),
    event(Kind.E, 4, 4),
    event(Kind.L, 4, 4),
    event(Kind.B, 4, 6),
]


def test_only_adjacent_ops_with_one_nonzero_span_are_a_pair():
    """Two marks without length at the same moment are not a pair."""
    assert pair_halves(ROW) == {1: 0, 2: 1}


def test_a_line_shows_a_pair_as_two_halves_of_its_span():
    """A terminal cannot draw rows of half height."""
    split, second = split_pairs(ROW)
    assert [(e.start, e.end) for e in split[1:3]] == [(1, 2.5), (2.5, 4)]
    assert second == {2}
    assert split[:1] + split[3:] == ROW[:1] + ROW[3:]
