"""FBP-AS: its compound ops, both readings of its time, its memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_laws, timeline_of

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.schedule.unit_times import unit_times

sizes = given(st.integers(1, 8), st.integers(1, 32))


@sizes
@settings(deadline=None, max_examples=50)
def test_fbp_as_takes_the_published_time_when_ops_alone_have_the_stage_to_themselves(p, m):
    """(M + N - 1)(F + B), Zhao et al. 2020; a stage holds twice as many as with 1F1B: 2(N - i + 1),
    i from 1.
    """
    fbp_as = schedule("fbp-as", p, m)
    assert check_laws(fbp_as).peak_in_flight == tuple(min(m, 2 * (p - s)) for s in range(p))
    for f, b in ((1, 2), (3, 1), (2, 2)):
        assert timeline_of(fbp_as, f, b).makespan == (m + p - 1) * (f + b)


@sizes
@settings(deadline=None, max_examples=50)
def test_fbp_as_at_fixed_shares_takes_a_pipeline_of_twice_the_length(p, m):
    """(M + 2N - 1)(F + B), docs/literature/bapipe.md: one slot of F + B for every op or pair, since a stage is
    a slot each way.
    """
    fbp_as = schedule("fbp-as", p, m)
    paired = {op for pair in fbp_as.pairs for op in pair}
    times = unit_times(fbp_as, lambda op: 0 if op.kind is Kind.U else 0.5 if op in paired else 1)
    assert times.end.max() == m + 2 * p - 1


def test_every_stage_pairs_all_it_can():
    """Only the forwards of the warm-up and the backwards of the drain are not in a pair."""
    fbp_as = schedule("fbp-as", 3, 8)
    assert [
        len([pair for pair in fbp_as.pairs if pair[0].stage == stage]) for stage in range(3)
    ] == [
        3,
        5,
        7,
    ]
    assert {(one.kind, other.kind) for one, other in fbp_as.pairs} == {(Kind.F, Kind.B)}
    assert (
        str(fbp_as).splitlines()[0]
        == "rank 0 | 0F0 0F1 0F2 0F3 0F4 0F5&0B0 0F6&0B1 0F7&0B2 0B3 0B4 0B5 0B6 0B7 0U1"
    )


@pytest.mark.parametrize(("p", "m", "ratio"), [(4, 16, 3 / 19), (8, 32, 7 / 39)])
def test_its_bubble_is_that_of_1f1b(p, m, ratio):
    """Pairs change the use of the links, not the makespan with free links."""
    assert timeline_of(schedule("fbp-as", p, m)).bubble_ratio == pytest.approx(ratio)
