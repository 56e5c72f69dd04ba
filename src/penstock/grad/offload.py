"""Activation offload: tensors that autograd saves for the backward wait in host memory.

Only for devices with memory of their own. Copies go through pinned memory in the device's current
stream, so they are ordered with the computation and need no further synchronisation. Weights stay
on the device, and so do tensors too small to be worth a copy. A tensor that several ops save is
copied once. Not yet run on a GPU; on a CPU offloading gains nothing and nothing moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.grad.saved_version import SavedVersion, unpack_checked

#: Smallest tensor that is moved, in bytes.
SMALLEST = 1 << 16


class _Offloaded:
    """A tensor in host memory that can be copied back to its device."""

    __slots__ = ("__weakref__", "_device", "_host", "_on_device", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        pinned = tensor.device.type == "cuda"
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        # In the order of the device's stream: what later ops write into the tensor is not copied.
        self._host.copy_(tensor, non_blocking=pinned)
        self._on_device: weakref.ref[Tensor] | None = None
        self._version = SavedVersion(tensor, holds=False)

    def fetch(self) -> Tensor:
        """Return the tensor on its device; the same object while it is still referenced.

        Raises:
            ChangedInPlace: the tensor has changed since it was saved.
        """
        self._version.check()
        tensor = None if self._on_device is None else self._on_device()
        if tensor is None:
            tensor = torch.empty_like(self._host, device=self._device)
            tensor.copy_(self._host, non_blocking=True)
            self._on_device = weakref.ref(tensor)
        return tensor


def has_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is on a device with memory of its own."""
    return tensor.device.type not in ("cpu", "meta")


def _is_worth_a_copy(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and large, and its copy not larger than it is."""
    if tensor.layout is not torch.strided or tensor.nbytes < SMALLEST:
        return False
    # The elements of an expanded tensor share memory, those of a copy do not.
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return not any(stride == 0 and extent > 1 for stride, extent in strides)


@contextmanager
def offloading(
    weights: frozenset[int],
    moves: Callable[[Tensor], bool] = has_own_memory,
    share: float = 1.0,
) -> Iterator[None]:
    """Move tensors that autograd saves in this context to host memory.

    Args:
        weights: start addresses of the memory of parameters and buffers, which stays.
        moves: which tensors are moved.
        share: of the bytes of those tensors, how much is moved at most, above 0 and up to 1. Moved
            tensors are spread evenly over the forward, so that copies and computation alternate.
    """
    offloaded: weakref.WeakValueDictionary[
        tuple[int, int, torch.Size, tuple[int, ...], torch.dtype], _Offloaded
    ] = weakref.WeakValueDictionary()
    # Keeps the memory of offloaded tensors allocated in this context, so that an address in
    # `offloaded` cannot be reused by another tensor.
    alive: list[Tensor] = []
    # Bytes of the tensors so far, and of those that were moved.
    total_bytes = moved_bytes = 0

    def pack(tensor: Tensor) -> SavedVersion | _Offloaded:
        """Move a saved tensor to host memory if it is worth it and within the share."""
        nonlocal total_bytes, moved_bytes
        if not _is_worth_a_copy(tensor) or not moves(tensor):
            return SavedVersion(tensor, holds=True)
        if tensor.untyped_storage().data_ptr() in weights:
            return SavedVersion(tensor, holds=True)
        key = tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype
        copy = offloaded.get(key)
        if copy is None:
            total_bytes += tensor.nbytes
            if moved_bytes + tensor.nbytes > share * total_bytes:
                return SavedVersion(tensor, holds=True)
            moved_bytes += tensor.nbytes
            copy = offloaded[key] = _Offloaded(tensor.detach())
            alive.append(tensor.detach())
        return copy

    def unpack(saved: SavedVersion | _Offloaded) -> Tensor:
        return unpack_checked(saved) if isinstance(saved, SavedVersion) else saved.fetch()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    alive.clear()
