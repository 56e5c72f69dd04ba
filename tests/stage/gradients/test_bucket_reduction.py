"""Reductions of buckets: what PowerSGD leaves out is not lost, and names of hooks are strict."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from penstock.errors import SettingError
from penstock.stage.gradients.bucket_reduction import PowerSgd, orthogonalise


class Sum:
    """Collective operations of replicas that take turns in one thread: sums are formed at `end`."""

    def __init__(self, count):
        self.count = count
        self.tensors = []

    def all_reduce(self, tensor, *, second=False):
        """Note the tensor of a replica."""
        del second
        self.tensors.append(tensor)

    def end(self):
        """Give all replicas the sum."""
        total = torch.stack(self.tensors).sum(0)
        for tensor in self.tensors:
            tensor.copy_(total)
        self.tensors.clear()


def step(replicas, buckets, gradients, collectives):
    """Sum gradients; return the bucket of each replica."""
    for replica, bucket, gradient in zip(replicas, buckets, gradients, strict=True):
        bucket.copy_(gradient)
        replica.begin()
    collectives.end()
    for replica in replicas:
        replica.advance()
    if collectives.tensors:
        collectives.end()
    for replica in replicas:
        replica.finish()
    return [bucket.clone() for bucket in buckets]


def test_powersgd_returns_what_it_has_left_out_in_later_steps():
    """Sums of steps approach the sums of gradients; vectors are exact; all replicas agree."""
    shapes = [torch.Size((12, 9)), torch.Size((7,)), torch.Size((10, 2, 8))]
    size = sum(shape.numel() for shape in shapes)
    generator = torch.Generator().manual_seed(0)
    collectives = Sum(3)
    buckets = [torch.zeros(size, dtype=torch.float64) for _ in range(3)]
    replicas = [PowerSgd(collectives, bucket, shapes, 2) for bucket in buckets]
    gradients = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3)]
    exact = sum(gradients)
    total = torch.zeros_like(exact)
    errors = []
    for number in range(60):
        results = step(replicas, buckets, gradients, collectives)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        total += results[0]
        if number == 0:
            assert not torch.allclose(results[0], exact, rtol=0.1)
            assert torch.allclose(results[0][108:115], exact[108:115])
        errors.append(float((total / (number + 1) - exact).norm() / exact.norm()))
    assert errors[-1] < 0.1 * errors[0]


def test_powersgd_is_exact_for_sums_of_its_rank():
    """A matrix of rank 2 is its own approximation of rank 2."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    rights = torch.randn(2, 2, 15, generator=generator, dtype=torch.float64)
    gradients = [(left @ right).reshape(-1) for right in rights]
    collectives = Sum(2)
    buckets = [torch.zeros(300, dtype=torch.float64) for _ in range(2)]
    replicas = [PowerSgd(collectives, bucket, [torch.Size((20, 15))], 2) for bucket in buckets]
    for result in step(replicas, buckets, gradients, collectives):
        assert torch.allclose(result, gradients[0] + gradients[1], atol=1e-9)


def test_columns_become_orthonormal():
    """A column of zeros stays zero."""
    matrix = torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix[:, 2] = 0
    orthogonalise(matrix)
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    assert torch.allclose(matrix.T @ matrix, expected, atol=1e-12)


@pytest.mark.parametrize(
    "hook", ["", "fp8", "powersgd-", "powersgd-0", "powersgd-x", "fp16-2", None, 1]
)
def test_unknown_hooks_are_refused(hook):
    """By the pipeline, with the list of those that there are."""
    with pytest.raises(SettingError, match="gradient_hook is 'none', 'fp16'"):
        ps.Pipeline(
            torch.nn.Sequential(torch.nn.Linear(2, 2)),
            loss=torch.nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            balance=[1],
            schedule="1f1b",
            micro_batches=1,
            gradient_hook=hook,
        )
