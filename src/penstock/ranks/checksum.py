"""Checksums (CRC-32) of tensors.

Weights are read whole. Batches are read whole when ranks are about to be compared, and by a sample
of their numbers in the steady state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Numbers per tensor that the sampled checksum reads. Their positions change from batch to batch.
SAMPLE = 32

#: Up to this many bytes the sampled checksum reads a tensor whole, such as a classifier's targets.
WHOLE_BYTES = 4096

#: Above this many bytes even `whole_checksum` reads a sample, of `LARGE_SAMPLE` numbers.
MOST_BYTES = 1 << 24
LARGE_SAMPLE = 1 << 14

#: Bytes of each tensor that are stored for messages.
_GLIMPSE_BYTES = 64
#: Numbers of each tensor that a message prints.
_NUMBERS_IN_MESSAGE = 4

#: The first sampled numbers of a tensor: their dtype and bytes.
Glimpse = tuple[torch.dtype, bytes]


def values_of(tensor: Tensor) -> Any:
    """Return a tensor's numbers as a NumPy array; waits for the device.

    Dtypes that NumPy does not have are viewed as integers of the same size.
    """
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        # On a device, conjugated lazily, or of a dtype that NumPy does not have.
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if plain.dtype == torch.bfloat16 or plain.element_size() == 1:
            plain = plain.view(torch.int16 if plain.element_size() == 2 else torch.uint8)
        return plain.numpy()


def checksum(tensor: Tensor) -> int | None:
    """Return the CRC-32 of all numbers of a tensor, in order.

    Returns:
        None for tensors that cannot be read: meta, sparse and quantised ones.
    """
    try:
        return zlib.crc32(np.ascontiguousarray(values_of(tensor)).reshape(-1).view(np.uint8).data)
    except (TypeError, RuntimeError, NotImplementedError, ValueError):
        return None


def batch_checksum(tensors: Iterable[Tensor], turn: int) -> tuple[int, list[Glimpse]]:
    """Return the CRC-32 of a sample of a batch, and a glimpse of each tensor.

    Tensors of up to `WHOLE_BYTES` bytes are read whole, of larger ones `SAMPLE` numbers.

    Args:
        tensors: inputs and targets.
        turn: number of the batch, which shifts the sampled positions.
    """
    crc = 1
    glimpses = []
    for tensor in tensors:
        content = _sample(tensor, turn)
        crc = zlib.crc32(content, crc)
        glimpses.append((tensor.dtype, content[:_GLIMPSE_BYTES]))
    return crc, glimpses


def whole_checksum(tensors: Iterable[Tensor]) -> int:
    """Return the CRC-32 of all numbers of some tensors.

    Of tensors above `MOST_BYTES` only `LARGE_SAMPLE` numbers are read.
    """
    crc = 1
    for tensor in tensors:
        crc = zlib.crc32(_sample(tensor, 0, MOST_BYTES, LARGE_SAMPLE), crc)
    return crc


def format_numbers(glimpse: Glimpse) -> str:
    """Format the first numbers of a glimpse for a message."""
    dtype, content = glimpse
    if len(content) < dtype.itemsize:
        return "none"
    count = min(_NUMBERS_IN_MESSAGE, len(content) // dtype.itemsize)
    numbers = torch.frombuffer(bytearray(content), dtype=dtype, count=count).tolist()
    texts = [f"{number:.4g}" if isinstance(number, float) else str(number) for number in numbers]
    return ", ".join(texts)


def _sample(
    tensor: Tensor, turn: int, whole_bytes: int = WHOLE_BYTES, sample: int = SAMPLE
) -> bytes:
    """Return the bytes of a tensor, or of evenly spaced numbers of one above `whole_bytes`."""
    try:
        values = values_of(tensor)
    except (TypeError, RuntimeError, NotImplementedError):
        return b""  # unreadable tensors are compared by shape and dtype alone
    content: bytes
    if values.nbytes <= whole_bytes:
        content = values.tobytes()
        return content
    stride = values.size // sample
    # A prime step, so that successive batches read different positions.
    start = turn * 7919 % stride
    if tensor.is_contiguous():
        content = values.ravel()[start::stride].tobytes()
    else:
        content = values.flat[start::stride].tobytes()
    return content
