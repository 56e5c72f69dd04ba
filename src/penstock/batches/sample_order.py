"""The order of an epoch's samples, which all processes compute alike."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import torch


def sample_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return a permutation of the samples for a seed and an epoch."""
    # Hashed, not added: with seed + epoch, epoch 1 of seed 0 would be epoch 0 of seed 1, and the
    # seeds of a study would share all but one of their orders. Four bytes, because torch's CPU
    # generator uses no more of a seed.
    digest = hashlib.sha256(f"{int(seed)} {int(epoch)}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.randperm(samples, generator=generator, device="cpu")


def order_checksum(indices: Sequence[int]) -> int:
    """Return a checksum of the numbers of a batch's samples in their data set."""
    return zlib.crc32(",".join(map(str, indices)).encode())
