"""Losses that ranks exchange on their devices, over a world that notes what is sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.batches.batch import Batch
from penstock.ranks.device_results import DeviceLosses, DeviceStreamLosses, device_losses
from penstock.ranks.results import DTYPES
from penstock.schedule.catalogue import schedule


class Collectives:
    """Broadcasts between the ranks of this process, by source and order."""

    def __init__(self, sent) -> None:
        self.device, self.sent, self.waited = torch.device("cpu"), sent, []

    def broadcast(self, tensor, source):
        """Exchange the tensor at once; the receiver's is filled at the wait."""
        rows = self.sent.setdefault(source, [])
        if tensor.isfinite().all() and (tensor != -7).all():
            rows.append(tensor)
        return source, tensor

    def wait(self, transfer):
        """Fill what was received."""
        self.waited.append(transfer[0])
        source, tensor = transfer
        sent = self.sent[source][-1]
        assert (tensor.shape, tensor.dtype) == (sent.shape, sent.dtype)
        tensor.copy_(sent)


def world_of(rank, sent, arrivals):
    """A world of one rank."""
    world = SimpleNamespace(local_ranks=(rank,), told=[], verified=[])
    world.collectives = Collectives(sent)
    world.run = lambda job: {rank: job(rank)}
    world.tell = lambda tensor: world.told.append(tensor.tolist())
    world.hear = lambda source, count: lambda: torch.tensor(arrivals.pop(0), dtype=torch.float64)
    world.calls = SimpleNamespace(
        verify=lambda source, value, batch: world.verified.append(
            (source, value, batch.step, batch.checksum())
        )
    )
    return world


def batch_of(step, losses, factors=None, check=0, *, training=True):
    """A batch with the losses of some micro-batches."""
    count = 4
    return Batch(
        step,
        [torch.zeros(1)] * count,
        None,
        [0.25] * count,
        "",
        training=training,
        losses={number: torch.tensor(value) for number, value in losses.items()},
        loss_factors=factors or {},
        check=check,
    )


@pytest.fixture(autouse=True)
def receive_into_minus_seven(monkeypatch):
    """What has not been received is -7."""
    empty = torch.empty

    def minus_seven(*given, **more):
        return empty(*given, **more).fill_(-7)

    monkeypatch.setattr("penstock.ranks.device_results.torch.empty", minus_seven)


def test_one_source_sends_the_sum_and_two_send_all_losses_in_order_of_micro_batches():
    """The mean is the same to the bit on every rank, whoever has which micro-batches."""
    losses = {0: 0.1, 1: 1e8, 2: -1e8, 3: 0.7}
    expected = torch.stack([torch.tensor(losses[n]) for n in range(4)]).sum()
    for owners in ({2: [0, 1, 2, 3]}, {2: [0, 2], 1: [1, 3]}):
        sent = {}
        worlds = {rank: world_of(rank, sent, [[0.0]] * 9) for rank in (2, 1, 0)}
        means = []
        for rank, world in worlds.items():
            local = {number: losses[number] for number in owners.get(rank, [])}
            mean = DeviceLosses(world, world.collectives).mean(batch_of(5, local), owners)
            means.append(mean)
        for mean in means:
            assert mean.dtype is torch.float32
            assert float(mean) == float(expected)
        for world in worlds.values():
            assert world.collectives.waited == list(owners)
        if len(owners) == 2:
            code = DTYPES.index(torch.float32)
            assert [row.tolist()[:2] for row in (sent[2][0], sent[1][0])] == [[code, code]] * 2
            assert sent[2][0].numel() == 4


def test_a_loss_is_read_at_its_first_use():
    """The host does not wait for the device before."""
    world = world_of(0, {}, [])
    mean = DeviceLosses(world, world.collectives).mean(batch_of(1, {0: 2.0, 1: 1.0}), {0: [0, 1]})
    assert world.collectives.waited == []
    assert float(mean) == 3.0
    assert world.collectives.waited == [0]


def test_checksums_are_compared_two_batches_later_and_the_rest_at_the_end():
    """Each with the batch that it is of, whose tensors are not kept."""
    world = world_of(0, {1: [torch.tensor([1.0], dtype=torch.float64)]}, [[50.0], [51.0], [52.0]])
    losses = DeviceLosses(world, world.collectives)
    for step in range(3):
        losses.mean(batch_of(step, {}, check=10 + step), {1: [0, 1, 2, 3]})
        assert world.verified == ([(1, 50.0, 0, 10)] if step == 2 else [])
    assert all(record.inputs == [] for record, _ in losses._pending)
    losses.verify()
    losses.verify()
    assert world.verified == [(1, 50.0, 0, 10), (1, 51.0, 1, 11), (1, 52.0, 2, 12)]
    assert world.told == []


@pytest.mark.parametrize("training", [True, False])
def test_a_difference_is_of_a_training_batch_or_of_another_one(training):
    """After a training batch the weights have been updated with it, which the message says."""
    world = world_of(0, {1: [torch.tensor([1.0], dtype=torch.float64)]}, [[50.0]])
    kinds = []
    world.calls.verify = lambda source, value, batch: kinds.append(batch.training)
    losses = DeviceLosses(world, world.collectives)
    losses.mean(batch_of(0, {}, training=training), {1: [0, 1, 2, 3]})
    losses.verify()
    assert kinds == [training]


def test_a_source_tells_its_checksum_and_compares_only_those_of_others():
    """With two sources each has that of the other."""
    world = world_of(1, {}, [[9.0]])
    losses = DeviceLosses(world, world.collectives)
    losses.mean(batch_of(3, {1: 1.0, 3: 1.0}, check=77), {2: [0, 2], 1: [1, 3]})
    losses.verify()
    assert world.told == [[77.0]]
    assert world.verified == [(2, 9.0, 3, 77)]


def test_only_worlds_with_collectives_exchange_losses_on_devices():
    """All others go through host memory."""
    world = world_of(0, {}, [])
    assert device_losses(world)._collectives is world.collectives
    assert device_losses(SimpleNamespace(collectives=None)) is None


def test_batches_of_a_stream_have_the_ranks_of_their_place_in_the_period(monkeypatch):
    """By rank in ascending order; each is asked for once."""
    stream_schedule = schedule("pipedream", 2, 1)
    asked = []
    losses = SimpleNamespace(
        mean=lambda batch, numbers_of: asked.append((batch.step, numbers_of)) or "mean",
        verify=lambda: asked.append("verify"),
    )
    stream = DeviceStreamLosses(losses, stream_schedule)
    assert stream._period == stream_schedule.batches
    stream._last_ranks, stream._period = ["even", "odd"], 2
    batches = [batch_of(step, {}) for step in (10, 11)]
    numbers = []

    def by_rank(last_ranks, batch):
        numbers.append((last_ranks, batch.step))
        return {3: [1], 1: [0, 2]}

    monkeypatch.setattr("penstock.ranks.device_results.numbers_by_rank", by_rank)
    stream.expect(6, batches[0])
    stream.expect(7, batches[1])
    assert numbers == [("even", 10), ("odd", 11)]
    stream.tell(batches[0])
    assert stream.mean(batches[1]) == "mean"
    assert list(asked[0][1]) == [1, 3]
    assert asked == [(11, {1: [0, 2], 3: [1]})]
    with pytest.raises(KeyError):
        stream.mean(batches[1])
    stream.clear()
    with pytest.raises(KeyError):
        stream.mean(batches[0])
    stream.verify()
    assert asked[1:] == ["verify"]
