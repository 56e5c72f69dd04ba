"""Ratio: add multiples of n / (√q + ε) to many tensors, with little scratch memory.

A prediction computes this before every forward, and scratch memory for all roots would be as large
as the weights. Working in chunks that fit into the cache is also slightly faster: 14 instead of 16
ms for ten million weights on one core.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor

from penstock.optim.blocks import copy

#: Elements of the scratch memory: on a CPU what fits into a core's cache, on other devices enough
#: to occupy them.
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 18, 1 << 24

#: Index of a tensor, its rows (None: all), and the scratch memory for their roots.
_Piece = tuple[int, slice | None, Tensor]


@final
class Ratio:
    """Computes the sums chunk by chunk, and remembers the division into chunks."""

    def __init__(self) -> None:
        self._rounds: dict[Hashable, list[list[_Piece]]] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def add(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        over: tuple[Sequence[Tensor], Sequence[Tensor]],
        epsilon: float,
        factor: float,
    ) -> None:
        """Add factor n / (√q + epsilon) to every tensor, in place.

        Args:
            key: identifies the shapes of the tensors; equal keys mean equal shapes.
            tensors: the tensors to add to.
            over: n and q, each with one tensor for each of `tensors`.
            epsilon: added to the root.
            factor: factor of the ratio.
        """
        numerators, squares = over
        if key not in self._rounds:
            self._rounds[key] = self._cut(squares)
        for pieces in self._rounds[key]:
            roots = [scratch for *_, scratch in pieces]
            copy(roots, _parts(pieces, squares))
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, epsilon)
            torch._foreach_addcdiv_(
                _parts(pieces, tensors), _parts(pieces, numerators), roots, value=factor
            )

    def held_bytes(self) -> int:
        """Return the bytes of the scratch memory."""
        return sum(scratch.nbytes for scratch in self._scratch.values())

    def _cut(self, tensors: Sequence[Tensor]) -> list[list[_Piece]]:
        """Divide the tensors into rounds of pieces that fit into the scratch memory together."""
        rounds: list[list[_Piece]] = []
        for (dtype, device), indices in _by_type(tensors).items():
            limit = _CPU_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS
            parts: list[tuple[int, slice | None]] = []
            for index in indices:
                parts += _slices(index, tensors[index], limit)
            rounds += self._place(tensors, parts, (dtype, device), limit)
        return [pieces for pieces in rounds if pieces]

    def _place(
        self,
        tensors: Sequence[Tensor],
        parts: Sequence[tuple[int, slice | None]],
        place: tuple[torch.dtype, torch.device],
        limit: int,
    ) -> list[list[_Piece]]:
        """Assign scratch memory to parts of one dtype and device, in as many rounds as needed."""
        views = [tensors[i] if rows is None else tensors[i][rows] for i, rows in parts]
        spans = [_span(view) for view in views]
        self._grow(*place, min(max([limit, *spans]), sum(spans)))
        scratch, used = self._scratch[place], 0
        rounds: list[list[_Piece]] = [[]]
        for (index, rows), view, span in zip(parts, views, spans, strict=True):
            if used + span > scratch.numel():
                rounds.append([])
                used = 0
            roots = scratch.as_strided(view.shape, view.stride(), used)
            rounds[-1].append((index, rows, roots))
            used += span
        return rounds

    def _grow(self, dtype: torch.dtype, device: torch.device, size: int) -> None:
        """Provide scratch memory for `size` elements; earlier pieces keep the memory they have."""
        scratch = self._scratch.get((dtype, device))
        if scratch is None or scratch.numel() < size:
            self._scratch[dtype, device] = torch.empty(size, dtype=dtype, device=device)


def _by_type(tensors: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[int]]:
    """Return the indices of the tensors, by dtype and device."""
    indices: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault((tensor.dtype, tensor.device), []).append(i)
    return indices


def _slices(index: int, tensor: Tensor, limit: int) -> list[tuple[int, slice | None]]:
    """Divide a tensor by rows into parts of at most `limit` elements, or of one row."""
    if tensor.numel() <= limit:
        return [(index, None)]
    rows = max(1, limit * len(tensor) // tensor.numel())
    return [(index, slice(first, first + rows)) for first in range(0, len(tensor), rows)]


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps)


def _parts(pieces: Sequence[_Piece], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[i] if rows is None else tensors[i][rows] for i, rows, _ in pieces]
