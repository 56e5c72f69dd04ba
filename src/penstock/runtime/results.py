"""What a batch leaves behind, brought together from all ranks that hold the last stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.batch import Batch
from penstock.runtime.world import World
from penstock.schedule.op import Schedule
from penstock.transport.payload import TensorForm

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def mean_loss(world: World, schedule: Schedule, batch: Batch) -> Tensor:
    """The mean loss of the batch, a float tensor, the same on every rank: micro-batches' shares added up in their order."""
    holders = schedule.ranks_of_stage[-1]
    total, source = None, holders[0]
    if len(holders) == 1:
        if batch.losses:
            total = torch.stack([batch.losses[m] for m in sorted(batch.losses)]).sum().float()
    else:
        total, source = _from_copies(world, schedule, batch), 0
    result: Tensor = world.broadcast(total, source, TensorForm((), "float32", wants_grad=False))
    return result


def outputs(world: World, schedule: Schedule, batch: Batch) -> Any:
    """The model's output on the whole batch, on every rank."""
    holders = schedule.ranks_of_stage[-1]
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


def _held_by(schedule: Schedule, rank: int, micro_batches: int) -> list[int]:
    """The micro-batches whose last stage `rank` runs."""
    return [m for m in range(micro_batches) if schedule.placement[schedule.stages - 1, m] == rank]


def _numbers(batch: Batch, held: list[int]) -> Tensor:
    dtype = batch.losses[held[0]].dtype
    return torch.tensor([_DTYPES.index(dtype), *(float(batch.losses[m]) for m in held)], dtype=torch.float64)


def _from_copies(world: World, schedule: Schedule, batch: Batch) -> Tensor | None:
    """The mean loss, on rank 0."""
    own = {rank: held for rank in schedule.ranks_of_stage[-1] if (held := _held_by(schedule, rank, len(batch.numbers)))}
    # Numbers of any float type are exact as doubles; which type they are of goes with them.
    local = {rank: [_numbers(batch, held)] for rank, held in own.items() if rank in world.local_ranks}
    gathered = world.gather(local, {rank: [TensorForm((1 + len(held),), "float64", wants_grad=False)]
                                    for rank, held in own.items()})  # fmt: skip
    if not gathered:
        return None
    numbers = {m: number for rank, held in own.items() for m, number in zip(held, gathered[rank][0][1:], strict=True)}
    dtype = _DTYPES[int(gathered[min(own)][0][0])]
    return torch.stack([numbers[m].to(dtype) for m in sorted(numbers)]).sum().float()
