"""Fingerprints against a slow comparison of all elements."""

from __future__ import annotations

import math
import random

import pytest
import torch

from penstock.errors import RunError
from penstock.grad.fingerprint import (
    Fingerprint,
    check_equal,
    difference,
    difference_on_device,
    fingerprint,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]
SHAPES = [
    (),
    (1,),
    (5,),
    (0,),
    (0, 3),
    (3, 0),
    (2, 3),
    (4, 64),
    (2, 3, 40),
    (3, 2, 2, 20),
    (2, 130),
]


def tensor_of(shape, dtype, seed=0):
    """A random tensor without zeros, so that every change of an element counts."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return values.to(dtype)
    return (values * 10).to(dtype)


def outcomes(leaves, expected):
    """The texts of both comparisons, of which the second has a flag in place of the text on values."""
    text, flag = difference_on_device(leaves, expected)
    return difference(leaves, expected), text, None if flag is None else bool(flag)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_equals_itself_and_any_other_element_is_noticed(shape, dtype):
    """Also in another memory layout, without a graph, and where two elements are exchanged."""
    tensor = tensor_of(shape, dtype)
    expected = fingerprint([tensor])
    flag = None if tensor.numel() == 0 else False
    assert outcomes([tensor.clone()], expected) == (None, None, flag)
    if tensor.dim() > 1 and tensor.numel():
        turned = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        assert outcomes([turned], expected) == (None, None, False)
    for place in range(0, tensor.numel(), 7):
        changed = tensor.clone()
        element = changed.view(-1)[place]
        factor = 3 if dtype in (torch.int8, torch.int64) else -20
        changed.view(-1)[place] = ~element if dtype is torch.bool else element * factor
        text, form, differs = outcomes([changed], expected)
        assert text.startswith("other values, which differ by ")
        assert (form, differs) == (None, True)


@pytest.mark.parametrize("seed", range(20))
def test_exchanged_elements_of_a_row_are_noticed(seed):
    """Their sum is the same."""
    choose = random.Random(seed)
    tensor = tensor_of((3, 90), torch.float32, seed)
    row, first = choose.randrange(3), choose.randrange(90)
    second = (first + choose.randrange(1, 90)) % 90
    changed = tensor.clone()
    changed[row, first], changed[row, second] = tensor[row, second], tensor[row, first]
    if (tensor[row, first] - tensor[row, second]).abs() > 0.2:
        assert outcomes([changed], fingerprint([tensor]))[2] is True


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (torch.float64, 1e-9),
        (torch.float32, 2e-5),
        (torch.float16, 4e-3),
        (torch.bfloat16, 3e-2),
    ],
)
def test_differences_within_the_rounding_of_a_dtype_do_not_count(dtype, limit):
    """Relative to the sum of magnitudes of a row, whose sum itself may be 0."""
    tensor = torch.ones(2, 64, dtype=torch.float64)
    tensor[:, ::2] = -1.0
    leaf = tensor.to(dtype)
    expected = fingerprint([leaf])
    assert outcomes([leaf], expected)[2] is False
    (rows,) = expected.rows
    size = float(_slow_weights(64).sum())
    for factor, differs in ((0.9, False), (1.1, True), (-0.9, False), (-1.1, True)):
        shifted = rows.clone()
        shifted[1] += size * limit * factor
        assert outcomes([leaf], Fingerprint(expected.forms, (shifted,)))[2] is differs


@pytest.mark.parametrize("shape", [(3,), (2, 64)])
@pytest.mark.parametrize("size", [2**17, 2**30])
def test_integers_are_compared_exactly(shape, size):
    """Gradients of a neighbour of a large index would go elsewhere; nothing rounds an index."""
    tensor = torch.full(shape, size)
    changed = tensor.clone()
    changed[-1:] += 1
    assert outcomes([tensor.clone()], fingerprint([tensor])) == (None, None, False)
    text, form, differs = outcomes([changed], fingerprint([tensor]))
    assert text.startswith("other values")
    assert (form, differs) == (None, True)
    mask = torch.ones(10**6, dtype=torch.bool).reshape(1, -1)
    expected = fingerprint([mask])
    mask[0, 7] = False
    assert outcomes([mask], expected)[2] is True


def _slow_weights(columns):
    """The weights of columns."""
    golden = (math.sqrt(5) - 1) / 2
    return torch.tensor(
        [(column * golden) % 1 + 0.5 for column in range(1, columns + 1)], dtype=torch.float64
    )


def test_rows_are_weighted_sums_over_as_few_dimensions_as_have_64_columns():
    """A slow reference: the multiples of the golden ratio, without their whole parts."""
    for shape, rows, columns in (((4, 64), 4, 64), ((2, 3, 40), 2, 120), ((5, 4, 70), 20, 70)):
        tensor = tensor_of(shape, torch.float64)
        matrix = tensor.reshape(rows, columns)
        expected = [float((row * _slow_weights(columns)).sum()) for row in matrix]
        (sums,) = fingerprint([tensor]).rows
        assert sums.tolist() == pytest.approx(expected, rel=1e-12)
    vector = tensor_of((5,), torch.float32)
    (elements,) = fingerprint([vector]).rows
    assert torch.equal(elements, vector)
    vector[0] = 9
    assert elements[0] != 9


def test_the_text_says_by_how_much_and_in_how_many_rows():
    """The largest difference, of the first tensor that differs."""
    same, other = tensor_of((2, 64), torch.float32), torch.ones(4, 64)
    changed = other.clone()
    changed[1] *= 1.5
    changed[3] *= 2
    text = difference([same, changed, same + 9], fingerprint([same, other, same]))
    assert text == "other values, which differ by 5.0e-01 of their size in 2 of 4 rows"
    vector = difference(
        [torch.tensor([1.0, 2.0, 0.0])], fingerprint([torch.tensor([1.0, 1.0, 0.0])])
    )
    assert vector == "other values, which differ by 5.0e-01 of their size in 1 of 3 rows"


def test_nan_equals_nan_and_nothing_else():
    """Zeros have no size to compare with: their difference counts in full."""
    row = torch.tensor([1.0, math.nan, math.inf, 0.0])
    for change, differs in (
        ([1.0, math.nan, math.inf, 0.0], False),
        ([1.0, 1.0, math.inf, 0.0], True),
        ([math.nan, math.nan, math.inf, 0.0], True),
        ([1.0, math.nan, -math.inf, 0.0], True),
        ([1.0, math.nan, 1.0, 0.0], True),
        ([1.0, math.nan, math.inf, 1e-20], True),
    ):
        text, form, flag = outcomes([torch.tensor(change)], fingerprint([row]))
        assert (text is not None, form, flag) == (differs, None, differs)


def test_numbers_of_values_shapes_dtypes_and_constants_come_before_values():
    """Each with what it is and what it was."""
    tensor = torch.ones(2, 3)
    words = "a tensor of shape (2, 3) and torch.float32"
    cases = [
        ([tensor], [tensor, 1], "1 values instead of 2"),
        ([tensor, 1], [tensor], "2 values instead of 1"),
        (
            [tensor + 1, torch.ones(3, 2)],
            [tensor, tensor],
            f"a tensor of shape (3, 2) and torch.float32 instead of {words}",
        ),
        (
            [tensor.double()],
            [tensor],
            f"a tensor of shape (2, 3) and torch.float64 instead of {words}",
        ),
        ([2], [1], "2 instead of 1"),
        (["a"], [None], "'a' instead of None"),
        ([tensor], [3], f"{words} instead of 3"),
        ([[1]], [{}], "<class 'list'> instead of <class 'dict'>"),
    ]
    for leaves, before, text in cases:
        assert outcomes(leaves, fingerprint(before)) == (text, text, None)


def test_constants_without_an_order_of_their_own_are_compared_by_type():
    """NaN differs from itself; objects may have no comparison."""
    for leaves, before in (([math.nan], [math.nan]), ([[1, 2]], [[3]]), ([True, None, "x"],) * 2):
        assert outcomes(leaves, fingerprint(before)) == (None, None, None)
    assert difference([1.0], fingerprint([math.nan])) == "1.0 instead of <class 'float'>"


def test_tensors_without_values_are_compared_by_form():
    """Sparse and meta tensors; and values next to them count."""
    sparse, meta = torch.eye(2).to_sparse(), torch.empty(2, device="meta")
    one = torch.ones(1)
    expected = fingerprint([sparse, meta, one])
    assert [rows is None for rows in expected.rows] == [True, True, False]
    assert outcomes([sparse * 2, meta, one], expected) == (None, None, False)
    assert outcomes([sparse, meta, one * 2], expected)[2] is True


def test_one_differing_tensor_of_several_is_enough():
    """Not the last alone, nor all of them."""
    tensors = [torch.ones(2), torch.ones(3), torch.ones(4)]
    for place in range(3):
        changed = [tensor * (2 if n == place else 1) for n, tensor in enumerate(tensors)]
        text, form, flag = outcomes(changed, fingerprint(tensors))
        assert (text is not None, form, flag) == (True, None, True)


def test_a_tensor_within_rounding_does_not_hide_a_later_one():
    """Bits of the first differ, and it is no difference."""
    tensor = tensor_of((4, 64), torch.float32)
    rounded = tensor * (1 + 3e-7)
    assert not torch.equal(tensor, rounded)
    expected = fingerprint([tensor, tensor])
    assert outcomes([rounded, tensor], expected) == (None, None, False)
    text, form, flag = outcomes([rounded, 2 * tensor], expected)
    assert (text is not None, form, flag) == (True, None, True)


def test_a_conjugate_is_compared_by_its_values():
    """Torch conjugates when the values are read."""
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    expected = fingerprint([tensor.conj()])
    assert outcomes([torch.tensor([1 - 2j, 3 + 1j])], expected) == (None, None, False)
    assert outcomes([tensor], expected)[2] is True


def test_autocast_does_not_coarsen_fingerprints():
    """The product would be computed in bfloat16."""
    tensor = tensor_of((2, 64), torch.float32)
    plain = fingerprint([tensor])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (rows,) = fingerprint([tensor]).rows
        assert difference([tensor], plain) is None
    assert rows.dtype is torch.float32
    assert torch.equal(rows, plain.rows[0])


class Checks(list):
    """Checks that are read later, or not."""

    def __init__(self, *, deferring):
        super().__init__()
        self.deferring = deferring

    def add(self, failed, message):
        """Note a check."""
        self.append((bool(failed), message))


@pytest.mark.parametrize("deferring", [None, False, True])
def test_differences_are_raised_at_once_unless_only_values_differ_and_checks_are_deferred(
    deferring,
):
    """The host must not wait for a device; shapes and constants are known without waiting."""
    checks = None if deferring is None else Checks(deferring=deferring)
    expected = fingerprint([torch.ones(2), 3])

    def check(*leaves):
        check_equal(leaves, expected, checks, lambda text: RunError(f"here: {text}"))

    check(torch.ones(2), 3)
    for leaves in ([torch.ones(3), 3], [torch.ones(2), 4], [torch.ones(2)]):
        with pytest.raises(RunError, match=r"^here: .* instead of "):
            check(*leaves)
    if deferring:
        check(torch.zeros(2), 3)
        assert checks == [(False, "here: other values"), (True, "here: other values")]
        return
    with pytest.raises(RunError, match=r"^here: other values, which differ by"):
        check(torch.zeros(2), 3)
    assert not checks
