"""Seq1F1B: its order, its time, and the least memory of all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.families.laws import check_facts, timeline_of

from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind
from penstock.verify.verify import verify

#: docs/literature/seq1f1b.md, p = 4, m = 2, k = 2: micro-batch.slice.
ORDER = """\
F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0
F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0
F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0
F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0"""

#: docs/literature/simulated-values.md, rows seq1f1b with k = 2: p, m, makespan, ratio; peaks go down by half a
#: micro-batch to 1.
ROWS = [(2, 2, 7.5, 0.2000), (2, 4, 13.5, 0.1111), (2, 8, 25.5, 0.0588), (4, 4, 16.5, 0.2727), (4, 8, 28.5, 0.1579),
        (4, 16, 52.5, 0.0857), (8, 8, 34.5, 0.3043), (8, 16, 58.5, 0.1795), (8, 32, 106.5, 0.0986)]  # fmt: skip


def test_seq1f1b_has_the_published_order():
    """Sun et al. 2024, op by op."""
    seq1f1b = schedule("seq1f1b", 4, 2, slices=2)
    rows = [
        " ".join(
            f"{op.kind}{seq1f1b.slicing.label(op.micro_batch)}"
            for op in program
            if op.kind is not Kind.U
        )
        for program in seq1f1b.programs
    ]
    assert rows == ORDER.splitlines()


@pytest.mark.parametrize(("p", "m", "makespan", "ratio"), ROWS)
def test_seq1f1b_agrees_with_the_table_of_the_literature(p, m, makespan, ratio):
    """Values of docs/literature/simulated-values.md, which another simulator computed."""
    seq1f1b = schedule("seq1f1b", p, m, slices=2)
    line = timeline_of(seq1f1b)
    assert line.makespan == makespan
    assert line.bubble_ratio == pytest.approx(ratio, abs=5e-5)
    assert verify(seq1f1b).peak_on_rank == tuple((p - s + 1) / 2 for s in range(p))


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=80)
def test_seq1f1b_keeps_its_formulas(p, m, k, b):
    """Both the bubble and the memory of 1F1B, divided by the number of slices."""
    seq1f1b = schedule("seq1f1b", p, m, slices=k)
    assert timeline_of(seq1f1b, 1, b).makespan == pytest.approx(m * (1 + b) + (p - 1) * (1 + b) / k)
    assert verify(seq1f1b).peak_on_rank == pytest.approx(
        [min(m, (p - s - 1 + k) / k) for s in range(p)]
    )


@given(st.integers(1, 6), st.integers(1, 8), st.lists(st.integers(1, 5), min_size=1, max_size=5))
@settings(deadline=None, max_examples=40)
def test_slices_of_any_shares_make_a_sound_schedule(p, m, numbers):
    """Slices of equal time have unequal shares, as later tokens look back further."""
    shares = [number / sum(numbers) for number in numbers]
    seq1f1b = schedule("seq1f1b", p, m, slice_shares=shares)
    verify(seq1f1b)
    assert seq1f1b.programs == schedule("seq1f1b", p, m, slices=len(shares)).programs
    assert seq1f1b.shares == pytest.approx(shares * m)


@given(st.integers(1, 8), st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_one_slice_is_1f1b(p, m):
    """With one slice it is 1F1B."""
    assert schedule("seq1f1b", p, m, slices=1).programs == schedule("1f1b", p, m).programs


def test_sequences_are_cut_in_two_by_default_and_need_a_causal_model():
    """The facts of the catalogue hold."""
    seq1f1b = schedule("seq1f1b", 3, 4)
    check_facts(seq1f1b)
    assert seq1f1b.programs == schedule("seq1f1b", 3, 4, slices=2).programs
    assert seq1f1b.shares == (0.5,) * 8
