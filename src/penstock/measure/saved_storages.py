"""Bytes that layers save for their backwards, each storage counted once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from penstock.grad.saved_version import observing_saved_tensors
from penstock.measure.example_samples import tensors_in


@final
@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of a layer's activations.

    Attributes:
        saved: for its backward.
        entry: in addition, if a stage begins with the layer: its input.
    """

    saved: int
    entry: int


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which identifies its storage."""
    return tensor.untyped_storage().data_ptr()


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


def activation_bytes(
    modules: Sequence[nn.Module],
    value: Any,
    address: Callable[[Tensor], int] = storage_address,
    signature: Callable[[int, Any], object] | None = None,
) -> list[ActivationBytes]:
    """Return the activation bytes of every layer.

    Each storage counts at the first layer that saves it. A stage that begins with a layer also
    saves its input, unless that counts at this layer or a later one.

    Args:
        modules: the layers.
        value: input of the first layer.
        address: see `SavedStorages`.
        signature: returns what identifies a layer, given by its index, and its input; layers with
            equal ones do equal work. By default every layer runs.
    """
    saved = SavedStorages(modules, address)
    inputs: list[list[Tensor]] = []
    signatures: list[object] = []
    repeated: list[int] = []
    with observing_saved_tensors(saved.add):
        for index, module in enumerate(modules):
            if signature is not None:
                signatures.append(signature(index, value))
            if len(signatures) > 2 and signatures[-1] == signatures[-2] == signatures[-3]:
                # The input is the output of an equal layer, which itself followed an equal one: so
                # this layer saves as much as that one.
                saved.counts[index] = saved.counts[index - 1]
                repeated.append(index)
                inputs.append([])
                continue
            saved.layer = index
            inputs.append(tensors_in(value))
            value = module(value)
    entries = [saved.entry_bytes(index, row) for index, row in enumerate(inputs)]
    for index in repeated:
        entries[index] = entries[index - 1]
    return [ActivationBytes(*both) for both in zip(saved.counts, entries, strict=True)]
