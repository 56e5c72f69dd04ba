"""Many tensors in few parts: what ranks send each other of gradients and weights at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Numbers from which on a tensor travels by itself, and how many of those one message takes.
_LARGE = 1 << 16
_MOST_LARGE = 24


@dataclass(frozen=True)
class Packed:
    """Tensors in few parts: the large ones as they are, since copies cost time, the small ones flat
    and in a row.
    """

    parts: list[Tensor]
    large: list[int]
    small: list[Tensor]
    count: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Packed:
        """Pack them."""
        by_size = sorted(range(len(tensors)), key=lambda i: -tensors[i].numel())
        large = sorted(i for i in by_size[:_MOST_LARGE] if tensors[i].numel() >= _LARGE)
        small = [tensor for i, tensor in enumerate(tensors) if i not in set(large)]
        return cls(
            [*(tensors[i].detach() for i in large), *flat(small)], large, small, len(tensors)
        )

    def unpacked(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Others' parts, laid out as the tensors were."""
        found: dict[int, Tensor] = dict(zip(self.large, parts[: len(self.large)], strict=True))
        rest = iter(unflat(parts[len(self.large) :], self.small))
        return [found[i] if i in found else next(rest) for i in range(self.count)]


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One flat tensor for every dtype and device among them."""
    return [
        torch.cat([tensor.detach().reshape(-1) for tensor in group])
        for group in _groups(tensors).values()
    ]


def unflat(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flat`."""
    found: dict[int, Tensor] = {}
    for whole, group in zip(parts, _groups(like).values(), strict=True):
        pieces = torch.split(whole, [tensor.numel() for tensor in group])
        found.update(
            {
                id(tensor): piece.reshape(tensor.shape)
                for tensor, piece in zip(group, pieces, strict=True)
            }
        )
    return [found[id(tensor)] for tensor in like]


def _groups(tensors: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups
