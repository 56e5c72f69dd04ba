"""Saved tensors behind hooks, with autograd's check for in-place changes.

Autograd compares the version of a saved tensor with its version at saving, but not where a
saved-tensor hook is installed: what the hook returns is used unchecked. Every hook of this package
therefore records the version and checks it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from penstock.errors import RunError


class ChangedInPlace(RunError):
    """A tensor that the backward needs was changed in place after the forward had saved it."""

    def __init__(self, kind: str, version: int, expected: int, where: str = "") -> None:
        self.version, self.expected = version, expected
        super().__init__(
            f"{where}one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: {kind} is at version {version}; expected version {expected} "
            "instead. It was changed in place after the forward had saved it: use an operation "
            "that is not in place there (inplace=False), or a copy (.clone()). "
            "torch.autograd.set_detect_anomaly(True) on one device shows the operation that had "
            "saved it"
        )


@final
class SavedVersion:
    """Version counter of a tensor and its value at saving, by default without the tensor's memory.

    Args:
        tensor: the tensor that autograd saves.
        holds: keep the tensor's memory; it is then available as `tensor`.
    """

    __slots__ = ("_shape", "expected", "tensor")

    def __init__(self, tensor: Tensor, *, holds: bool) -> None:
        # Detached: the graph holds this object, and the tensor itself would hold the graph. The two
        # share a version counter.
        self.tensor = tensor.detach()
        self.expected = tensor._version
        self._shape = tensor.shape
        if not holds:
            _drop_memory(self.tensor)

    @property
    def unchanged(self) -> bool:
        """Whether the tensor still has the version at which it was saved."""
        return self.tensor._version == self.expected

    def check(self, where: str = "") -> None:
        """Raise an error if the tensor has changed since it was saved.

        Args:
            where: prefix of the message.

        Raises:
            ChangedInPlace: the version differs.
        """
        if self.tensor._version != self.expected:
            tensor_type = f"[{self.tensor.type()} {list(self._shape)}]"
            raise ChangedInPlace(tensor_type, self.tensor._version, self.expected, where)


def _drop_memory(tensor: Tensor) -> None:
    """Free the memory of a detached tensor and keep its version counter."""
    try:
        tensor.data = tensor.new_empty(0)
    except (RuntimeError, TypeError):
        return  # tensors of some layouts cannot be given other memory, and keep theirs


def unpack_checked(saved: SavedVersion) -> Tensor:
    """Return the saved tensor; for use as the unpack hook.

    Raises:
        ChangedInPlace: the tensor has changed since it was saved.
    """
    saved.check()
    return saved.tensor


@contextmanager
def observing_saved_tensors(look: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `look` for every tensor that autograd saves in this context.

    In-place changes of saved tensors raise an error, as they do without the hook.
    """

    def pack(tensor: Tensor) -> SavedVersion:
        look(tensor)
        return SavedVersion(tensor, holds=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack_checked):
        yield
