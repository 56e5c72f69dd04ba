"""Losses of batches where ranks exchange them on their devices; see `results` for all others.

No host waits for a loss here. The checksums of the batches, which are numbers of the hosts, go
through host memory, and are compared some batches later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.batches.batch import Batch
from penstock.ranks.lazy_loss import LazyLoss
from penstock.ranks.results import (
    DTYPES,
    last_ranks_by_batch,
    mean_of_messages,
    numbers_by_rank,
    sum_of_local,
)
from penstock.ranks.world import World
from penstock.schedule.op import Schedule
from penstock.transport.devices.device_collectives import DeviceCollectives
from penstock.transport.wire import DeviceTransfer

#: Batches after which checksums are compared. The hosts of all ranks run ahead of their devices
#: equally far, but not equally fast: what a host sent two batches ago is there.
_LAG = 2


class _Row(NamedTuple):
    """The losses of one rank, as they come to this rank.

    Attributes:
        numbers: the micro-batches.
        tensor: a message of their losses, see `_loss_message`; or their sum alone.
        transfer: the broadcast.
    """

    numbers: Sequence[int]
    tensor: Tensor
    transfer: DeviceTransfer | None


class DeviceLosses:
    """The losses of the batches of a pipeline.

    Args:
        world: the ranks, which have `collectives`.
    """

    def __init__(self, world: World, collectives: DeviceCollectives) -> None:
        self._world, self._collectives = world, collectives
        self._rank = world.local_ranks[0]
        # By batch whose checksums have not been compared: by source, what waits for its checksum.
        self._pending: deque[tuple[Batch, dict[int, Callable[[], Tensor]]]] = deque()

    def mean(self, batch: Batch, numbers_of: Mapping[int, Sequence[int]]) -> Tensor:
        """Return the mean loss of a batch whose ops have been launched.

        Args:
            batch: the batch.
            numbers_of: by rank that runs the last stage, its micro-batches.

        Returns:
            A float32 scalar on the device of this rank, bitwise equal on every rank.
        """
        rows = self._world.run(lambda _: self._exchange(batch, numbers_of))[self._rank]
        self._compare_checksums(batch, list(numbers_of))
        return LazyLoss(self._collectives.device, partial(self._read, rows))

    def _exchange(self, batch: Batch, numbers_of: Mapping[int, Sequence[int]]) -> list[_Row]:
        """Start to broadcast the losses of every rank."""
        rows: list[_Row] = []
        # A single source sends the sum of its losses. Of several, each sends all of its losses, which
        # every rank sums in the order of the micro-batches.
        sends_sum = len(numbers_of) == 1
        for rank, numbers in numbers_of.items():
            if rank != self._rank:
                count = 1 if sends_sum else 2 + len(numbers)
                row = torch.empty(count, dtype=torch.float64, device=self._collectives.device)
            elif sends_sum:
                row = sum_of_local(batch).double().reshape(1)
            else:
                row = _loss_message(batch, numbers)
            rows.append(_Row(numbers, row, self._collectives.broadcast(row, rank)))
        return rows

    def _read(self, rows: Sequence[_Row]) -> Tensor:
        """Wait for the losses of all ranks, and return their mean.

        Raises:
            RunError: a rank has failed.
        """

        def read(rank: int) -> list[Tensor]:
            del rank
            for row in rows:
                self._collectives.wait(row.transfer)
            return [row.tensor.cpu() for row in rows]

        values = self._world.run(read)[self._rank]
        if len(rows) == 1:
            mean = values[0][0]
        else:
            messages = zip((row.numbers for row in rows), values, strict=True)
            mean = mean_of_messages(list(messages))
        return mean.to(self._collectives.device, torch.float32)

    def _compare_checksums(self, batch: Batch, sources: Sequence[int]) -> None:
        """Send the checksum of a batch, and compare those of an earlier one.

        Raises:
            RanksDiffer: another rank had another batch.
        """
        checksum = torch.tensor([batch.checksum()], dtype=torch.float64)
        # Without the tensors of the batch, which need not be in memory until then.
        record = Batch(batch.step, [], None, [], "", batch.training, check=batch.checksum())
        arrivals: dict[int, Callable[[], Tensor]] = {}
        for source in sources:
            if source == self._rank:
                self._world.run(lambda _: self._world.tell(checksum))
            else:
                arrivals[source] = self._world.hear(source, 1)
        self._pending.append((record, arrivals))
        self.verify(_LAG)

    def verify(self, lag: int = 0) -> None:
        """Compare the checksums of all batches but the last ones.

        Args:
            lag: how many batches are left for later.

        Raises:
            RanksDiffer: another rank had another batch.
        """
        while len(self._pending) > lag:
            record, arrivals = self._pending.popleft()
            for source, wait_for_checksum in arrivals.items():
                self._world.calls.verify(source, float(wait_for_checksum()[0]), record)


def device_losses(world: World) -> DeviceLosses | None:
    """Return what exchanges losses on the devices of the ranks; None where they do not."""
    return None if world.collectives is None else DeviceLosses(world, world.collectives)


class DeviceStreamLosses:
    """Losses of the batches of a stream, as `StreamLosses`.

    All ranks exchange the losses of a batch when it is done, in the order of the batches.

    Args:
        losses: exchanges the losses of a batch.
        schedule: the schedule for one period of the stream, after which the placement repeats.
    """

    def __init__(self, losses: DeviceLosses, schedule: Schedule) -> None:
        self._losses = losses
        self._last_ranks = last_ranks_by_batch(schedule)
        self._period = schedule.batches
        # By step of a batch in flight, by rank, its micro-batches.
        self._numbers_of: dict[int, dict[int, list[int]]] = {}

    def expect(self, index: int, batch: Batch) -> None:
        """Note which ranks will have the losses of a batch. Arguments as for `StreamLosses`."""
        numbers_of = numbers_by_rank(self._last_ranks[index % self._period], batch)
        # Sorted, since all ranks must start the broadcasts in the same order.
        self._numbers_of[batch.step] = dict(sorted(numbers_of.items()))

    def tell(self, batch: Batch) -> None:
        """Do nothing: losses are sent when all ranks have launched the batch."""

    def mean(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch that is done, see `DeviceLosses.mean`."""
        return self._losses.mean(batch, self._numbers_of.pop(batch.step))

    def verify(self) -> None:
        """Compare the checksums that have not been compared, see `DeviceLosses.verify`."""
        self._losses.verify()

    def clear(self) -> None:
        """Forget all batches in flight."""
        self._numbers_of.clear()


def _loss_message(batch: Batch, numbers: Sequence[int]) -> Tensor:
    """Return dtype and losses of micro-batches as doubles on their device; see `results`.

    The second number, a checksum in messages through host memory, is not used.
    """
    losses = batch.loss_shares(numbers)
    # Filled on the device: nothing is copied there.
    code = torch.full_like(losses[:1], DTYPES.index(losses.dtype), dtype=torch.float64)
    return torch.cat([code, code, losses.double()])
