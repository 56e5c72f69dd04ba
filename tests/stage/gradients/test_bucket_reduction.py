"""Reductions of buckets: what PowerSGD leaves out is not lost, and names of hooks are strict."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from penstock.errors import SettingError
from penstock.stage.gradients import bucket_reduction
from penstock.stage.gradients.bucket_reduction import (
    AllReduce,
    BucketLayout,
    InRankOrder,
    LowPrecision,
    PowerSgd,
    orthogonalise,
    parse_hook,
    reduction_factory,
)


class Sum:
    """Collective operations of replicas that take turns in one thread: sums are formed at `end`."""

    def __init__(self, count):
        self.count = count
        self.tensors = []
        self.seconds = []

    def all_reduce(self, tensor, *, second=False):
        """Note the tensor of a replica, and the round."""
        self.seconds.append(second)
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
    # Ranks may start second rounds in another order than the first rounds of later buckets.
    assert collectives.seconds == [False, False, True, True]


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
    """10 numbers, padded to 12 for three replicas, and not at all for five."""
    reduction = InRankOrder(Pieces(3), layout_of([(2, 5)], torch.float32), wire_dtype)
    assert reduction.nbytes == nbytes
    assert InRankOrder(Pieces(5), layout_of([(2, 5)], torch.float32)).nbytes == 2 * 10 * 4


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


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("none", ("none", 0)),
        ("fp16", ("fp16", 0)),
        ("bf16", ("bf16", 0)),
        ("powersgd", ("powersgd", 4)),
        ("powersgd-1", ("powersgd", 1)),
        ("powersgd-1024", ("powersgd", 1024)),
        ("powersgd-1025", None),
        ("powersgd--1", None),
        ("powersgd-²", None),
        ("powersgd-٣", None),
        ("none-1", None),
        ("bf16-", None),
    ],
)
def test_a_hook_has_a_kind_and_a_rank_from_1_to_1024(hook, expected):
    """4 unless it is given; other kinds have none."""
    if expected is None:
        with pytest.raises(ValueError, match=hook):
            parse_hook(hook)
        return
    assert parse_hook(hook) == expected


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("hook", ["none", "fp16", "bf16", "powersgd-3"])
def test_only_gradients_of_32_and_64_bits_are_compressed(hook, dtype, count):
    """Of two replicas an all-reduce is exact, since a + b is b + a."""
    make = reduction_factory(Sum(count), hook)
    layout = layout_of([(9, 9), (2,)], dtype)
    reduction = make(layout)
    if hook == "none" or dtype not in (torch.float32, torch.float64):
        assert type(reduction) is (AllReduce if count == 2 else InRankOrder)
        assert reduction.memory().dtype == dtype
    elif hook == "powersgd-3":
        assert type(reduction) is PowerSgd
        assert reduction.nbytes == dtype.itemsize * (2 * (81 + 2) + 9 * 3 + 2 + 9 * 3)
    else:
        assert type(reduction) is LowPrecision
        assert reduction.memory().dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[hook]


def test_gradients_of_a_bucket_lie_one_after_the_other():
    """Also numbers and empty ones."""
    layout = layout_of([(2, 3), (), (0, 4), (3,)], torch.float32)
    assert (layout.size, layout.nbytes) == (10, 40)
    assert (layout.empty().shape, layout.empty().dtype) == ((10,), torch.float32)
    views = layout.views(torch.arange(10.0))
    assert [view.shape for view in views] == [(2, 3), (), (0, 4), (3,)]
    assert [view.flatten().tolist() for view in views] == [[0, 1, 2, 3, 4, 5], [6], [], [7, 8, 9]]


def test_an_all_reduce_sums_in_its_memory_and_gives_it_up():
    """The next sum has other memory, since the first has become the gradients."""
    collectives = Sum(2)
    layout = layout_of([(3,)])
    replicas = [AllReduce(collectives, layout) for _ in range(2)]
    assert replicas[0].nbytes == 24
    totals = []
    for factor in (1, 2):
        gradients = [torch.arange(3.0).double() * factor, torch.ones(3).double()]
        for replica, gradient in zip(replicas, gradients, strict=True):
            replica.memory().copy_(gradient)
            replica.begin()
        assert all(replica.advance() is None for replica in replicas)
        collectives.end()
        totals.append([replica.finish() for replica in replicas])
        for replica in replicas:
            replica.reset()
    for factor, row in zip((1, 2), totals, strict=True):
        assert all(total.tolist() == [1, 1 + factor, 1 + 2 * factor] for total in row)


@pytest.mark.parametrize(
    ("shape", "approximated"),
    [
        ((5, 5), True),
        ((4, 4), False),
        ((2, 100), False),
        ((100, 2), False),
        ((3, 7), True),
        ((3, 6), False),
        ((9, 2, 4), True),
        ((60,), False),
        ((), False),
        ((0, 8), False),
    ],
)
def test_matrices_that_are_no_larger_than_their_factors_are_summed_as_they_are(shape, approximated):
    """With rank 2; a tensor of more dimensions is a matrix of its first and all others."""
    generator = torch.Generator().manual_seed(0)
    layout = layout_of([shape])
    collectives = Sum(2)
    replicas = [PowerSgd(collectives, layout, 2) for _ in range(2)]
    gradients = [
        torch.randn(layout.size, generator=generator, dtype=torch.float64) for _ in range(2)
    ]
    result, other = step(replicas, gradients, collectives)
    assert torch.equal(result, other)
    assert torch.equal(result, sum(gradients)) is not approximated


def reference_power_sgd(rows, errors, right):
    """Return the sum, the errors that are left, and the next right factor, as in the paper."""
    matrices = [row + error for row, error in zip(rows, errors, strict=True)]
    left = torch.linalg.qr(sum(matrix @ right for matrix in matrices))[0]
    right = sum(matrix.t() @ left for matrix in matrices)
    total = left @ right.t()
    return total, [matrix - total / len(rows) for matrix in matrices], right


@pytest.mark.parametrize("count", [2, 3])
def test_powersgd_follows_its_algorithm_and_begins_anew_after_a_reset(count):
    """Two matrices with factors and errors of their own, over several steps; a vector is exact."""
    generator = torch.Generator().manual_seed(1)
    layout = layout_of([(8, 6), (3,), (7, 9)])
    collectives = Sum(count)
    replicas = [PowerSgd(collectives, layout, 2) for _ in range(count)]
    seeded = torch.Generator().manual_seed(bucket_reduction._POWER_SGD_SEED)
    first_rights = torch.randn((6 + 9) * 2, generator=seeded, dtype=torch.float64)
    for _ in range(2):
        errors = [[torch.zeros(8, 6).double()] * count, [torch.zeros(7, 9).double()] * count]
        rights = [first_rights[:12].view(6, 2), first_rights[12:].view(9, 2)]
        for _ in range(3):
            gradients = [
                torch.randn(layout.size, generator=generator, dtype=torch.float64)
                for _ in range(count)
            ]
            results = step(replicas, gradients, collectives)
            views = [layout.views(gradient) for gradient in gradients]
            for place, parts in enumerate(((0, 48), (51, 114))):
                total, errors[place], rights[place] = reference_power_sgd(
                    [row[2 * place] for row in views], errors[place], rights[place]
                )
                for result in results:
                    torch.testing.assert_close(result[slice(*parts)].view_as(total), total)
            for result in results:
                assert torch.equal(result[48:51], sum(row[1] for row in views))
        for replica in replicas:
            replica.reset()
