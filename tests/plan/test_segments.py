"""Which layers run again together."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.segments import Selection, segments


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)))
def test_segments_have_all_layers_once_and_are_as_long_as_they_may(recomputed, starts):
    """Two that touch are two only because one of them starts there."""
    found = segments(recomputed, starts)
    assert [layer for first, end in found for layer in range(first, end)] == sorted(recomputed)
    assert all(b[0] > a[1] or b[0] in starts for a, b in pairwise(found))
    assert not any(layer in starts for first, end in found for layer in range(first + 1, end))


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)), st.sets(st.integers(1, 12)))
def test_a_selection_returns_the_segments_that_it_was_constructed_from(recomputed, starts, inner):
    """Segments end at the ends of stages, which the selection does not repeat."""
    firsts = sorted({0, *inner})
    found = segments(recomputed, {*starts, *firsts})
    made = Selection.of_segments(found, firsts)
    assert set(made.starts) <= recomputed - set(firsts)
    stages = pairwise([*firsts, 13])
    assert [segment for first, end in stages for segment in made.of_stage(first, end)] == found
    assert Selection.of_segments(reversed(found), set(firsts)) == made
