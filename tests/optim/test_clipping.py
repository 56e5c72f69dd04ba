"""The norm of distributed gradients is that of torch's own function."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.values.fake_mesh import fake_mesh, sharded
from torch import nn

from penstock.optim.clipping import clip, clip_values, gradient_norms, norms_of, total_norm

CPU = torch.device("cpu")


def parameters(count, seed=0, dtype=torch.float32):
    """Return parameters of different sizes with gradients; every fifth has none."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        nn.Parameter(torch.randn(1 + 7 * n, generator=generator).to(dtype)) for n in range(count)
    ]
    for number, parameter in enumerate(weights):
        if number % 5 != 4:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return weights


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 99), st.floats(0.01, 100.0)
)
@settings(deadline=None, max_examples=40)
def test_any_cut_clips_as_one_device_does_to_the_bit(lengths, seed, most):
    """The sum is taken over parameters in order, whichever rank has computed their norms."""
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
    """A frozen stage has none, and neither does a frozen model."""
    assert norms_of([nn.Parameter(torch.ones(3))], CPU).shape == (0,)
    assert total_norm([torch.zeros(0)]) == 0.0
    assert total_norm([]).shape == ()
    half = torch.ones(1, dtype=torch.bfloat16)
    assert total_norm([torch.zeros(0), half]).dtype is torch.bfloat16, "that of the gradients"


def test_gradients_of_several_types_and_sparse_ones_count_like_the_others():
    """Embeddings may have sparse gradients, and layers may be in bfloat16 next to others in
    float32.
    """
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    low = parameters(1, dtype=torch.bfloat16)
    norms = norms_of([embedding.weight, *low], CPU)
    dense = embedding.weight.grad.to_dense()
    assert norms.tolist() == pytest.approx(
        [float(dense.norm()), float(low[0].grad.float().norm())], rel=1e-2
    )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("sparse", [False, True])
def test_every_norm_is_that_of_all_gradients_together(norm_type, sparse):
    """The exponent holds for the parts and for their sum, whatever the layout."""
    weights = parameters(4)
    if sparse:
        embedding = nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1, 1, 4])).sum().backward()
        weights.append(embedding.weight)
    values = [w.grad.to_dense().flatten() for w in weights if w.grad is not None]
    norms = norms_of(weights, CPU, norm_type)
    assert len(norms) == len(values)
    expected = [float(torch.linalg.vector_norm(value, norm_type)) for value in values]
    assert norms.tolist() == pytest.approx(expected)
    total = total_norm([norms[:2], torch.zeros(0), norms[2:]], norm_type)
    assert float(total) == pytest.approx(
        float(torch.linalg.vector_norm(torch.cat(values), norm_type))
    )


def test_elements_are_clamped_on_both_sides_also_of_sparse_gradients():
    """Rows of a sparse gradient that occur twice are added first."""
    embedding = nn.Embedding(5, 1, sparse=True)
    (embedding(torch.tensor([1, 1, 4])) * torch.tensor([[1.0], [1.0], [-3.0]])).sum().backward()
    dense, without = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    dense.grad = torch.tensor([-2.0, 0.5, 2.0])
    clip_values([embedding.weight, without, dense], 1.5)
    assert embedding.weight.grad.to_dense().flatten().tolist() == [0, 1.5, 0, 0, -1.5]
    assert dense.grad.tolist() == [-1.5, 0.5, 1.5]
    assert without.grad is None
    clip_values([without], 1.5)
    clip_values([embedding.weight], 1.0)
    assert embedding.weight.grad.to_dense().flatten().tolist() == [0, 1, 0, 0, -1]


def test_of_gradients_that_processes_share_the_part_of_this_one_is_clipped():
    """In its memory; their norm is that of the whole, for which the processes have to communicate."""
    with fake_mesh() as mesh:
        part, plain = torch.tensor([[3.0, -4.0]]), torch.tensor([6.0, -8.0])
        shared = nn.Parameter(sharded(mesh, torch.zeros(1, 2)))
        shared.grad = sharded(mesh, part)
        unsharded = nn.Parameter(torch.zeros(2))
        unsharded.grad = plain
        assert [norm.shape for norm in norms_of([shared, unsharded], CPU)] == [(), ()]
        for weights in ([shared, unsharded], [shared]):
            norms = gradient_norms(weights)
            assert [type(norm) for norm in norms] == [torch.Tensor] * len(weights)
        clip([shared, unsharded], 1.0, torch.tensor(2.0))
        torch.testing.assert_close(part, torch.tensor([[1.5, -2.0]]))
        torch.testing.assert_close(plain, torch.tensor([3.0, -4.0]))
        clip_values([shared, unsharded], 1.75)
        torch.testing.assert_close(part, torch.tensor([[1.5, -1.75]]))
        assert plain.tolist() == [1.75, -1.75]
