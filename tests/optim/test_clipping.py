"""The norm of gradients that lie apart: torch's own function, cut in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.optim.clipping import clip, norms_of, total_norm

CPU = torch.device("cpu")


def parameters(count, seed=0, dtype=torch.float32):
    """Of different sizes, with gradients; every fifth has none."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        nn.Parameter(torch.randn(1 + 7 * n, generator=generator).to(dtype)) for n in range(count)
    ]
    for number, parameter in enumerate(made):
        if number % 5 != 4:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 99), st.floats(0.01, 100.0)
)
@settings(deadline=None, max_examples=40)
def test_any_cut_clips_as_one_device_does_to_the_bit(lengths, seed, most):
    """The sum goes over parameters, in their order, whoever has computed their norms."""
    held, alone = parameters(sum(lengths), seed), parameters(sum(lengths), seed)
    rest, parts = list(held), []
    for length in lengths:
        parts.append(rest[:length])
        rest = rest[length:]
    total = total_norm([norms_of(part, CPU) for part in parts])
    expected = torch.nn.utils.clip_grad_norm_(alone, most)
    assert torch.equal(total, expected)
    for part in parts:
        clip(part, most, total)
    for ours, theirs in zip(held, alone, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_without_gradients_the_norm_is_zero():
    """A frozen stage has none; a model without any is no error."""
    assert norms_of([nn.Parameter(torch.ones(3))], CPU).shape == (0,)
    assert total_norm([torch.zeros(0)]) == 0.0


def test_gradients_of_several_types_and_sparse_ones_count_like_the_others():
    """Embeddings may have sparse gradients, and a norm in bfloat16 beside one in float32."""
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    low = parameters(1, dtype=torch.bfloat16)
    found = norms_of([embedding.weight, *low], CPU)
    dense = embedding.weight.grad.to_dense()
    assert found.tolist() == pytest.approx(
        [float(dense.norm()), float(low[0].grad.float().norm())], rel=1e-2
    )
