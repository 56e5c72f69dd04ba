"""What a rank really holds between forwards and backwards, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.grad.saved import looking_at_saved


class Held:
    """Counts the activations that the stages of one rank keep.

    What a graph has saved is looked at once for every form that it comes in; from then on its size
    is known.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._sizes: dict[str, int] = {}
        self._provisional: set[str] = set()

    @contextmanager
    def looking(
        self,
        form: str,
        given: Iterable[Tensor],
        weights: frozenset[int],
        targets: Iterable[Tensor] = (),
        final: bool = True,
    ) -> Iterator[None]:
        """Count what autograd saves in here, if the form is new.

        Args:
            form: a name that graphs of the same shapes share.
            given: tensors that are kept in any case.
            weights: where the memory of parameters and buffers begins, which are not counted.
            targets: tensors that count only if they are kept; a micro-batch of them.
            final: whether the next graph of this form will be like this one; else that one is
            looked at again.
        """
        if form in self._sizes and form not in self._provisional:
            yield
            return
        # Storages are told apart by address: all that were met stay alive meanwhile. What is given
        # may be a view, such as a
        # micro-batch of its batch: the rest of its storage is other micro-batches', which count it
        # themselves.
        views = {tensor.untyped_storage().data_ptr(): tensor for tensor in given}
        parts = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in targets}
        met: dict[int, torch.UntypedStorage] = {}

        def count(tensor: Tensor) -> None:
            if tensor.layout is not torch.strided:
                return  # a sparse tensor has no storage to be told by, and does not count
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and storage.data_ptr() not in views:
                met[storage.data_ptr()] = storage

        with looking_at_saved(count):
            yield
        (self._provisional.discard if final else self._provisional.add)(form)
        kept = sum(parts.get(start, storage.nbytes()) for start, storage in met.items())
        self._sizes[form] = kept + sum(tensor.nbytes for tensor in views.values())

    def size(self, form: str) -> int:
        """Bytes that a graph of this form keeps."""
        return self._sizes[form]

    def settled(self, form: str) -> bool:
        """Whether that is known for good."""
        return form in self._sizes and form not in self._provisional

    def take(self, size: int) -> None:
        """So many bytes more."""
        self.now += size
        self.peak = max(self.peak, self.now)

    def give(self, size: int) -> None:
        """So many bytes less."""
        self.now -= size

    def begin(self) -> None:
        """Nothing is held, and none has been."""
        self.now = self.peak = 0


def optimizer_bytes(optimizer: Optimizer | None) -> int:
    """Bytes of the tensors that an optimizer keeps."""
    kept = (
        (value for state in optimizer.state.values() for value in state.values())
        if optimizer is not None
        else ()
    )
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))
