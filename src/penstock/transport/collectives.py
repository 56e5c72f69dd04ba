"""Collective operations on plain values, as JSON: nothing that arrives is executed, unlike with
pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.transport.process_group import naming_lost_ranks

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

#: Readers and writers by type, each of which takes 10 ms to build.
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}

#: What a rank does in these functions, for messages.
_ACTION = "could not exchange values with the other ranks"


@naming_lost_ranks(_ACTION)
def all_gather(value: T, kind: type[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, by rank. All ranks call it in the same order.

    Args:
        value: of this rank: numbers, text, or dataclasses, tuples, lists and dicts of these.
        kind: its type, against which received values are validated.
        group: of all ranks; by default torch's default group.

    Raises:
        pydantic.ValidationError: a rank sent a value of another type.
    """
    adapter = _adapter(kind)
    text = _to_tensor(adapter.dump_json(value), group)
    # torch gathers tensors of one size: first the lengths, then the texts, filled up to the longest.
    lengths = [torch.zeros_like(_length(text)) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, _length(text), group)
    longest = max(int(length) for length in lengths)
    padded = torch.cat([text, text.new_zeros(longest - len(text))])
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group)
    return [
        adapter.validate_json(_to_bytes(text[: int(length)]))
        for text, length in zip(texts, lengths, strict=True)
    ]


@naming_lost_ranks(_ACTION)
def broadcast(value: T, kind: type[T], source: int) -> T:
    """Return the value of rank `source`, on every rank. See `all_gather`."""
    adapter = _adapter(kind)
    text = _to_tensor(adapter.dump_json(value))
    length = _length(text)
    dist.broadcast(length, source)
    if dist.get_rank() != source:
        text = text.new_empty(int(length))
    dist.broadcast(text, source)
    return adapter.validate_json(_to_bytes(text))


@naming_lost_ranks(_ACTION)
def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of a group have called this function. See `begin_barrier`."""
    count = _to_tensor(b"\1", group)
    dist.all_reduce(count, group=group)
    count.item()  # over NCCL only the stream waits for the sum; reading it blocks the host


def begin_barrier(group: dist.ProcessGroup | None = None) -> dist.Work | None:
    """Enter a barrier without waiting; the returned work completes when all ranks have entered.

    `dist.barrier` of a group that serves CPU and GPU may go over NCCL, which refuses ranks that
    share a GPU. With an all-reduce the tensor's device decides the backend.
    """
    work: dist.Work | None = dist.all_reduce(_to_tensor(b"\1", group), group=group, async_op=True)
    return work


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the reader and writer of a type."""
    from pydantic import TypeAdapter  # imported here, since training does not need it

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _length(text: Tensor) -> Tensor:
    """Return the number of bytes as a tensor on the same device."""
    return torch.tensor([len(text)], dtype=torch.int64, device=text.device)


def _to_tensor(content: bytes, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return bytes as a tensor that the group's backend can send: NCCL serves no CPU tensors."""
    serves_cpu = "cpu" in dist.get_backend_config(group)
    device = torch.device("cpu" if serves_cpu else f"cuda:{torch.cuda.current_device()}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _to_bytes(text: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return text.cpu().numpy().tobytes()
