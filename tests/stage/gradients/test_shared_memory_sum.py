"""Sums of gradients in shared memory equal those that are formed tensor by tensor, to the bit."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from penstock.errors import RunError, SettingError
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


def replicas_of(count):
    """Return replicas with small parameters, and the exchange of their messages."""
    exchange = Exchange()
    replicas = [Replica(rank, count, exchange, ()) for rank in range(count)]
    for replica in replicas:
        replica.parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 500, 2)]
    return replicas, exchange


def on_all(function, replicas):
    """Call a function with every replica, in threads; return the results."""
    with ThreadPoolExecutor(len(replicas)) as threads:
        return list(threads.map(function, replicas))


@pytest.mark.parametrize("count", [2, 3])
def test_sums_that_a_rank_does_not_need_are_not_copied(count):
    """With ZeRO it updates some parameters; the counts are those of all. A parameter without a
    gradient here gets memory of its own.
    """
    replicas, _ = replicas_of(count)

    def run(replica):
        for number, parameter in enumerate(replica.parameters):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        if replica is replicas[0]:
            replica.parameters[2].grad = None
        area = replica.sum.area(replica.parameters)
        needed = [replica.parameters[0], replica.parameters[2]]
        return replica.sum.finish(area, lambda p: any(p is other for other in needed))

    for replica, (counts, sums) in zip(replicas, on_all(run, replicas), strict=True):
        assert counts == [count, count, count - 1]
        assert sums[1] is None
        assert sums[0].tolist() == [float(count)] * 3
        assert sums[2].tolist() == [3.0 * (count - 1)] * 2
        assert sums[0] is replica.parameters[0].grad
        assert replica.parameters[1].grad[0] == 2, "it is left as it was"


def test_memory_is_made_once_for_the_same_parameters_and_anew_for_others():
    """Until then there is none; its bytes are those of the gradients, aligned."""
    replicas, exchange = replicas_of(2)
    for replica in replicas:
        assert replica.sum.nbytes == 0
        assert replica.sum.existing_area(replica.parameters) is None
    areas = on_all(lambda replica: replica.sum.area(replica.parameters), replicas)
    for replica, area in zip(replicas, areas, strict=True):
        assert replica.sum.nbytes == -(-505 * 4 // 64) * 64
        assert replica.sum.area([*replica.parameters]) is area
        assert replica.sum.existing_area(replica.parameters) is area
        assert replica.sum.existing_area(replica.parameters[:2]) is None
        assert replica.sum.existing_area(replica.parameters[::-1]) is None
    # What others may still copy is not freed: their word is awaited before memory is replaced.
    on_all(lambda replica: replica.sum.finish(replica.sum.area(replica.parameters)), replicas)
    others = on_all(lambda replica: replica.sum.area(replica.parameters[:1]), replicas)
    assert not exchange._payloads
    for replica, area, other in zip(replicas, areas, others, strict=True):
        assert other is not area
        assert replica.sum.existing_area(replica.parameters) is None
        assert replica.sum.nbytes == 64
    for counts, sums in on_all(lambda r: r.sum.finish(r.sum.area(r.parameters[:1])), replicas):
        assert counts == [0]
        assert sums[0].tolist() == [0.0] * 3


def test_without_memory_on_one_rank_all_fall_back_to_messages(monkeypatch, caplog):
    """The log says why; they do not try again with the same parameters, but with other ones."""
    replicas, exchange = replicas_of(3)
    make, tries = Segment.make, []

    def failing(size):
        tries.append(size)
        if len(tries) == 2:
            raise OSError("no space left")
        return make(size)

    monkeypatch.setattr(Segment, "make", failing)
    with caplog.at_level("INFO"):
        areas = on_all(lambda replica: replica.sum.area(replica.parameters), replicas)
    assert areas == [None] * 3
    (record,) = caplog.records
    assert "stage 0: gradients of replicas are summed in messages" in record.message
    assert "no space left" in record.message
    for replica in replicas:
        assert replica.sum.nbytes == 0
        assert replica.sum.area(replica.parameters) is None
        assert replica.sum.existing_area(replica.parameters) is None
    assert len(tries) == 3
    assert not exchange._payloads, "every message was received"
    areas = on_all(lambda replica: replica.sum.area(replica.parameters[1:]), replicas)
    assert None not in areas
    areas = on_all(lambda replica: replica.sum.area(replica.parameters), replicas)
    assert None not in areas, "memory may have become free"


def test_files_of_segments_are_closed_when_all_have_opened_them(monkeypatch):
    """The memory stays mapped; a run that changes its parameters often would run out of files."""
    segments, make = [], Segment.make

    def noting(size):
        segments.append(make(size))
        return segments[-1]

    monkeypatch.setattr(Segment, "make", noting)
    replicas, _ = replicas_of(2)
    on_all(lambda replica: replica.sum.area(replica.parameters), replicas)
    assert [segment.fd for segment in segments] == [-1, -1]


def test_memory_that_cannot_be_opened_ends_the_run_with_both_ranks():
    """The other rank would wait for sums for ever."""
    replicas, _ = replicas_of(2)

    def refuse(rank, number):
        raise OSError("permission denied")

    for replica in replicas:
        replica.sum._open_segment = refuse

    def error_of(replica):
        with pytest.raises(RunError) as caught:
            replica.sum.area(replica.parameters)
        return str(caught.value)

    first, second = on_all(error_of, replicas)
    assert first == (
        "rank 0 cannot open the shared memory of rank 1 for the gradients of stage 0: permission "
        "denied"
    )
    assert second.startswith("rank 1 cannot open the shared memory of rank 0")


def test_gradients_are_copied_once_per_sum_and_again_after_a_failed_batch():
    """What was copied early counts; what an unfinished batch has copied does not."""
    replicas, exchange = replicas_of(2)
    areas = on_all(lambda replica: replica.sum.area(replica.parameters), replicas)

    def fill(replica, value):
        for parameter in replica.parameters:
            parameter.grad = torch.full_like(parameter, value)

    def start(replica):
        replica.sum.start(replica.sum.existing_area(replica.parameters))

    def finish(replica):
        return replica.sum.finish(replica.sum.existing_area(replica.parameters))

    for replica in replicas:
        fill(replica, 7.0)
        start(replica)
        replica.sum.forget()
    exchange.reopen()
    for value in (1.0, 2.0):
        for replica in replicas:
            fill(replica, value)
            start(replica)
            fill(replica, 50.0)
            start(replica)
        for _, sums in on_all(finish, replicas):
            assert all(bool((total == 2 * value).all()) for total in sums)
    assert [area.layout.nbytes for area in areas] == [replicas[0].sum.nbytes] * 2


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_replica_sums_its_own_piece_where_it_is(count):
    """The pieces of all are the whole; a gradient in several pieces is put together of them."""
    replicas, _ = replicas_of(count)
    areas = on_all(lambda replica: replica.sum.area(replica.parameters), replicas)
    for rank, replica in enumerate(replicas):
        for parameter in replica.parameters:
            parameter.grad = torch.full_like(parameter, 10.0**rank)
    on_all(lambda replica: replica.sum._sum(replica.sum._area), replicas)
    total = sum(10.0**rank for rank in range(count))
    for area in areas:
        pieces = [area.summed(0, position) for position in range(count)]
        assert sum(map(len, pieces)) == 505
        assert all(bool((piece == total).all()) for piece in pieces)
        assert len({piece.data_ptr() for piece in pieces}) == count
        bounds = [area.piece(0, position) for position in range(count)]
        assert [end - first for first, end in bounds] == [len(piece) for piece in pieces]
        spread = area.copies[1]
        assert len(spread.parts) == count - 1, "all but the own piece"
        assert area.copies[0].parts == area.copies[2].parts == ()
