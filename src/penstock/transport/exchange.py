"""Plain values between all ranks, as JSON: nothing that arrives is executed, as a pickle would be."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def all_gather(value: T, kind: type[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, by rank. All ranks call it in the same order.

    Args:
        value: this rank's: numbers, text, or dataclasses, tuples, lists and dicts of these.
        kind: its type, by which what arrives is checked.
        group: of all ranks; by default torch's default group.

    Raises:
        pydantic.ValidationError: a rank sent a value of another type.
    """
    from pydantic import TypeAdapter  # loaded here: training does without

    adapter = TypeAdapter(kind)
    text = _to_tensor(adapter.dump_json(value), group)
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


def broadcast(value: T, kind: type[T], source: int) -> T:
    """The value of rank `source`, on every rank. See `all_gather`."""
    from pydantic import TypeAdapter

    adapter = TypeAdapter(kind)
    text = _to_tensor(adapter.dump_json(value))
    length = _length(text)
    dist.broadcast(length, source)
    if dist.get_rank() != source:
        text = text.new_empty(int(length))
    dist.broadcast(text, source)
    return adapter.validate_json(_to_bytes(text))


def barrier() -> None:
    """Wait until all ranks have come here. See `begin_barrier`."""
    count = _to_tensor(b"\1")
    dist.all_reduce(count)
    count.item()  # over NCCL only the stream waits, until somebody reads


def begin_barrier() -> dist.Work | None:
    """Tell all ranks that this one has come here; the work is complete when all have.

    `dist.barrier` of a group that serves CPU and GPU may go over NCCL, where ranks that share a
    card are refused. What carries a sum is decided by the tensor's device.
    """
    work: dist.Work | None = dist.all_reduce(_to_tensor(b"\1"), async_op=True)
    return work


def _length(text: Tensor) -> Tensor:
    return torch.tensor([len(text)], dtype=torch.int64, device=text.device)


def _to_tensor(content: bytes, group: dist.ProcessGroup | None = None) -> Tensor:
    """Bytes where the ranks' backend can send them from: NCCL serves no CPU tensors."""
    serves_cpu = "cpu" in dist.get_backend_config(group)
    device = torch.device("cpu" if serves_cpu else f"cuda:{torch.cuda.current_device()}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _to_bytes(text: Tensor) -> bytes:
    return text.cpu().numpy().tobytes()
