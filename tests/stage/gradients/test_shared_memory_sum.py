"""Sums of gradients in shared memory equal those that are formed tensor by tensor, to the bit."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.shared_memory.availability import unavailable_reason
from penstock.shared_memory.segment import Segment
from penstock.stage.gradients.gradient_layout import GradientLayout
from penstock.stage.gradients.replica_messages import ReplicaMessages
from penstock.stage.gradients.shared_memory_sum import SharedMemorySum
from penstock.transport.in_process import Exchange, MemoryTransport
from penstock.transport.update_messages import UpdateMessage

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no shared memory")

SHAPES = [(3, 5), (), (0, 4), (2, 3, 4, 4), (70_000,), (1, 7)]


def parameters(dtypes):
    """Return parameters of all shapes and dtypes; images are in channels_last."""
    tensors = []
    for dtype in dtypes:
        for shape in SHAPES:
            tensor = torch.zeros(shape, dtype=dtype)
            if len(shape) == 4:
                tensor = tensor.to(memory_format=torch.channels_last)
            tensors.append(nn.Parameter(tensor))
    return tensors


def random_gradients(tensors, seed, missing=()):
    """Return a gradient for each parameter but the missing ones; one is a view with gaps."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for index, tensor in enumerate(tensors):
        values = torch.randn(*tensor.shape, 2, generator=generator).to(tensor.dtype)
        grad = values[..., 0] if index % 2 else values[..., 0].clone()
        gradients.append(None if index in missing else grad)
    return gradients


class Replica:
    """One replica in this process, with its own segment."""

    def __init__(self, rank, count, exchange, dtypes):
        transport = MemoryTransport(rank, exchange, 20.0)
        messages = ReplicaMessages(0, tuple(range(count)), rank, transport, lambda _, call: call())
        self.parameters = parameters(dtypes)
        self.sum = SharedMemorySum(messages, lambda _, fd: Segment.open(os.getpid(), fd))

    def step(self, gradients, *, early):
        """Sum these gradients; return the counts and the sums."""
        for parameter, grad in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if grad is None else grad.clone()
        known = self.sum.existing_area(self.parameters)
        if early and known is not None:
            self.sum.start(known)
        counts, sums = self.sum.finish(self.sum.area(self.parameters))
        return counts, [total.clone() for total in sums]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64, torch.bfloat16)], ids=str)
def test_sums_are_those_in_the_order_of_the_ranks(count, dtypes):
    """Over several steps, on every replica, with gradients that some or all replicas lack."""
    exchange = Exchange()
    replicas = [Replica(rank, count, exchange, dtypes) for rank in range(count)]
    for step in range(3):
        missing = [{1, 4} if rank else {1, 5} for rank in range(count)]
        rows = [
            random_gradients(replica.parameters, 10 * step + rank, missing[rank])
            for rank, replica in enumerate(replicas)
        ]
        with ThreadPoolExecutor(count) as threads:
            jobs = [
                threads.submit(replica.step, row, early=rank % 2 == 0)
                for rank, (replica, row) in enumerate(zip(replicas, rows, strict=True))
            ]
            results = [job.result() for job in jobs]
        for index, parameter in enumerate(replicas[0].parameters):
            terms = [
                torch.zeros_like(parameter) if row[index] is None else row[index] for row in rows
            ]
            expected = terms[0]
            for term in terms[1:]:
                expected = expected + term
            present = sum(row[index] is not None for row in rows)
            for counts, sums in results:
                assert counts[index] == present
                assert torch.equal(sums[index], expected)


def test_gradients_are_written_only_when_the_others_have_copied_the_last_sum():
    """They read it from this rank's memory."""
    exchange = Exchange()
    replicas = [Replica(rank, 2, exchange, (torch.float32,)) for rank in range(2)]
    rows = [random_gradients(replica.parameters, rank) for rank, replica in enumerate(replicas)]
    with ThreadPoolExecutor(2) as threads:
        list(
            threads.map(
                lambda pair: pair[0].step(pair[1], early=False), zip(replicas, rows, strict=True)
            )
        )
    copied = UpdateMessage.COPIED.of_stage(0)
    assert (1, 0, copied) in exchange._payloads
    first = replicas[0]
    first.sum.start(first.sum.existing_area(first.parameters))
    assert (1, 0, copied) not in exchange._payloads, "its word has been awaited"
    assert (0, 1, copied) in exchange._payloads


def test_sums_replace_gradients_in_their_own_memory():
    """A step allocates no memory for gradients."""
    exchange = Exchange()
    replicas = [Replica(rank, 2, exchange, (torch.float32,)) for rank in range(2)]
    rows = [random_gradients(replica.parameters, rank) for rank, replica in enumerate(replicas)]

    def addresses(replica, row):
        for parameter, grad in zip(replica.parameters, row, strict=True):
            parameter.grad = grad.clone()
        before = [parameter.grad.data_ptr() for parameter in replica.parameters]
        _, sums = replica.sum.finish(replica.sum.area(replica.parameters))
        return before, [total.data_ptr() for total in sums]

    with ThreadPoolExecutor(2) as threads:
        for before, after in threads.map(addresses, replicas, rows):
            assert before == after


def test_sparse_gradients_are_refused():
    """They have no place in shared memory."""
    exchange = Exchange()
    replicas = [Replica(rank, 2, exchange, (torch.float32,)) for rank in range(2)]
    for replica in replicas:
        replica.parameters[0].grad = torch.zeros(3, 5).to_sparse()
    with ThreadPoolExecutor(2) as threads:
        areas = list(threads.map(lambda replica: replica.sum.area(replica.parameters), replicas))
    with pytest.raises(SettingError, match="sparse gradients"):
        replicas[0].sum.start(areas[0])


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_pieces_cover_every_element_once(pieces):
    """However few elements there are."""
    for shapes in ([(1000,), (3, 3)], [(5,)], [(0,)]):
        layout = GradientLayout([torch.zeros(shape) for shape in shapes])
        for region in layout.regions:
            bounds = [region.piece(position, pieces) for position in range(pieces)]
            covered = [element for first, end in bounds for element in range(first, end)]
            assert covered == list(range(region.count))
