"""Differences between tensors: the largest, with NaN, infinities, empty and complex tensors."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.runtime.comparison.tensor_differences import (
    difference,
    differences,
    largest,
    loss_difference,
)

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("values", "reference", "expected"),
    [
        ([1.0, -2.0, 3.0], [1.5, 2.0, 3.0], 4.0),
        ([INF, -INF, NAN, 1.0], [INF, -INF, NAN, 0.0], 1.0),
        ([INF], [-INF], INF),
        ([NAN, 1.0], [0.0, 1.0], INF),
        ([0.0, 1.0], [NAN, 1.0], INF),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [[1.0, 1.0]], INF),
        ([3 + 4j, 1j], [0j, 1j], 5.0),
        ([complex(NAN, 0), 1j], [complex(NAN, 0), 2j], 1.0),
        ([complex(NAN, 0), 1j], [0j, 1j], INF),
        ([2**53 + 1, 7], [2**53 + 1, 4], 3.0),
        ([True, False], [True, True], 1.0),
    ],
)
def test_the_difference_is_the_largest_and_infinite_where_one_value_alone_is_nan(
    values, reference, expected
):
    """Equal infinities and two NaN are no difference; values of another shape cannot be compared."""
    first, second = torch.tensor(values), torch.tensor(reference)
    assert difference(first, second) == expected
    assert differences({"weight": first}, {"weight": second, "bias": second}) == {
        "weight": expected
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_differences_are_computed_in_double_precision(dtype):
    """A difference in the type of the tensors would be rounded, or overflow."""
    most = torch.finfo(dtype).max
    assert difference(torch.tensor([most / 2], dtype=dtype), torch.tensor([0.0], dtype=dtype)) == (
        float(torch.tensor(most / 2, dtype=dtype))
    )
    if dtype is not torch.float64:
        one = torch.tensor([1.0], dtype=dtype)
        assert difference(torch.tensor([most], dtype=dtype), -one) == most + 1.0
        assert difference(
            torch.tensor([most], dtype=dtype), torch.tensor([-most], dtype=dtype)
        ) == (2 * most)


@pytest.mark.parametrize(
    ("loss", "reference", "expected"),
    [(1.0, 1.5, 0.5), (NAN, NAN, 0.0), (NAN, 1.0, INF), (1.0, NAN, INF), (INF, INF, 0.0)],
)
def test_losses_differ_as_tensors_do(loss, reference, expected):
    """A loss that is NaN on one side alone is the worst difference, not one that compares false."""
    assert loss_difference(loss, reference) == expected


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, -2.0], 2.0), ([3 + 4j, 1j], 5.0), ([], 0.0), ([-3, 2], 3.0)]
)
def test_the_scale_is_the_largest_absolute_value(values, expected):
    """Relative differences of complex gradients would be too small beside the sum of all values."""
    assert largest(torch.tensor(values)) == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64])
def test_buffers_of_any_type_are_compared(dtype):
    """Masks of attention are buffers of bool, which has no absolute values in torch."""
    tensor, other = torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)
    assert largest(tensor) == 1.0
    assert difference(tensor, other) == 1.0
    assert difference(tensor, tensor) == 0.0
