"""Reductions of buckets: what PowerSGD leaves out is not lost, and names of hooks are strict."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from penstock.errors import SettingError
from penstock.stage.gradients.bucket_reduction import (
    BucketLayout,
    InRankOrder,
    PowerSgd,
    orthogonalise,
)


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


def step(replicas, gradients, collectives):
    """Sum gradients; return the sum of each replica."""
    for replica, gradient in zip(replicas, gradients, strict=True):
        replica.memory().copy_(gradient)
        replica.begin()
    collectives.end()
    for replica in replicas:
        replica.advance()
    if collectives.tensors:
        collectives.end()
    return [replica.finish() for replica in replicas]


def layout_of(shapes, dtype=torch.float64):
    """Return the layout of a bucket."""
    return BucketLayout(tuple(map(torch.Size, shapes)), dtype, torch.device("cpu"))


def test_powersgd_returns_what_it_has_left_out_in_later_steps():
    """Sums of steps approach the sums of gradients; vectors are exact; all replicas agree."""
    layout = layout_of([(12, 9), (7,), (10, 2, 8)])
    size = layout.size
    generator = torch.Generator().manual_seed(0)
    collectives = Sum(3)
    replicas = [PowerSgd(collectives, layout, 2) for _ in range(3)]
    gradients = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3)]
    exact = sum(gradients)
    total = torch.zeros_like(exact)
    errors = []
    for number in range(60):
        results = step(replicas, gradients, collectives)
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
    replicas = [PowerSgd(collectives, layout_of([(20, 15)]), 2) for _ in range(2)]
    for result in step(replicas, gradients, collectives):
        assert torch.allclose(result, gradients[0] + gradients[1], atol=1e-9)


def test_columns_become_orthonormal():
    """A column of zeros stays zero."""
    matrix = torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix[:, 2] = 0
    orthogonalise(matrix)
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    assert torch.allclose(matrix.T @ matrix, expected, atol=1e-12)


class Pieces:
    """Exchanges of replicas that take turns in one thread: pieces arrive at `end`."""

    def __init__(self, count):
        self.count = count
        self.calls = []

    def all_to_all(self, received, sent):
        """Note the memory of a replica."""
        self.calls.append((received.chunk(self.count), sent.chunk(self.count)))

    def all_gather(self, received, sent):
        """Note the memory of a replica."""
        self.calls.append((received.chunk(self.count), [sent] * self.count))

    def end(self):
        """Give piece n of every replica to replica n."""
        for target, (received, _) in enumerate(self.calls):
            for source, (_, sent) in enumerate(self.calls):
                received[source].copy_(sent[target])
        self.calls.clear()


def exchange(replicas, gradients, collectives):
    """Sum gradients; return the sum of each replica."""
    for replica, gradient in zip(replicas, gradients, strict=True):
        replica.memory().copy_(gradient)
        replica.begin()
    collectives.end()
    for replica in replicas:
        replica.advance()
    collectives.end()
    return [replica.finish() for replica in replicas]


@pytest.mark.parametrize("wire_dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 12, 13])
def test_a_sum_has_the_order_of_the_ranks_and_memory_of_its_own(wire_dtype, count, size):
    """To the bit, with fewer elements than replicas and in a second step, whose sum is another."""
    generator = torch.Generator().manual_seed(size)
    collectives = Pieces(count)
    layout = layout_of([(size,)], torch.float32)
    replicas = [InRankOrder(collectives, layout, wire_dtype) for _ in range(count)]
    earlier = []
    for _ in range(2):
        gradients = [torch.randn(size, generator=generator) * 100 for _ in range(count)]
        expected = torch.zeros(size)
        for gradient in gradients:
            expected = expected + gradient.to(wire_dtype or torch.float32).float()
        expected = expected.to(wire_dtype or torch.float32).float()
        sums = exchange(replicas, gradients, collectives)
        for total in sums:
            assert total.dtype == torch.float32
            assert torch.equal(total, expected)
        for total, before in earlier:
            assert torch.equal(total, before)
        earlier.append((sums[0], expected))


@pytest.mark.parametrize(
    ("wire_dtype", "nbytes"),
    [(None, 2 * 12 * 4), (torch.float32, 2 * 12 * 4), (torch.float16, 2 * 12 * 2 + 10 * 4)],
)
def test_memory_is_what_is_sent_and_received_and_a_compressed_sum(wire_dtype, nbytes):
    """10 numbers, padded to 12 for three replicas."""
    reduction = InRankOrder(Pieces(3), layout_of([(2, 5)], torch.float32), wire_dtype)
    assert reduction.nbytes == nbytes


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
