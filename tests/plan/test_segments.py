"""Which layers run again together."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.segments import Selection, segments


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)))
def test_segments_have_all_layers_once_and_are_as_long_as_they_may(recomputed, starts):
    """Two that touch are two only because one of them starts there."""
    runs = segments(recomputed, starts)
    assert [layer for first, end in runs for layer in range(first, end)] == sorted(recomputed)
    assert all(b[0] > a[1] or b[0] in starts for a, b in pairwise(runs))
    assert not any(layer in starts for first, end in runs for layer in range(first + 1, end))


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)), st.sets(st.integers(1, 12)))
def test_a_selection_returns_the_segments_that_it_was_constructed_from(recomputed, starts, inner):
    """Segments end at the ends of stages, which the selection does not repeat."""
    firsts = sorted({0, *inner})
    runs = segments(recomputed, {*starts, *firsts})
    selection = Selection.of_segments(runs, firsts)
    assert set(selection.starts) <= recomputed - set(firsts)
    # A start is only needed where the layer before is recomputed too.
    assert {start - 1 for start in selection.starts} <= recomputed
    stages = pairwise([*firsts, 13])
    assert [segment for first, end in stages for segment in selection.of_stage(first, end)] == runs
    assert Selection.of_segments(reversed(runs), set(firsts)) == selection
