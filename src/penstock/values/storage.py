"""Memory of tensors: which tensors overlap, and with which strides a copy is made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

#: Bytes of memory up to which an overlap of strided tensors is decided exactly; above, tensors
#: whose address ranges overlap are assumed to overlap.
_MAX_EXACT_BYTES = 1 << 26

#: Elements of memory per element of a tensor up to which a copy keeps the gaps between elements.
_MAX_GAP_RATIO = 4

#: Alignment of the memory that torch allocates for tensors on the CPU: a cache line.
_LINE_BYTES = 64

Stride = tuple[int, ...]

#: A tensor's position in memory: shape, stride in elements, first byte, and bytes of an element.
_Span = tuple[tuple[int, ...], tuple[int, ...], int, int]


def overlapping_pairs(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of tensors, by index, that share memory. The tensors are dense and distinct
    objects.
    """
    if len(tensors) < 2:
        return ()
    by_storage: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_meta:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(index)
    # The usual case: every tensor has memory of its own.
    if len(by_storage) == len(tensors):
        return ()
    pairs: list[tuple[int, int]] = []
    for indices in by_storage.values():
        for first, second in combinations(indices, 2):
            if _overlap(tensors[first], tensors[second]):
                pairs.append((first, second))
    return tuple(pairs)


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one storage share memory."""
    first_byte = first.storage_offset() * first.itemsize
    second_byte = second.storage_offset() * second.itemsize
    origin = min(first_byte, second_byte)
    return _spans_overlap(
        (tuple(first.shape), first.stride(), first_byte - origin, first.itemsize),
        (tuple(second.shape), second.stride(), second_byte - origin, second.itemsize),
    )


@lru_cache(maxsize=1024)
def _spans_overlap(first: _Span, second: _Span) -> bool:
    """Whether two spans of one storage have a byte in common."""
    first_end, second_end = _end(first), _end(second)
    if first_end <= second[2] or second_end <= first[2]:
        return False
    nbytes = max(first_end, second_end)
    if nbytes > _MAX_EXACT_BYTES:
        return True
    return bool((_used_bytes(first, nbytes) & _used_bytes(second, nbytes)).any())


def _end(span: _Span) -> int:
    """Return the byte after a span's last one."""
    shape, stride, first_byte, itemsize = span
    return first_byte + (_last_element(shape, stride) + 1) * itemsize


def _last_element(shape: tuple[int, ...], stride: Stride) -> int:
    """Return the offset of a tensor's last element from its first, in elements of memory."""
    return sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))


def _used_bytes(span: _Span, nbytes: int) -> Tensor:
    """Return for each of `nbytes` bytes whether an element of the span uses it."""
    shape, stride, first_byte, itemsize = span
    byte_strides = [step * itemsize for step in stride]
    used = torch.zeros(nbytes, dtype=torch.bool)
    used.as_strided((*shape, itemsize), (*byte_strides, 1), first_byte).fill_(value=True)
    return used


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements with these strides fill a contiguous range of memory, each position once."""
    if 0 in shape:
        return True
    expected = 1
    for step, extent in sorted(zip(stride, shape, strict=True)):
        # A dimension of one element may have any stride.
        if extent == 1:
            continue
        if step != expected:
            return False
        expected *= extent
    return True


@lru_cache(maxsize=4096)
def copy_stride(shape: tuple[int, ...], stride: Stride) -> Stride | None:
    """Return the strides that a copy of a tensor has; None for those of a contiguous tensor.

    Gaps are kept unless the copy would take more than `_MAX_GAP_RATIO` times the memory of its
    elements; tensors whose elements overlap become contiguous.
    """
    if 0 in shape:
        return None
    if _is_contiguous(shape, stride):
        return None
    compact = [
        (abs(step), extent)
        for step, extent in zip(stride, shape, strict=True)
        if step and extent > 1
    ]
    compact.sort()
    reach = count = 1  # of the dimensions so far: elements of memory, and elements of the tensor
    for step, extent in compact:
        # Elements overlap, or the positions of two dimensions interleave.
        if step < reach:
            return None
        reach, count = step * (extent - 1) + reach, count * extent
    # A dense tensor has reach == count, so it keeps its strides.
    return stride if reach <= _MAX_GAP_RATIO * count else None


def _is_contiguous(shape: tuple[int, ...], stride: Stride) -> bool:
    """Whether the strides are those of torch's contiguous format, in every dimension."""
    expected = 1
    for step, extent in zip(reversed(stride), reversed(shape), strict=True):
        if step != expected:
            return False
        expected *= extent
    return True


def copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor with the same strides and alignment, differentiably. An expanded tensor is
    returned unchanged: torch refuses to change it in place.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    if _is_expanded(shape, stride):
        return tensor
    shift = _shift(tensor)
    if not tensor.is_contiguous():
        stride = copy_stride(shape, stride) or ()
    clone_has_strides = tensor.is_contiguous() or not stride or is_dense(shape, stride)
    if not shift and clone_has_strides:
        return tensor.clone()
    if not stride and shape:
        stride = torch.empty(shape, device="meta").stride()
    # A matrix product on the CPU may choose another kernel, which rounds differently, for memory
    # with another offset in a cache line: so the copy of a view has the offset of the view.
    elements = shift + _last_element(shape, stride) + 1
    memory = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(shape, stride, shift).copy_(tensor)


def _is_expanded(shape: tuple[int, ...], stride: Stride) -> bool:
    """Whether a tensor repeats elements, as `Tensor.expand` makes it."""
    return any(step == 0 and extent > 1 for step, extent in zip(stride, shape, strict=True))


def _shift(tensor: Tensor) -> int:
    """Return a tensor's offset in a cache line of host memory, in elements."""
    if tensor.device.type != "cpu":
        return 0
    return tensor.data_ptr() % _LINE_BYTES // tensor.itemsize
