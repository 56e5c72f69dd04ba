"""Saved activations that can be moved to another rank and back (BPipe's evict and load).

Only the tensors that the autograd graph has saved are moved: not the weights, and not the inputs
and outputs of the stage. Source: Kim et al. 2023, BPipe (ICML).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.grad.saved_version import ChangedInPlace, SavedVersion, unpack_checked

#: Each tensor begins at a multiple of this many bytes in the moved tensor.
_ALIGN = 64


@dataclass(frozen=True)
class _Layout:
    """The layout of a saved tensor in memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """The size of the tensor's elements in bytes."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Saved:
    """The tensors that one micro-batch's graph has saved.

    The graph has only their numbers in this object, so that the tensors can be taken out.

    Attributes:
        weights: memory addresses of the stage's parameters and buffers, which stay in the graph.
    """

    weights: frozenset[int]
    _tensors: list[Tensor | None] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _numbers: dict[tuple[int, int, torch.Size, tuple[int, ...], torch.dtype], int] = field(
        default_factory=dict
    )
    _layouts: list[_Layout] = field(default_factory=list)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take over the tensors that autograd saves in a `with` block."""
        with torch.autograd.graph.saved_tensors_hooks(self._put, self._get):
            yield

    def take_out(self) -> Tensor:
        """Return the bytes of all tensors as one tensor, and drop the tensors.

        Raises:
            ChangedInPlace: a tensor has been changed since it was saved.
        """
        parts = []
        for number, tensor in enumerate(self._tensors):
            assert tensor is not None
            self._check(number, tensor)
            parts.append(_pad(_in_memory_order(tensor).view(torch.uint8)))
        self._tensors = [None] * len(self._tensors)
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def put_back(self, content: Tensor) -> None:
        """Restore the tensors from the bytes that `take_out` returned."""
        start = 0
        for number, layout in enumerate(self._layouts):
            elements = content[start : start + layout.bytes].view(layout.dtype).to(layout.device)
            tensor = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
            )
            _in_memory_order(tensor).copy_(elements)
            self._tensors[number], self._versions[number] = tensor, tensor._version
            start += -(-layout.bytes // _ALIGN) * _ALIGN

    def _put(self, tensor: Tensor) -> int | SavedVersion:
        """Pack a tensor for autograd: store it and return its number; keep weights in the graph."""
        if (
            tensor.layout is not torch.strided  # first: such tensors have no storage
            or tensor.untyped_storage().data_ptr() in self.weights
        ):
            return SavedVersion(tensor, holds=True)
        # Several nodes may save the same tensor; it is stored, and moved, once.
        key = tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tensors)
            # Detached, to avoid a reference cycle with the graph. The version counter is shared.
            self._tensors.append(tensor.detach())
            self._versions.append(tensor._version)
            # A tensor with gaps or overlaps is moved, and restored, as a contiguous one.
            dense = _dense(tensor)
            stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            self._layouts.append(_Layout(tensor.shape, tuple(stride), tensor.dtype, tensor.device))
        return number

    def _get(self, packed: int | SavedVersion) -> Tensor:
        """Unpack what `_put` returned.

        Raises:
            RuntimeError: the tensors have been taken out and not put back.
            ChangedInPlace: the tensor has been changed since it was saved.
        """
        if isinstance(packed, SavedVersion):
            return unpack_checked(packed)
        tensor = self._tensors[packed]
        if tensor is None:
            raise RuntimeError(
                "a backward asks for activations that have been evicted and not loaded"
            )
        self._check(packed, tensor)
        return tensor

    def _check(self, number: int, tensor: Tensor) -> None:
        """Check that a tensor has not been changed in place.

        Raises:
            ChangedInPlace: it has.
        """
        if tensor._version != self._versions[number]:
            kind = f"[{tensor.type()} {list(tensor.shape)}]"
            raise ChangedInPlace(kind, tensor._version, self._versions[number])


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill an interval of memory without gaps or overlaps."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a tensor as a flat view in the order of memory; if it is not dense, a flat copy."""
    if not _dense(tensor):
        return tensor.contiguous().reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _pad(content: Tensor) -> Tensor:
    """Append zeros up to a multiple of `_ALIGN` bytes."""
    padding = -content.numel() % _ALIGN
    return torch.cat([content, content.new_zeros(padding)]) if padding else content
