"""Which tensors lie in the same memory, and how a tensor lies in its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

#: Elements of memory up to which an overlap of strided tensors is decided exactly; above, tensors
#: whose ranges meet are taken to overlap.
_MOST_EXACT = 1 << 26

#: Elements of memory for each element of a tensor, up to which a copy keeps the gaps between them.
_MOST_GAPS = 4

#: Where torch lets the memory of a tensor on the CPU begin: at a multiple of this.
_LINE_BYTES = 64

Stride = tuple[int, ...]

#: Shape, stride, first element and bytes of an element.
_Place = tuple[tuple[int, ...], tuple[int, ...], int, int]


def overlapping(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Pairs of places of tensors that have memory in common. The tensors are dense and all
    different objects.
    """
    if len(tensors) < 2:
        return ()
    starts: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_meta:
            starts.setdefault(tensor.untyped_storage().data_ptr(), []).append(place)
    if len(starts) == len(tensors):
        return ()
    return tuple(
        pair
        for places in starts.values()
        if len(places) > 1
        for pair in combinations(places, 2)
        if _overlap(tensors[pair[0]], tensors[pair[1]])
    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    first = min(one.storage_offset() * one.itemsize, other.storage_offset() * other.itemsize)
    places = [
        (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset() * tensor.itemsize - first,
            tensor.itemsize,
        )
        for tensor in (one, other)
    ]
    return _meet(places[0], places[1])


@lru_cache(maxsize=1024)
def _meet(one: _Place, other: _Place) -> bool:
    """Whether two tensors of one memory meet in it; `first` is in bytes here."""
    ends = [_end(place) for place in (one, other)]
    if ends[0] <= other[2] or ends[1] <= one[2]:
        return False
    if max(ends) > _MOST_EXACT:
        return True
    memory = torch.zeros(max(ends), dtype=torch.bool)
    _mark(memory, one, value=True)
    counted = torch.zeros(max(ends), dtype=torch.bool)
    _mark(counted, other, value=True)
    return bool((memory & counted).any())


def _end(place: _Place) -> int:
    """The byte after the last one."""
    shape, stride, first, itemsize = place
    last = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    return first + (last + 1) * itemsize


def _mark(memory: Tensor, place: _Place, *, value: bool) -> None:
    shape, stride, first, itemsize = place
    steps = [step * itemsize for step in stride]
    memory.as_strided((*shape, itemsize), (*steps, 1), first).fill_(value)


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements of these strides fill a stretch of memory, each once."""
    if 0 in shape:
        return True
    expected = 1
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if extent == 1:
            continue
        if step != expected:
            return False
        expected *= extent
    return True


@lru_cache(maxsize=4096)
def kept_stride(shape: tuple[int, ...], stride: Stride) -> Stride | None:
    """The strides that a copy of a tensor has; None for those of a contiguous one.

    Gaps are kept where they are not much larger than what they lie between; tensors whose elements
    overlap become contiguous.
    """
    if 0 in shape:
        return None
    expected, contiguous = 1, True
    for step, extent in zip(reversed(stride), reversed(shape), strict=True):
        contiguous = contiguous and step == expected
        expected *= extent
    if contiguous:
        return None
    compact = [
        (abs(step), extent)
        for step, extent in zip(stride, shape, strict=True)
        if step and extent > 1
    ]
    if is_dense(tuple(extent for _, extent in compact), tuple(step for step, _ in compact)):
        return stride
    reach = count = 1
    for step, extent in sorted(compact):
        if step < reach:
            return None
        reach, count = step * (extent - 1) + reach, count * extent
    return stride if reach <= _MOST_GAPS * count else None


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment, differentiable. One that repeats its elements is
    returned as it is: torch lets no one change it in place.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    if any(step == 0 and extent > 1 for step, extent in zip(stride, shape, strict=True)):
        return tensor
    shift = _shift(tensor)
    stride = stride if tensor.is_contiguous() else kept_stride(shape, stride) or ()
    if not shift and (tensor.is_contiguous() or not stride or is_dense(shape, stride)):
        return tensor.clone()
    if not stride and shape:
        stride = torch.empty(shape, device="meta").stride()
    # A matrix product of the CPU may choose another kernel for memory that begins elsewhere in a
    # line
    # of the cache, which rounds differently: the copy of a view begins where the view does.
    extent = 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    memory = torch.empty(shift + extent, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(shape, stride, shift).copy_(tensor)


def _shift(tensor: Tensor) -> int:
    """Elements between the beginning of a line of the cache and that of a tensor in host memory."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return 0
    return tensor.data_ptr() % _LINE_BYTES // tensor.itemsize
