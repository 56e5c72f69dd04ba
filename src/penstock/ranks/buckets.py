"""Packing of many tensors into few messages, for gradients and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

#: Number of elements from which on a tensor is sent as it is.
_LARGE = 1 << 16
#: Most large tensors in one message; further ones are copied.
_MAX_LARGE = 24


@dataclass(frozen=True)
class Packed:
    """Tensors packed into few parts.

    Large tensors are parts of their own, since copying them takes time. The small ones are
    concatenated into flat parts.

    Attributes:
        parts: the large tensors, then the flat parts.
        large: the positions of the large tensors.
        small: the small tensors.
        count: the number of tensors.
    """

    parts: list[Tensor]
    large: list[int]
    small: list[Tensor]
    count: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Packed:
        """Pack some tensors."""
        by_size = sorted(range(len(tensors)), key=lambda i: -tensors[i].numel())
        large = sorted(i for i in by_size[:_MAX_LARGE] if tensors[i].numel() >= _LARGE)
        is_large = set(large)
        small = [tensor for i, tensor in enumerate(tensors) if i not in is_large]
        parts = [*(tensors[i].detach() for i in large), *flat(small)]
        return cls(parts, large, small, len(tensors))

    def unpacked(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Unpack the parts of other tensors of the same shapes, in the order of the tensors."""
        large: dict[int, Tensor] = dict(zip(self.large, parts[: len(self.large)], strict=True))
        small = iter(unflat(parts[len(self.large) :], self.small))
        return [large[i] if i in large else next(small) for i in range(self.count)]


def gradient_flags(tensors: Sequence[Tensor]) -> Tensor:
    """Return for each tensor 1 if it has a gradient, else 0, as uint8 on the device of the first.

    The result is shared between calls: it must not be changed.
    """
    return _flags(tuple(tensor.grad is not None for tensor in tensors), tensors[0].device)


@lru_cache(maxsize=256)
def _flags(values: tuple[bool, ...], device: torch.device) -> Tensor:
    """Return flags as a tensor. Kept, since to copy them to a device makes the host wait for it."""
    return torch.tensor(values, dtype=torch.uint8, device=device)


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate tensors into one flat tensor per dtype and device."""
    parts = []
    for group in _groups(tensors).values():
        parts.append(torch.cat([tensor.detach().reshape(-1) for tensor in group]))
    return parts


def unflat(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Split the results of `flat` into views with the shapes of the tensors `like`."""
    views: dict[int, Tensor] = {}
    for part, group in zip(parts, _groups(like).values(), strict=True):
        pieces = torch.split(part, [tensor.numel() for tensor in group])
        for tensor, piece in zip(group, pieces, strict=True):
            views[id(tensor)] = piece.reshape(tensor.shape)
    return [views[id(tensor)] for tensor in like]


def _groups(tensors: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Group tensors by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups
