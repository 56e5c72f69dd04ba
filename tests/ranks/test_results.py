"""Losses and outputs of a batch, collected from the ranks of the last stage."""

from __future__ import annotations

import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.ranks.results import (
    DTYPES,
    StreamLosses,
    last_micro_batches,
    last_ranks_by_batch,
    mean_loss,
    mean_of_messages,
    micro_batches_of,
    numbers_by_rank,
    outputs,
    sum_of_local,
)

CPU = torch.device("cpu")


class World:
    """One rank of several, whose messages go through queues; comparisons are recorded."""

    def __init__(self, rank, size, queues):
        self.rank, self.size, self.local_ranks = rank, size, [rank]
        self._queues = queues
        self.compared = []
        self.calls = SimpleNamespace(
            verify=lambda source, check, batch: self.compared.append((source, check))
        )

    def device(self, rank):
        """Return the device of a rank."""
        return CPU

    def run(self, job):
        """Run a job on the local rank."""
        return {self.rank: job(self.rank)}

    def _put(self, value, target):
        self._queues[self.rank, target].put(value)

    def _get(self, source):
        return self._queues[source, self.rank].get(timeout=30)

    def tell(self, message):
        """Send a message to all others."""
        for target in set(range(self.size)) - {self.rank}:
            self._put(message, target)

    def hear(self, source, count):
        """Return a function that waits for a message of `count` numbers."""

        def wait():
            message = self._get(source)
            assert (message.numel(), message.dtype) == (count, torch.float64)
            return message

        return wait

    def broadcast(self, value, source, form=None):
        """Return the value of a rank."""
        if self.rank == source:
            assert form is None or (value.shape, value.dtype) == (form.shape, form.torch_dtype)
            self.tell(value)
            return value
        return self._get(source)

    def gather(self, messages, forms):
        """Return on rank 0 what ranks have sent, by rank; nothing on the others."""
        for rows in messages.values():
            if self.rank:
                self._put(rows, 0)
        if self.rank:
            return {}
        gathered = {rank: messages[rank] if rank in messages else self._get(rank) for rank in forms}
        for rank, rows in gathered.items():
            assert [row.shape for row in rows] == [form.shape for form in forms[rank]]
        return gathered


def on_ranks(size, job):
    """Run `job(world)` on all ranks at once; return the worlds and the results by rank."""
    queues = defaultdict(queue.Queue)
    for source in range(size):
        for target in range(size):
            queues[source, target]
    worlds = [World(rank, size, queues) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(job, worlds))
    assert all(entry.empty() for entry in queues.values()), "a message was not received"
    return worlds, results


def losses_of(count, dtype):
    """Return losses whose sum depends on the order."""
    return [torch.tensor(10.0**number / 3, dtype=dtype) for number in range(count)]


def batch_of(count, micro_batches, numbers, *, dtype=torch.float32, step=0):
    """Return a batch with the losses and outputs of some micro-batches."""
    x = torch.arange(2.0 * micro_batches).reshape(micro_batches, 2)
    batch = make_batch(x, x, micro_batches, step=step, training=True)
    batch.check = 1234 + step
    losses = losses_of(micro_batches, dtype)
    batch.losses = {number: losses[number] for number in numbers}
    batch.outputs = {number: batch.inputs[number] * 2 for number in numbers}
    return batch


SCHEDULES = [
    ("1f1b", 3, 4, 4),
    ("1f1b", 3, 4, 2),
    ("interleaved", 4, 4, 4),
    ("chimera", 4, 4, 4),
    ("chimera", 4, 4, 1),
    ("dualpipe-v", 4, 4, 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "stages", "scheduled", "micro_batches"), SCHEDULES)
def test_all_ranks_have_the_same_sum_in_the_order_of_the_micro_batches(
    name, stages, scheduled, micro_batches, dtype
):
    """Wherever the last stage runs; whoever receives a loss compares the batches."""
    schedule = ps.schedule(name, stages=stages, micro_batches=scheduled)
    last = schedule.ranks_of_stage[-1]

    def job(world):
        numbers = micro_batches_of(schedule, world.rank, micro_batches)
        batch = batch_of(scheduled, micro_batches, numbers, dtype=dtype)
        return mean_loss(world, schedule, batch)

    worlds, means = on_ranks(schedule.ranks, job)
    whole = batch_of(scheduled, micro_batches, range(micro_batches), dtype=dtype)
    expected = whole.loss_shares(range(micro_batches)).sum().float()
    assert all(mean.dtype == torch.float32 for mean in means)
    assert all(torch.equal(mean, expected) for mean in means)
    holders = last_micro_batches(schedule, whole)
    for world in worlds:
        sources = {source for source, _ in world.compared}
        assert {check for _, check in world.compared} <= {1234.0}
        if len(last) == 1:
            assert sources == set(last) - {world.rank}
        else:
            assert sources == ({0, *holders} if world.rank == 0 else {0})


@pytest.mark.parametrize(("name", "stages", "scheduled", "micro_batches"), SCHEDULES)
def test_all_ranks_have_the_outputs_of_the_whole_batch(name, stages, scheduled, micro_batches):
    """In the order of the samples, and of equal batches."""
    schedule = ps.schedule(name, stages=stages, micro_batches=scheduled)

    def job(world):
        numbers = micro_batches_of(schedule, world.rank, micro_batches)
        return outputs(world, schedule, batch_of(scheduled, micro_batches, numbers))

    worlds, results = on_ranks(schedule.ranks, job)
    whole = batch_of(scheduled, micro_batches, range(micro_batches))
    for result in results:
        assert torch.equal(result, 2 * torch.cat(whole.inputs))
    source = schedule.ranks_of_stage[-1][0]
    for world in worlds:
        assert world.compared == ([] if world.rank == source else [(source, 1234.0)])


@pytest.mark.parametrize("name", ["pipedream", "avgpipe", "hetpipe"])
def test_losses_of_a_stream_are_sent_once_and_read_by_batch(name):
    """A rank sends when it has all of its losses, and two batches in flight do not mix. Steps go on
    from a checkpoint, while the ranks begin anew with the stream.
    """
    schedule = ps.schedule(name, 3, 2, batches=4)
    expected_checks = {rank: [] for rank in range(schedule.ranks)}

    def job(world):
        losses = StreamLosses(world, schedule)
        batches = []
        for index in range(3):
            step = 7 + index
            numbers_of = numbers_by_rank(
                last_ranks_by_batch(schedule)[index % schedule.batches],
                batch_of(2, 2, (), step=step),
            )
            numbers = numbers_of.get(world.rank, [])
            sources = numbers_of.keys() - {world.rank}
            expected_checks[world.rank] += [(source, 1234.0 + step) for source in sources]
            batch = batch_of(2, 2, numbers, step=step)
            computed, batch.losses = batch.losses, {}
            losses.expect(index, batch)
            losses.tell(batch)
            for number in numbers:
                batch.losses[number] = computed[number]
                losses.tell(batch)
            losses.tell(batch)
            batches.append(batch)
        means = [losses.mean(batch) for batch in batches]
        assert not losses._expected
        assert not losses._to_send
        losses.verify()
        return means

    worlds, results = on_ranks(schedule.ranks, job)
    for means in results:
        for index, mean in enumerate(means):
            whole = batch_of(2, 2, range(2), step=7 + index)
            assert torch.equal(mean, whole.loss_shares(range(2)).sum().float())
    for world in worlds:
        assert sorted(world.compared) == sorted(expected_checks[world.rank])


def test_forgotten_batches_of_a_stream_are_neither_sent_nor_awaited():
    """After a failure the next batches begin anew."""
    schedule = ps.schedule("pipedream", 2, 1)
    world = World(1, 2, defaultdict(queue.Queue))
    losses = StreamLosses(world, schedule)
    batch = batch_of(1, 1, [0])
    losses.expect(0, batch)
    losses.clear()
    losses.tell(batch)
    assert world._queues == {}
    assert not losses._expected


@pytest.mark.parametrize("name", ["pipedream", "hetpipe"])
def test_a_process_that_has_all_ranks_of_a_stream_exchanges_nothing(name):
    """Its losses are there, whichever ranks have computed them."""
    schedule = ps.schedule(name, 2, 2)
    world = World(0, schedule.ranks, {})
    world.local_ranks = list(range(schedule.ranks))
    world.hear = world.tell = None
    losses = StreamLosses(world, schedule)
    for index in range(3):
        batch = batch_of(2, 2, range(2), step=index)
        losses.expect(index, batch)
        losses.tell(batch)
        assert torch.equal(losses.mean(batch), sum_of_local(batch))
    assert world.compared == []


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_process_that_has_all_ranks_of_a_batch_exchanges_nothing(name):
    """Nothing waits for its loss, which is where it was computed."""
    schedule = ps.schedule(name, 4, 4)
    world = SimpleNamespace(size=schedule.ranks, local_ranks=range(schedule.ranks))
    batch = batch_of(4, 4, range(4))
    assert torch.equal(mean_loss(world, schedule, batch), sum_of_local(batch))


def test_losses_of_this_process_are_summed_in_the_order_of_micro_batches():
    """Ops may end in another order, and sums of floats depend on it."""
    batch = batch_of(4, 4, [2, 0, 3, 1])
    values = {0: 1e8, 1: 1.0, 2: -1e8, 3: 0.25}
    batch.losses = {number: torch.tensor(values[number]) for number in (1, 3, 0, 2)}
    expected = torch.tensor([values[number] for number in range(4)]).sum()
    other = torch.tensor([values[number] for number in batch.losses]).sum()
    assert torch.equal(sum_of_local(batch), expected)
    assert not torch.equal(expected, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_mean_is_summed_in_the_dtype_of_the_losses_on_any_rank(dtype):
    """As one rank that has all of them sums; messages have doubles."""
    losses = losses_of(5, dtype)
    whole = torch.stack(losses).sum().float()
    for split in ([[0, 1, 2, 3, 4]], [[1, 3], [0, 2, 4]], [[4], [0], [2, 1, 3]]):
        messages = []
        for numbers in split:
            values = [float(losses[number]) for number in numbers]
            code = float(DTYPES.index(dtype))
            messages.append((numbers, torch.tensor([code, 9.0, *values], dtype=torch.float64)))
        assert torch.equal(mean_of_messages(messages), whole)


def test_ranks_of_a_period_are_those_of_its_placement():
    """By batch and micro-batch; a small batch has the first ones."""
    schedule = ps.schedule("hetpipe", 3, 2, batches=4)
    last = schedule.stages - 1
    ranks = last_ranks_by_batch(schedule)
    assert len(ranks) == schedule.batches
    for index, row in enumerate(ranks):
        numbers = range(index * schedule.micro_batches, (index + 1) * schedule.micro_batches)
        assert row == [schedule.placement[last, number] for number in numbers]
    assert numbers_by_rank([5, 3, 5, 4], batch_of(4, 3, ())) == {5: [0, 2], 3: [1]}
