"""Ops that draw from torch's generators."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.modules.random_ops import RandomOpDetector, draws_with, is_random_op

aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """Records the ops that run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one op."""
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.rand.default, True),
        (aten.normal_.default, True),
        (aten.native_dropout.default, True),
        (aten.randperm.default, True),
        (aten._scaled_dot_product_flash_attention.default, True),
        (aten.add.Tensor, False),
        (aten.mm.default, False),
        (aten.zeros.default, False),
    ],
)
def test_random_ops_are_those_that_torch_tags(op, expected):
    """Asked twice, since the answer is remembered."""
    assert is_random_op(op) is is_random_op(op) is expected


def test_attention_draws_only_with_a_dropout_probability():
    """It is tagged as random whatever the probability, given by position, by name or not at all."""
    attention = aten._scaled_dot_product_flash_attention.default
    query, key, value = "query", "key", "value"
    assert draws_with(attention, (query, key, value, 0.5), {})
    assert draws_with(attention, (query, key, value), {"dropout_p": 0.1})
    assert not draws_with(attention, (query, key, value, 0.0), {})
    assert not draws_with(attention, (query, key, value, 0, True), {})
    assert not draws_with(attention, (query, key, value), {})
    assert not draws_with(attention, (query, key, value), {"is_causal": True})
    assert draws_with(aten.native_dropout.default, ("x", 0.0, True), {})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_calls_of_attention_draw_with_a_dropout_probability(dropout):
    """With the arguments with which torch calls the op."""
    heads = torch.ones(1, 1, 2, 4)
    with Calls() as recorded:
        functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)
    drawing = [draws_with(*call) for call in recorded.calls if is_random_op(call[0])]
    assert any(drawing) is (dropout > 0)


def test_a_detector_remembers_a_random_op():
    """Whatever runs after it; other ops do not count, nor what runs outside."""
    detector = RandomOpDetector()
    torch.rand(1)
    with detector:
        torch.ones(2) + 1
    assert not detector.detected
    with detector:
        drawn = torch.rand(2, dtype=torch.float64)
        drawn.add_(1)
    assert detector.detected
    assert drawn.dtype == torch.float64
