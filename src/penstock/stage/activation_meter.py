"""Measurement of the memory that a rank holds between forwards and backwards, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.grad.saved_version import observing_saved_tensors
from penstock.values.sharded import local_part


class ActivationMeter:
    """Counts the bytes of activations that the stages of one rank hold.

    The tensors that a graph saves are measured once for each form of graph; later graphs of the
    form have the same size.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._sizes: dict[str, int] = {}
        self._provisional: set[str] = set()

    @contextmanager
    def measuring(
        self,
        form: str,
        inputs: Iterable[Tensor],
        weights: frozenset[int],
        targets: Iterable[Tensor] = (),
        final: bool = True,
    ) -> Iterator[None]:
        """Measure what autograd saves in a `with` block, unless the form is known.

        Args:
            form: a name that graphs of the same shapes share.
            inputs: tensors that the rank holds in any case.
            weights: memory addresses of parameters and buffers, which are not counted.
            targets: a micro-batch's targets, which are counted only if the graph saves them.
            final: whether later graphs of this form are like this one; otherwise the next one is
                measured again.
        """
        if form in self._sizes and form not in self._provisional:
            yield
            return
        # Storages are identified by address, which is unique since all of them stay alive until
        # the end. Inputs and targets may be views, such as a micro-batch of its batch: only the
        # bytes of the view count, since the other micro-batches count the rest.
        views = {tensor.untyped_storage().data_ptr(): tensor for tensor in inputs}
        target_bytes = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in targets}
        saved: dict[int, torch.UntypedStorage] = {}

        def count(tensor: Tensor) -> None:
            """Add the storage of a saved tensor."""
            if tensor.layout is not torch.strided:
                return  # a sparse tensor has no storage to identify it by, and is not counted
            storage = local_part(tensor).untyped_storage()
            if storage.data_ptr() not in weights and storage.data_ptr() not in views:
                saved[storage.data_ptr()] = storage

        with observing_saved_tensors(count):
            yield
        self._settle(form, final)
        saved_bytes = sum(
            target_bytes.get(address, storage.nbytes()) for address, storage in saved.items()
        )
        self._sizes[form] = saved_bytes + sum(tensor.nbytes for tensor in views.values())

    def _settle(self, form: str, final: bool) -> None:
        """Note whether the size of a form is final."""
        if final:
            self._provisional.discard(form)
        else:
            self._provisional.add(form)

    def size(self, form: str) -> int:
        """Return the bytes that a graph of this form holds."""
        return self._sizes[form]

    def settled(self, form: str) -> bool:
        """Whether the size of a form is final."""
        return form in self._sizes and form not in self._provisional

    def take(self, size: int) -> None:
        """Add `size` bytes to those that are held now."""
        self.now += size
        self.peak = max(self.peak, self.now)

    def give(self, size: int) -> None:
        """Subtract `size` bytes from those that are held now."""
        self.now -= size

    def begin(self) -> None:
        """Reset the current and the peak bytes."""
        self.now = self.peak = 0


def optimizer_bytes(optimizer: Optimizer | None) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    if optimizer is None:
        return 0
    return sum(
        local_part(value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
