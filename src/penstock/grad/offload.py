"""What a graph saves for its backward, kept in host memory meanwhile, where the device has a memory
of its own.

Copies go in the device's own stream, into pinned memory: in order with what computes, and with
nobody standing for them. Weights stay where they are, and so does what is too small to be worth a
copy. A tensor that several ops save goes once. Not yet run on a GPU; on a CPU there is nothing to
be gained, and nothing moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.grad.saved import SavedVersion, unpack_checked

#: Bytes below which a tensor stays.
SMALLEST = 1 << 16


class _Away:
    """A tensor in host memory, and the device that it comes back to."""

    __slots__ = ("__weakref__", "_back", "_device", "_host", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        pinned = tensor.device.type == "cuda"
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        self._host.copy_(tensor, non_blocking=pinned)
        self._back: weakref.ref[Tensor] | None = None
        self._version = SavedVersion(tensor, holds=False)

    def back(self) -> Tensor:
        """The tensor on its device; the same one while it is still referred to.

        Raises:
            ChangedInPlace: it has changed since.
        """
        self._version.check()
        found = None if self._back is None else self._back()
        if found is None:
            found = torch.empty_like(self._host, device=self._device)
            found.copy_(self._host, non_blocking=True)
            self._back = weakref.ref(found)
        return found


def has_own_memory(tensor: Tensor) -> bool:
    """Whether a tensor is on a device with a memory of its own."""
    return tensor.device.type not in ("cpu", "meta")


@contextmanager
def offloading(
    weights: frozenset[int], moves: Callable[[Tensor], bool] = has_own_memory
) -> Iterator[None]:
    """Let what autograd saves in here wait in host memory.

    Args:
        weights: where the memory of parameters and buffers begins, which stays.
        moves: which tensors go.
    """
    gone: weakref.WeakValueDictionary[
        tuple[int, int, torch.Size, tuple[int, ...], torch.dtype], _Away
    ] = weakref.WeakValueDictionary()
    alive: list[
        Tensor
    ] = []  # an address means something only as long as its memory is not another's

    def pack(tensor: Tensor) -> SavedVersion | _Away:
        if tensor.layout is not torch.strided or tensor.nbytes < SMALLEST or not moves(tensor):
            return SavedVersion(tensor, holds=True)
        repeats = any(
            stride == 0 and extent > 1
            for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
        )
        if repeats or tensor.untyped_storage().data_ptr() in weights:
            return SavedVersion(tensor, holds=True)
        key = tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype
        found = gone.get(key)
        if found is None:
            found = gone[key] = _Away(tensor.detach())
            alive.append(tensor.detach())
        return found

    def unpack(held: SavedVersion | _Away) -> Tensor:
        return unpack_checked(held) if isinstance(held, SavedVersion) else held.back()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    alive.clear()
