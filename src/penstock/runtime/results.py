"""What a batch leaves behind, brought together from all ranks that hold the last stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.batch import Batch
from penstock.runtime.world import World
from penstock.schedule.op import Schedule
from penstock.transport.payload import TensorForm

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def mean_loss(world: World, schedule: Schedule, batch: Batch) -> Tensor:
    """The mean loss of the batch, the same on every rank: micro-batches' shares added up in their
    order.

    Returns:
        A float32 tensor without dimensions, on every rank on the device of its stages.
    """
    holders = schedule.ranks_of_stage[-1]
    if len(holders) > 1:
        found: Tensor = world.broadcast(
            _from_copies(world, schedule, batch), 0, TensorForm((2,), "float64", wants_grad=False)
        )
        world.calls.verify(0, float(found[1]), batch)
        return _on_device(world, found[0])
    if holders[0] not in world.local_ranks:
        numbers = world.hear(holders[0], 2)()
        world.calls.verify(holders[0], float(numbers[1]), batch)
        return _on_device(world, numbers[0])
    total = torch.stack([batch.losses[m] for m in sorted(batch.losses)]).sum().float()
    if len(world.local_ranks) < world.size:
        numbers = torch.tensor([float(total), batch.checksum()], dtype=torch.float64)
        world.run(lambda _: world.tell(numbers))
    return total


def _on_device(world: World, loss: Tensor) -> Tensor:
    """A loss that came through host memory, as the rank that made it has it."""
    device = world.device(world.local_ranks[0])
    return loss.float() if device.type == "cpu" else loss.to(device, torch.float32)


def outputs(world: World, schedule: Schedule, batch: Batch) -> Any:
    """The model's output on the whole batch, on every rank."""
    holders = schedule.ranks_of_stage[-1]
    _compare_batches(world, holders[0], batch)
    if len(holders) == 1:
        last = holders[0]
        joined = world.run(lambda rank: batch.joined(batch.outputs) if rank == last else None)
        return world.broadcast(joined.get(last), last)
    found: dict[int, Any] = {}
    for holder in holders:
        own = _held_by(schedule, holder, len(batch.numbers))
        if own:
            here = [batch.outputs[m] for m in own] if holder in world.local_ranks else None
            found |= zip(own, world.broadcast(here, holder), strict=True)
    return batch.joined(found)


def _compare_batches(world: World, source: int, batch: Batch) -> None:
    """Compare the batch with that of one rank, where no loss goes with it."""
    if len(world.local_ranks) == world.size:
        return
    if source in world.local_ranks:
        world.run(
            lambda _: world.tell(torch.tensor([float(batch.checksum())], dtype=torch.float64))
        )
    else:
        world.calls.verify(source, float(world.hear(source, 1)()[0]), batch)


def by_micro_batch(world: World, schedule: Schedule, batch: Batch) -> dict[int, Any]:
    """The model's outputs by micro-batch, on every rank, of a batch that has kept them."""
    found: dict[int, Any] = {}
    for holder in schedule.ranks_of_stage[-1]:
        own = _held_by(schedule, holder, len(batch.numbers))
        if own:
            here = [batch.outputs[m] for m in own] if holder in world.local_ranks else None
            found |= zip(own, world.broadcast(here, holder), strict=True)
    return found


def _held_by(schedule: Schedule, rank: int, micro_batches: int) -> list[int]:
    """The micro-batches whose last stage `rank` runs."""
    return [m for m in range(micro_batches) if schedule.placement[schedule.stages - 1, m] == rank]


def _numbers(batch: Batch, held: list[int]) -> Tensor:
    dtype = batch.losses[held[0]].dtype
    losses = [float(batch.losses[m]) for m in held]
    return torch.tensor([_DTYPES.index(dtype), batch.checksum(), *losses], dtype=torch.float64)


def _from_copies(world: World, schedule: Schedule, batch: Batch) -> Tensor | None:
    """The mean loss and the batch's checksum, on rank 0."""
    own = {
        rank: held
        for rank in schedule.ranks_of_stage[-1]
        if (held := _held_by(schedule, rank, len(batch.numbers)))
    }
    # Numbers of any float type are exact as doubles; which type they are of goes with them.
    local = {
        rank: [_numbers(batch, held)] for rank, held in own.items() if rank in world.local_ranks
    }
    gathered = world.gather(
        local,
        {
            rank: [TensorForm((2 + len(held),), "float64", wants_grad=False)]
            for rank, held in own.items()
        },
    )
    if not gathered:
        return None
    parts = [(held, gathered[rank][0]) for rank, held in own.items()]
    for rank, (_, row) in zip(own, parts, strict=True):
        world.calls.verify(rank, float(row[1]), batch)
    return torch.tensor([float(_mean(parts)), batch.checksum()], dtype=torch.float64)


def _mean(parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """The mean loss of some ranks' micro-batches, from their `_numbers`."""
    dtype = _DTYPES[int(parts[0][1][0])]
    numbers = {m: number for held, row in parts for m, number in zip(held, row[2:], strict=True)}
    return torch.stack([numbers[m].to(dtype) for m in sorted(numbers)]).sum().float()


class StreamLosses:
    """Losses of a stream's batches: told by the ranks that hold the last stage as soon as they are
    there, asked for later.

    Args:
        world: the ranks.
        schedule: as many batches of the stream as it takes to come back to the same ranks.
    """

    def __init__(self, world: World, schedule: Schedule) -> None:
        self._world = world
        self._here = len(world.local_ranks) == world.size
        self._own = next(iter(world.local_ranks))
        self._period, size = schedule.batches, schedule.micro_batches
        self._homes = [
            [schedule.placement[schedule.stages - 1, index * size + m] for m in range(size)]
            for index in range(schedule.batches)
        ]
        self._to_tell: dict[int, list[int]] = {}
        self._heard: dict[int, list[tuple[int, list[int], Callable[[], Tensor]]]] = {}

    def expect(self, index: int, batch: Batch) -> None:
        """A batch begins."""
        if self._here:
            return
        held: dict[int, list[int]] = {}
        for m in batch.numbers:
            held.setdefault(self._homes[index % self._period][m], []).append(m)
        own = held.pop(self._own, None)
        if own is not None:
            self._to_tell[batch.step] = own
        self._heard[batch.step] = [
            (rank, numbers, self._world.hear(rank, 2 + len(numbers)))
            for rank, numbers in held.items()
        ]

    def tell(self, batch: Batch) -> None:
        """Let the others hear of a batch's losses when all of this rank are there."""
        own = self._to_tell.get(batch.step)
        if own is not None and all(m in batch.losses for m in own):
            del self._to_tell[batch.step]
            self._world.tell(_numbers(batch, own))

    def mean(self, batch: Batch) -> Tensor:
        """The mean loss of a batch that is done, a float32 tensor on the device of this rank's
        stages.
        """
        parts = []
        for rank, numbers, heard in self._heard.pop(batch.step, ()):
            row = heard()
            self._world.calls.verify(rank, float(row[1]), batch)
            parts.append((numbers, row))
        own = sorted(batch.losses)
        total = _mean([*parts, (own, _numbers(batch, own))] if own else parts)
        return _on_device(self._world, total)

    def clear(self) -> None:
        """Nothing is expected any more."""
        self._to_tell.clear()
        self._heard.clear()
