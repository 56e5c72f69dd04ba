"""What a forward keeps for its backward, made so that it can leave the rank and come back (BPipe's
evict and load).

Only what the graph has saved goes: not weights, which stay, nor what the stage has been given or
has passed on. Source: Kim et al. 2023, BPipe (ICML).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.grad.saved import ChangedInPlace, SavedVersion, unpack_checked

_ALIGN = 64


@dataclass(frozen=True)
class _Form:
    """How a tensor lay in memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Saved:
    """The tensors that one micro-batch's graph has saved. The graph holds their numbers, this holds
    them.
    """

    weights: frozenset[int]
    _tensors: list[Tensor | None] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _numbers: dict[tuple[int, int, torch.Size, tuple[int, ...], torch.dtype], int] = field(
        default_factory=dict
    )
    _forms: list[_Form] = field(default_factory=list)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves in here is held by this."""
        with torch.autograd.graph.saved_tensors_hooks(self._put, self._get):
            yield

    def take_out(self) -> Tensor:
        """All bytes in one tensor; nothing is held any more."""
        parts = []
        for number, tensor in enumerate(self._tensors):
            assert tensor is not None
            self._check(number, tensor)
            parts.append(_padded(_in_memory_order(tensor).view(torch.uint8)))
        self._tensors = [None] * len(self._tensors)
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def put_back(self, content: Tensor) -> None:
        """What `take_out` returned."""
        start = 0
        for number, form in enumerate(self._forms):
            found = content[start : start + form.bytes].view(form.dtype).to(form.device)
            tensor = torch.empty_strided(
                form.shape, form.stride, dtype=form.dtype, device=form.device
            )
            _in_memory_order(tensor).copy_(found)
            self._tensors[number], self._versions[number] = tensor, tensor._version
            start += -(-form.bytes // _ALIGN) * _ALIGN

    def _put(self, tensor: Tensor) -> int | SavedVersion:
        if (
            tensor.untyped_storage().data_ptr() in self.weights
            or tensor.layout is not torch.strided
        ):
            return SavedVersion(tensor, holds=True)
        key = tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tensors)
            # Detached: the graph holds this object, and must not be held by it. It still counts
            # changes in place.
            self._tensors.append(tensor.detach())
            self._versions.append(tensor._version)
            dense = _dense(tensor)
            stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            self._forms.append(_Form(tensor.shape, tuple(stride), tensor.dtype, tensor.device))
        return number

    def _get(self, held: int | SavedVersion) -> Tensor:
        if isinstance(held, SavedVersion):
            return unpack_checked(held)
        tensor = self._tensors[held]
        if tensor is None:
            raise RuntimeError(
                "a backward asks for activations that have been evicted and not loaded"
            )
        self._check(held, tensor)
        return tensor

    def _check(self, number: int, tensor: Tensor) -> None:
        if tensor._version != self._versions[number]:
            kind = f"[{tensor.type()} {list(tensor.shape)}]"
            raise ChangedInPlace(kind, tensor._version, self._versions[number])


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once."""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A flat view in the order of memory; of a tensor with gaps or overlaps, a flat copy."""
    if not _dense(tensor):
        return tensor.contiguous().reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _padded(content: Tensor) -> Tensor:
    """With zeros up to a multiple of what tensors are aligned to."""
    missing = -content.numel() % _ALIGN
    return torch.cat([content, content.new_zeros(missing)]) if missing else content
