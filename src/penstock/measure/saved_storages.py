"""Bytes that layers save for their backwards, each storage counted once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class SavedStorages:
    """Counts storages at the first layer that saves them for its backward.

    Args:
        modules: the layers. Their parameters and buffers do not count.
        address: returns what identifies the storage of a tensor.

    Attributes:
        layer: the layer that runs; set before each.
        counts: bytes saved, by layer.
    """

    def __init__(self, modules: Sequence[nn.Module], address: Callable[[Tensor], int]) -> None:
        self.layer = 0
        self.counts = [0] * len(modules)
        self._address = address
        self._layer_of: dict[int, int] = {}
        # All are kept alive until the end: the address of a freed one would be reused.
        self._storages: dict[int, object] = {}
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._storages[address(tensor)] = tensor.untyped_storage()

    def add(self, tensor: Tensor) -> None:
        """Count a saved tensor's storage, unless an earlier layer saved it."""
        address = self._address(tensor)
        if address in self._storages:
            return
        storage = tensor.untyped_storage()
        self._storages[address] = storage
        self._layer_of[address] = self.layer
        self.counts[self.layer] += storage.nbytes()

    def entry_bytes(self, layer: int, inputs: Sequence[Tensor]) -> int:
        """Return the bytes of a layer's inputs that a stage which begins with it saves in addition.

        Inputs that this layer or a later one saves have been counted there.
        """
        return sum(
            tensor.nbytes
            for tensor in inputs
            if self._layer_of.get(self._address(tensor), -1) < layer
        )
