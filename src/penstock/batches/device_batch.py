"""A batch's inputs and targets on a device: copied once each, not once per micro-batch.

A copy from pageable host memory makes the host wait for the GPU's stream, so that a copy per
micro-batch would keep the host from running ahead. Micro-batches and slices are views of the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.batches.batch import Batch
from penstock.batches.batch_parts import is_missing
from penstock.batches.splitting import cut, sample_count, token_count
from penstock.values.structure import map_tensors, tensors_of

#: Places of inputs and targets in `Batch.whole`.
INPUTS, TARGETS = 0, 1


class DeviceBatch:
    """The tensors of one batch on one device. Each is copied when the first op asks for it.

    Stages on several threads may ask at the same time.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._rows = batch.rows()
        self._parts = (batch.inputs, batch.targets or [])
        self._whole = batch.whole
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self._views: dict[int, Tensor] = {}

    def part(self, kind: int, number: int) -> Any:
        """Return the inputs or targets of one micro-batch or slice.

        Args:
            kind: `INPUTS` or `TARGETS`.
            number: number of the micro-batch or slice.
        """
        return map_tensors(lambda leaf: self.view(kind, number, leaf), self._parts[kind][number])

    def view(self, kind: int, number: int, tensor: Tensor) -> Tensor:
        """Return one tensor of a micro-batch or slice.

        Args:
            kind: `INPUTS` or `TARGETS`.
            number: number of the micro-batch or slice.
            tensor: the same tensor on the host.
        """
        if tensor.device == self._device:
            return tensor.detach()
        with self._lock:
            if id(tensor) not in self._views:
                self._cut(kind, number, tensor)
            # A tensor of its own for each caller: a stage may make it the leaf of a graph.
            return self._views[id(tensor)].detach()

    def views(self, number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a micro-batch's or slice's inputs, given those on the host."""
        return [self.view(INPUTS, number, tensor) for tensor in tensors]

    def whole(self, kind: int) -> Any:
        """Return the inputs or targets of the whole batch."""
        leaves = tensors_of(self._whole[kind])
        with self._lock:
            tensors = {id(leaf): self._copy(kind, place) for place, leaf in enumerate(leaves)}
        return map_tensors(lambda leaf: tensors[id(leaf)], self._whole[kind])

    def _cut(self, kind: int, number: int, tensor: Tensor) -> None:
        """Copy the batch's tensor that `tensor` is a part of, and make the views of all parts."""
        if self._whole[kind] is None or is_missing(self._whole[kind]):
            self._views[id(tensor)] = copy_to(tensor, self._device)
            return
        parts = self._parts[kind]
        leaves = tensors_of(parts[number])
        # By identity, since `==` compares tensors element by element.
        place = next(place for place, leaf in enumerate(leaves) if leaf is tensor)
        sizes = [sample_count(parts[row[0]], "the parts") for row in self._rows]
        for row, piece in zip(self._rows, cut(self._copy(kind, place), sizes), strict=True):
            views = [piece]
            if len(row) > 1:
                lengths = [token_count(parts[part], "the parts") for part in row]
                views = cut(piece, lengths, dim=1)
            for part, view in zip(row, views, strict=True):
                self._views[id(tensors_of(parts[part])[place])] = view

    def _copy(self, kind: int, place: int) -> Tensor:
        """Return one tensor of the whole batch, by its place among those."""
        key = kind, place
        if key not in self._tensors:
            source = tensors_of(self._whole[kind])[place]
            self._tensors[key] = copy_to(source, self._device)
        return self._tensors[key]


def device_batch(batch: Batch, device: torch.device) -> DeviceBatch:
    """Return the tensors of a batch on a device, which all stages there share."""
    copies: DeviceBatch | None = batch.device_batches.get(device)
    if copies is None:
        # Of two threads that come here at once, both get what the first has set.
        copies = batch.device_batches.setdefault(device, DeviceBatch(batch, device))
    return copies


def micro_batch_inputs(batch: Batch, number: int, device: torch.device) -> Any:
    """Return the inputs of a micro-batch or slice on a device.

    On the CPU they are not cut from a copy of the whole batch, since a transfer costs nothing.
    """
    if device.type != "cpu":
        return device_batch(batch, device).part(INPUTS, number)
    return map_tensors(lambda leaf: leaf.to(device), batch.inputs[number])


def whole_inputs(batch: Batch, device: torch.device) -> Any:
    """Return the inputs of the whole batch on a device."""
    if device.type != "cpu":
        return device_batch(batch, device).whole(INPUTS)
    return map_tensors(lambda leaf: leaf.to(device), batch.whole[INPUTS])


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the host waits for no work of that device.

    The copy to a GPU goes through pinned memory that torch's allocator keeps until it is over. The
    caller's memory is never read later, even if it is pinned: the caller may write the next batch
    into it as soon as the call returns. Not yet run on a GPU.
    """
    tensor = tensor.detach()
    if device.type != "cuda" or not tensor.is_cpu or tensor.layout is not torch.strided:
        return tensor.to(device)
    # From memory that is not pinned the host would wait for the copy.
    pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)


def to_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a tensor on a device; None if there is none."""
    return None if tensor is None else tensor.to(device)
