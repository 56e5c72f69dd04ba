"""Ratio: add multiples of n / (√q + ε), chunk by chunk."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.optim import chunked_ratio as ratio
from penstock.optim.chunked_ratio import Ratio

SHAPES = [(3,), (), (4, 5), (0,), (50, 3), (1000,), (2, 300), (7, 1, 2)]


def tensors(seed, shapes=SHAPES, dtype=torch.float64):
    """Return tensors of positive numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=dtype) + 0.1 for shape in shapes]


@pytest.mark.parametrize("limit", [1, 7, 64, 10_000])
def test_it_is_the_formula_however_it_is_cut(monkeypatch, limit):
    """Long tensors are processed row by row, short ones together; scalars and empty tensors too."""
    monkeypatch.setattr(ratio, "_CPU_ELEMENTS", limit)
    changed, numerators, squares = tensors(0), tensors(1), tensors(2)
    expected = [
        w - 0.3 * n / (q.sqrt() + 1e-3)
        for w, n, q in zip(changed, numerators, squares, strict=True)
    ]
    adder = Ratio()
    for _ in range(2):
        actual = [tensor.clone() for tensor in changed]
        adder.add("these", actual, (numerators, squares), 1e-3, -0.3)
        assert all(
            torch.allclose(a, b, rtol=1e-14, atol=0) for a, b in zip(actual, expected, strict=True)
        )
    assert adder.held_bytes() <= 8 * max(
        limit, 300, sum(map(torch.numel, squares)) if limit == 10_000 else 0
    )


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_layouts_and_types_may_differ(dtypes):
    """Convolution weights with channels last, and half of the model in single precision: the other
    half keeps its own.
    """
    shapes = [(4, 3, 2, 2), (5, 6)]
    changed, numerators, squares = (
        [tensor for dtype in dtypes for tensor in tensors(n, shapes, dtype)] for n in range(3)
    )
    for row in (changed, numerators, squares):
        row[0] = row[0].to(memory_format=torch.channels_last)
        row[1] = row[1].t().contiguous().t()
    expected = [
        w + n / (q.sqrt() + 1) for w, n, q in zip(changed, numerators, squares, strict=True)
    ]
    Ratio().add(0, changed, (numerators, squares), 1, 1)
    for actual, right in zip(changed, expected, strict=True):
        rtol = 1e-14 if right.dtype is torch.float64 else 1e-6
        torch.testing.assert_close(actual, right, rtol=rtol, atol=0)


def test_several_sets_of_tensors_share_the_room():
    """The groups of an optimizer use the memory in turn; the second may need more."""
    adder = Ratio()
    for key, shapes in (("small", [(2,)]), ("large", [(9, 9)]), ("small", [(2,)])):
        changed, numerators, squares = (tensors(n, shapes) for n in range(3))
        expected = [
            w + n / (q.sqrt() + 1) for w, n, q in zip(changed, numerators, squares, strict=True)
        ]
        adder.add(key, changed, (numerators, squares), 1, 1)
        assert all(torch.allclose(a, b) for a, b in zip(changed, expected, strict=True))
    assert adder.held_bytes() == 8 * 81


@pytest.mark.parametrize("limit", [1, 4, 6, 12])
def test_rounds_are_filled_to_the_last_element(monkeypatch, limit):
    """A round more would be a pass more over the kernels' start-up."""
    monkeypatch.setattr(ratio, "_CPU_ELEMENTS", limit)
    squares = tensors(0, [(2,), (4,), (6,), (3,)])
    rounds = Ratio()._cut(squares)
    size = max(limit, 1)
    for pieces, following in itertools.pairwise(rounds):
        elements = [sum(scratch.numel() for *_, scratch in pieces)]
        assert elements[0] <= size
        assert elements[0] + following[0][2].numel() > size


def test_a_long_tensor_is_cut_into_as_many_rows_as_fit(monkeypatch):
    """A row that is longer than the limit is a part of its own."""
    monkeypatch.setattr(ratio, "_CPU_ELEMENTS", 12)

    def rows_of(shape):
        pieces = [piece for pieces in Ratio()._cut(tensors(0, [shape])) for piece in pieces]
        return [scratch.shape[0] for *_, scratch in pieces]

    assert rows_of((10, 3)) == [4, 4, 2]
    assert rows_of((30,)) == [12, 12, 6]
    assert rows_of((3, 20)) == [1, 1, 1]
    assert rows_of((4, 3)) == [4]
