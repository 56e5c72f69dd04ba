"""Collect losses and outputs of a batch from the ranks that run the last stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.batches.batch import Batch
from penstock.ranks.world import World
from penstock.schedule.op import Schedule
from penstock.transport.payload import TensorForm

#: Types of losses; their positions are sent along with the losses.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def mean_loss(world: World, schedule: Schedule, batch: Batch) -> Tensor:
    """Return the mean loss of the batch, bitwise equal on every rank.

    The losses of micro-batches, which are shares of the mean, are summed in their order.

    Returns:
        A float32 scalar tensor on the device of the rank's stages.
    """
    last_ranks = schedule.ranks_of_stage[-1]
    if len(world.local_ranks) == world.size:
        return sum_of_local(batch)
    if len(last_ranks) > 1:
        loss_and_check: Tensor = world.broadcast(
            _gather_loss(world, schedule, batch), 0, TensorForm((2,), "float64", wants_grad=False)
        )
        world.calls.verify(0, float(loss_and_check[1]), batch)
        return _on_device(world, loss_and_check[0])
    last_rank = last_ranks[0]
    if last_rank not in world.local_ranks:
        loss, check = world.hear(last_rank, 2)().unbind()
        world.calls.verify(last_rank, check.item(), batch)
        return _on_device(world, loss)
    total = sum_of_local(batch)
    message = torch.tensor([float(total), batch.checksum()], dtype=torch.float64)
    world.run(lambda _: world.tell(message))
    return total


def sum_of_local(batch: Batch) -> Tensor:
    """Return the sum of this process's losses in the order of the micro-batches, as float32.

    It stays on the device: nothing waits for it.
    """
    return batch.loss_shares(sorted(batch.losses)).sum().float()


def _on_device(world: World, loss: Tensor) -> Tensor:
    """Return a loss that was received in host memory as a float32 tensor on this rank's device."""
    device = world.device(world.local_ranks[0])
    return loss.float() if device.type == "cpu" else loss.to(device, torch.float32)


def outputs(world: World, schedule: Schedule, batch: Batch) -> Any:
    """Return the model's output for the whole batch, on every rank."""
    last_ranks = schedule.ranks_of_stage[-1]
    _compare_batches(world, last_ranks[0], batch)
    if len(last_ranks) == 1:
        last = last_ranks[0]
        joined = world.run(lambda rank: batch.joined(batch.outputs) if rank == last else None)
        return world.broadcast(joined.get(last), last)
    return batch.joined(by_micro_batch(world, schedule, batch))


def _compare_batches(world: World, source: int, batch: Batch) -> None:
    """Compare the checksum of the batch with that of rank `source`, where there is no loss."""
    if len(world.local_ranks) == world.size:
        return
    if source in world.local_ranks:
        world.run(
            lambda _: world.tell(torch.tensor([float(batch.checksum())], dtype=torch.float64))
        )
    else:
        world.calls.verify(source, float(world.hear(source, 1)()[0]), batch)


def by_micro_batch(world: World, schedule: Schedule, batch: Batch) -> dict[int, Any]:
    """Return the model's outputs by micro-batch, on every rank."""
    outputs_by_number: dict[int, Any] = {}
    for rank, numbers in last_micro_batches(schedule, batch).items():
        is_local = rank in world.local_ranks
        local_outputs = [batch.outputs[m] for m in numbers] if is_local else None
        rank_outputs = world.broadcast(local_outputs, rank)
        outputs_by_number |= zip(numbers, rank_outputs, strict=True)
    return outputs_by_number


def micro_batches_of(schedule: Schedule, rank: int, micro_batches: int) -> list[int]:
    """Return the micro-batches whose last stage runs on `rank`."""
    return [m for m in range(micro_batches) if schedule.placement[schedule.stages - 1, m] == rank]


def last_micro_batches(schedule: Schedule, batch: Batch) -> dict[int, list[int]]:
    """Return, by rank, the micro-batches of a batch whose last stage it runs."""
    numbers_of: dict[int, list[int]] = {}
    for rank in schedule.ranks_of_stage[-1]:
        numbers = micro_batches_of(schedule, rank, len(batch.numbers))
        if numbers:
            numbers_of[rank] = numbers
    return numbers_of


def _loss_message(batch: Batch, numbers: list[int]) -> Tensor:
    """Return dtype, checksum and losses of some micro-batches as a message of doubles.

    Values of any float type are exact as doubles.
    """
    dtype = batch.losses[numbers[0]].dtype
    losses = batch.loss_shares(numbers).tolist()
    return torch.tensor([DTYPES.index(dtype), batch.checksum(), *losses], dtype=torch.float64)


def _gather_loss(world: World, schedule: Schedule, batch: Batch) -> Tensor | None:
    """Return the mean loss and the batch's checksum on rank 0, None on other ranks."""
    numbers_of = last_micro_batches(schedule, batch)
    messages: dict[int, list[Tensor]] = {}
    forms: dict[int, list[TensorForm]] = {}
    for rank, numbers in numbers_of.items():
        forms[rank] = [TensorForm((2 + len(numbers),), "float64", wants_grad=False)]
        if rank in world.local_ranks:
            messages[rank] = [_loss_message(batch, numbers)]
    gathered = world.gather(messages, forms)
    if not gathered:
        return None
    for rank in numbers_of:
        world.calls.verify(rank, float(gathered[rank][0][1]), batch)
    mean = mean_of_messages([(numbers, gathered[rank][0]) for rank, numbers in numbers_of.items()])
    return torch.tensor([float(mean), batch.checksum()], dtype=torch.float64)


def mean_of_messages(messages: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Return the mean loss of all micro-batches.

    Args:
        messages: of each rank, its micro-batches and its `_loss_message`.
    """
    dtype = DTYPES[int(messages[0][1][0])]
    losses: dict[int, Tensor] = {}
    for numbers, message in messages:
        losses |= zip(numbers, message[2:], strict=True)
    return torch.stack([losses[m].to(dtype) for m in sorted(losses)]).sum().float()


def last_ranks_by_batch(schedule: Schedule) -> list[list[int]]:
    """Return, by batch of a period and micro-batch, the rank that runs the last stage."""
    size = schedule.micro_batches
    last_ranks: list[list[int]] = []
    for first in range(0, schedule.batches * size, size):
        numbers = range(first, first + size)
        last_ranks.append([schedule.placement[schedule.stages - 1, number] for number in numbers])
    return last_ranks


def numbers_by_rank(last_ranks: Sequence[int], batch: Batch) -> dict[int, list[int]]:
    """Return, by rank, the micro-batches of a batch of a stream whose last stage it runs.

    Args:
        last_ranks: of the batch, see `last_ranks_by_batch`.
        batch: the batch.
    """
    numbers_of: dict[int, list[int]] = {}
    for number in batch.numbers:
        numbers_of.setdefault(last_ranks[number], []).append(number)
    return numbers_of


class StreamLosses:
    """Losses of the batches of a stream.

    The ranks that run the last stage send the losses as soon as they are computed; all ranks read
    them when the batch is done.

    Args:
        world: the ranks.
        schedule: the schedule for one period of the stream, after which the placement repeats.
    """

    def __init__(self, world: World, schedule: Schedule) -> None:
        self._world = world
        self._all_local = len(world.local_ranks) == world.size
        self._rank = next(iter(world.local_ranks))
        self._period = schedule.batches
        # By batch of the period and micro-batch, the rank of the last stage.
        self._last_ranks = last_ranks_by_batch(schedule)
        # By step of a batch in flight: the micro-batches whose losses this rank has to send; and
        # of each other rank its micro-batches and the function that waits for its message.
        self._to_send: dict[int, list[int]] = {}
        self._expected: dict[int, list[tuple[int, list[int], Callable[[], Tensor]]]] = {}

    def expect(self, index: int, batch: Batch) -> None:
        """Prepare to receive the losses of a batch that begins.

        Args:
            index: number of the batch in the stream.
            batch: the batch.
        """
        if self._all_local:
            return
        numbers_of = numbers_by_rank(self._last_ranks[index % self._period], batch)
        local_numbers = numbers_of.pop(self._rank, None)
        if local_numbers is not None:
            self._to_send[batch.step] = local_numbers
        self._expected[batch.step] = [
            (rank, numbers, self._world.hear(rank, 2 + len(numbers)))
            for rank, numbers in numbers_of.items()
        ]

    def tell(self, batch: Batch) -> None:
        """Send this rank's losses of a batch to all other ranks, once all are computed."""
        numbers = self._to_send.get(batch.step)
        if numbers is not None and all(number in batch.losses for number in numbers):
            del self._to_send[batch.step]
            self._world.tell(_loss_message(batch, numbers))

    def mean(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch that is done.

        Returns:
            A float32 scalar tensor on the device of this rank's stages.
        """
        if self._all_local:
            return sum_of_local(batch)
        messages: list[tuple[Sequence[int], Tensor]] = []
        for rank, numbers, wait_for_message in self._expected.pop(batch.step, ()):
            message = wait_for_message()
            self._world.calls.verify(rank, float(message[1]), batch)
            messages.append((numbers, message))
        local_numbers = sorted(batch.losses)
        if local_numbers:
            messages.append((local_numbers, _loss_message(batch, local_numbers)))
        return _on_device(self._world, mean_of_messages(messages))

    def verify(self) -> None:
        """Compare the checksums that have not been compared; here there are none."""

    def clear(self) -> None:
        """Forget all batches in flight."""
        self._to_send.clear()
        self._expected.clear()
