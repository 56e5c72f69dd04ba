"""Checksums of tensors: of weights exactly, of batches exactly or, in the steady state, of a sample
of their numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Numbers of a tensor that the sampled checksum reads. Their places move from batch to batch.
SAMPLE = 32

#: A tensor of at most this many bytes is read whole; so the targets of a classifier are.
WHOLE_BYTES = 4096

#: A tensor of more bytes is never read whole, but in this many places more.
MOST_BYTES = 1 << 24
LARGE_SAMPLE = 1 << 14

#: Bytes of a tensor that are remembered for messages, and numbers that these show.
_GLIMPSE_BYTES, _SHOWN = 64, 4

#: Some numbers of a tensor: their type, and they.
Glimpse = tuple[torch.dtype, bytes]


def values_of(tensor: Tensor) -> Any:
    """A tensor's numbers as a NumPy array, of a type of the same size where NumPy has no such type.
    GPUs are waited for.
    """
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if plain.dtype == torch.bfloat16 or plain.element_size() == 1:
            plain = plain.view(torch.int16 if plain.element_size() == 2 else torch.uint8)
        return plain.numpy()


def checksum(tensor: Tensor) -> int | None:
    """32 bits of all numbers of a tensor, in their order; None where they cannot be read (meta,
    sparse, quantised).
    """
    try:
        return zlib.crc32(np.ascontiguousarray(values_of(tensor)).reshape(-1).view(np.uint8).data)
    except (TypeError, RuntimeError, NotImplementedError, ValueError):
        return None


def batch_checksum(tensors: Iterable[Tensor], turn: int) -> tuple[int, list[Glimpse]]:
    """32 bits of a sample of the numbers of some tensors: of small ones all, of large ones
    `SAMPLE`; and some of the numbers.

    Args:
        tensors: inputs and targets.
        turn: number of the batch, which moves the places that are read.
    """
    result = 1
    glimpses = []
    for tensor in tensors:
        content = _sampled(tensor, turn)
        result = zlib.crc32(content, result)
        glimpses.append((tensor.dtype, content[:_GLIMPSE_BYTES]))
    return result, glimpses


def whole_checksum(tensors: Iterable[Tensor]) -> int:
    """32 bits of all numbers of some tensors; of those above `MOST_BYTES` a sample of
    `LARGE_SAMPLE`.
    """
    found = 1
    for tensor in tensors:
        found = zlib.crc32(_sampled(tensor, 0, MOST_BYTES, LARGE_SAMPLE), found)
    return found


def in_words(glimpse: Glimpse) -> str:
    """The numbers that a glimpse has."""
    dtype, content = glimpse
    if len(content) < dtype.itemsize:
        return "none"
    count = min(_SHOWN, len(content) // dtype.itemsize)
    numbers = torch.frombuffer(bytearray(content), dtype=dtype, count=count).tolist()
    return ", ".join(
        f"{number:.4g}" if isinstance(number, float) else str(number) for number in numbers
    )


def _sampled(
    tensor: Tensor, turn: int, most_bytes: int = WHOLE_BYTES, sample: int = SAMPLE
) -> bytes:
    try:
        values = values_of(tensor)
    except (TypeError, RuntimeError, NotImplementedError):
        return b""  # what cannot be read is compared by its form alone
    content: bytes
    if values.nbytes <= most_bytes:
        content = values.tobytes()
        return content
    stride = values.size // sample
    start = turn * 7919 % stride
    if tensor.is_contiguous():
        content = values.ravel()[start::stride].tobytes()
    else:
        content = values.flat[start::stride].tobytes()
    return content
