"""Buckets whose gradients change after they were sent are sent again, by all replicas."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.time_limits import HANG_S
from torch import nn

from penstock.stage.gradients import bucket_sum
from penstock.stage.gradients.bucket_reduction import AllReduce, PowerSgd
from penstock.stage.gradients.bucket_sum import BucketSum


class Operations:
    """All-reduces of replicas in threads, matched by their order, as by gloo."""

    def __init__(self, count):
        self.count = count
        self.changed = threading.Condition()
        self.terms = {}


class Replica:
    """Collective operations of one replica; implements what `BucketSum` needs."""

    def __init__(self, operations):
        self.operations, self.count = operations, operations.count
        self.tensors = []

    def all_reduce(self, tensor):
        """Start the next operation."""
        number = len(self.tensors)
        self.tensors.append(tensor)
        with self.operations.changed:
            self.operations.terms.setdefault(number, []).append(tensor.clone())
            self.operations.changed.notify_all()
        return number

    def is_completed(self, number):
        """Whether all replicas have started an operation."""
        return len(self.operations.terms[number]) == self.count

    def wait(self, number):
        """Wait for all replicas, then store the sum."""
        with self.operations.changed:
            assert self.operations.changed.wait_for(lambda: self.is_completed(number), HANG_S)
        terms = self.operations.terms[number]
        self.tensors[number].copy_(sum(terms[1:], terms[0]))


def model():
    """Return three layers with the same weights for each replica."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in range(3)])


def summed(position, operations, *, changes):
    """Return the sums of one replica, and the number of operations that it has started.

    Args:
        position: of the replica.
        operations: of all replicas.
        changes: whether a hook on the first layer, whose gradient comes last, triples the gradient
            of the last layer, which has been sent by then.
    """
    network = model()
    parameters = list(network.parameters())
    first, *_, last = parameters
    collectives = Replica(operations)
    buckets = BucketSum(
        0,
        collectives,
        lambda layout: AllReduce(collectives, layout),
        lambda text, call: call(),
    )
    sent_before = []

    def triple(parameter):
        sent_before.append(len(collectives.tensors))
        if changes:
            last.grad.mul_(3)

    first.register_post_accumulate_grad_hook(triple)
    buckets.watch(parameters)
    x = torch.arange(10.0).view(2, 5) + position
    network(x).square().sum().backward()
    buckets.start(parameters)
    gradients = [parameter.grad.clone() for parameter in parameters]
    _, sums = buckets.finish(parameters)
    return gradients, [total.clone() for total in sums], sent_before, len(collectives.tensors)


def run(monkeypatch, changes):
    """Sum the gradients of two replicas in threads, with a bucket for each parameter."""
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 1)
    operations = Operations(2)
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(summed, position, operations, changes=changes[position])
            for position in range(2)
        ]
        return [job.result(HANG_S) for job in jobs]


def test_a_gradient_that_changes_after_its_bucket_was_sent_is_sent_again(monkeypatch):
    """By all replicas, though only one has changed it."""
    (first, sums, sent, operations), (second, others, _, _) = run(monkeypatch, (True, False))
    assert sent == [2], "the buckets of the later layers had left"
    for one, other, total, same in zip(first, second, sums, others, strict=True):
        assert torch.equal(total, one + other)
        assert torch.equal(total, same)
    assert operations == 3 + 1 + 1, "three buckets, the flags, and one bucket again"


@pytest.mark.parametrize("stale", [False, True])
def test_what_powersgd_has_left_out_of_a_stale_sum_does_not_count(monkeypatch, stale):
    """All sums, and what the last one leaves out, are all gradients: none is lost or counts twice."""
    monkeypatch.setattr(bucket_sum, "BUCKET_BYTES", 1)
    collectives = SimpleNamespace(
        count=1, all_reduce=lambda *args, **options: 0, is_completed=bool, wait=lambda work: None
    )
    reductions = []

    def make(layout):
        reductions.append(PowerSgd(collectives, layout, 2))
        return reductions[-1]

    buckets = BucketSum(0, collectives, make, lambda _, call: call())
    parameter = nn.Parameter(torch.zeros(12, 9, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    all_sums, all_gradients = torch.zeros(12, 9), torch.zeros(12, 9)
    for _ in range(3):
        gradient = torch.randn(12, 9, generator=generator, dtype=torch.float64)
        parameter.grad = 7 * gradient if stale else gradient.clone()
        buckets.start([parameter])
        if stale:
            parameter.grad.copy_(gradient)
            buckets._flags[-1] = 1  # the flags have left: as another replica tells
        _, (total,) = buckets.finish([parameter])
        all_sums = all_sums + total
        all_gradients = all_gradients + gradient
    left_out = reductions[0]._error.view(12, 9)
    assert left_out.norm() > 0.1 * all_gradients.norm()
    assert torch.allclose(all_sums + left_out, all_gradients)


def test_gradients_that_do_not_change_are_sent_once(monkeypatch):
    """Each bucket, and the flags."""
    for _, _, _, operations in run(monkeypatch, (False, False)):
        assert operations == 3 + 1
