"""Saved tensors behind hooks: autograd's check for changes in place goes on.

Autograd compares the version of a saved tensor with the version at saving, but not where a hook for
saved tensors stands between: what a hook returns is taken as it is. Every hook of this package
therefore notes the version and checks it itself.
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
            f"{where}one of the variables needed for gradient computation has been modified by an inplace operation: {kind} is at "
            f"version {version}; expected version {expected} instead. It was changed in place after the forward had saved it: "
            "use an operation that is not in place there (inplace=False), or a copy (.clone()). "
            "torch.autograd.set_detect_anomaly(True) on one device shows the operation that had saved it"
        )


@final
class SavedVersion:
    """The version of a tensor when it was saved, and its version counter, without the tensor's
    memory.

    Args:
        tensor: what is saved.
        holds: keep the tensor's memory, and read it by `tensor`.
    """

    __slots__ = ("_kind", "expected", "tensor")

    def __init__(self, tensor: Tensor, *, holds: bool) -> None:
        # Detached: the graph holds this object, and the tensor itself would hold the graph. The two
        # share a version counter.
        self.tensor = tensor.detach()
        self.expected = tensor._version
        self._kind = tensor.shape
        if not holds:
            _drop_memory(self.tensor)

    @property
    def unchanged(self) -> bool:
        """Whether the tensor is at the version at which it was saved."""
        return self.tensor._version == self.expected

    def check(self, where: str = "") -> None:
        """Refuse a tensor that has changed since.

        Args:
            where: begins the message.

        Raises:
            ChangedInPlace: its version is another one.
        """
        if self.tensor._version != self.expected:
            kind = f"[{self.tensor.type()} {list(self._kind)}]"
            raise ChangedInPlace(kind, self.tensor._version, self.expected, where)


def _drop_memory(tensor: Tensor) -> None:
    """Give up a detached tensor's memory and keep its version counter."""
    try:
        tensor.data = tensor.new_empty(0)
    except (RuntimeError, TypeError):
        return  # layouts whose memory cannot be exchanged keep it


def unpack_checked(saved: SavedVersion) -> Tensor:
    """The tensor, for a hook that unpacks.

    Raises:
        ChangedInPlace: it has changed since.
    """
    saved.check()
    return saved.tensor


@contextmanager
def looking_at_saved(look: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `look` for every tensor that autograd saves in here. Changes in place are refused as
    without it.
    """

    def pack(tensor: Tensor) -> SavedVersion:
        look(tensor)
        return SavedVersion(tensor, holds=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack_checked):
        yield
