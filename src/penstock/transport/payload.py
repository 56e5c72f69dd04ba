"""Payload: a value that crosses a stage boundary, as leaves (tensors and constants) and the
structure in which they nest, see `penstock.values`.

Only tensors are sent with every message. The structure, constants, and the tensors' forms are sent
once before, as a JSON header, and cached. Reading a header creates no objects of user classes and
runs no code: classes in it are looked up among those that the receiver has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.values import serialize as wire
from penstock.values.constants import decode, dtype_name, dtype_of, encode, key_of
from penstock.values.storage import Stride, copy_stride, overlapping_pairs
from penstock.values.structure import Structure, check_tensor, flatten, unflatten

#: Version of the headers that `Payload.header` writes, so that ranks of two versions fail clearly.
VERSION = 2


@dataclass(frozen=True)
class TensorForm:
    """Shape, dtype and strides of a tensor, and whether it requires a gradient.

    `stride` are the strides at the receiver: the sender's own, or None for those of a contiguous
    tensor. The distinct elements are sent in the order of memory (`packed`): an expanded tensor's
    repeated elements once.
    """

    shape: tuple[int, ...]
    dtype: str
    wants_grad: bool
    stride: Stride | None = None

    @classmethod
    def of(cls, tensor: Tensor, *, wants_grad: bool) -> TensorForm:
        """Return the form of a tensor."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        receiver_stride = copy_stride(shape, stride)
        return cls(shape, dtype_name(tensor.dtype), wants_grad, receiver_stride)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a torch.dtype."""
        return dtype_of(self.dtype)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the contiguous tensor that is sent."""
        if self.stride is None:
            return self.shape
        shape, order = self._compact()
        return tuple(shape[dim] for dim in order)

    def packed(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor of this form as they are sent; a view of it where it has
        no gaps.
        """
        if self.stride is None:
            return tensor
        shape, order = self._compact()
        for dim, (extent, full_extent) in enumerate(zip(shape, self.shape, strict=True)):
            if extent != full_extent:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor.permute(order)

    def unpacked(self, packed: Tensor, *, copies: bool) -> Tensor:
        """Restore the tensor of this form from what `packed` returned.

        Args:
            packed: contiguous.
            copies: whether the result must not share the memory of `packed`; if False, it may.
        """
        if self.stride is None:
            return packed.clone() if copies else packed
        shape, order = self._compact()
        inverse_order = [order.index(dim) for dim in range(len(order))]
        compact = packed.permute(inverse_order)
        # The stride of a dimension of one element means nothing: that of a repeated one is 0.
        fits = all(
            extent == 1 or actual == expected
            for extent, actual, expected in zip(shape, compact.stride(), self.stride, strict=True)
        )
        if copies or not fits:
            memory = torch.empty_strided(
                shape, self.stride, dtype=packed.dtype, device=packed.device
            )
            compact = memory.copy_(compact)
        return compact.as_strided(self.shape, self.stride)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return an uninitialised tensor for what `packed` returns, on the CPU or another
        device.
        """
        return torch.empty(self.packed_shape, dtype=self.torch_dtype, device=device or "cpu")

    def _compact(self) -> tuple[tuple[int, ...], list[int]]:
        """Return the shape without repeated elements, and the dimensions from longest to shortest
        stride.
        """
        strides = self.stride
        assert strides is not None
        shape = tuple(
            1 if step == 0 and extent > 1 else extent
            for step, extent in zip(strides, self.shape, strict=True)
        )
        # Dimensions of one element, whose strides mean nothing, come last.
        order = sorted(
            range(len(shape)), key=lambda dim: (-strides[dim] if shape[dim] > 1 else 0, dim)
        )
        return shape, order


# Not frozen: the constructor of a frozen one takes three times as long, for every message.
@dataclass(slots=True)
class Payload:
    """A flattened value.

    Attributes:
        structure: how the leaves nest: empty for a bare tensor, `*` for a flat list, else a
            `Structure`.
        leaves: tensors and constants.
        wants_grad: for every tensor, whether a gradient is to be sent back for it.
        shared: pairs of tensors, by place among the tensors, that share memory at the sender.
    """

    structure: str | Structure
    leaves: tuple[Any, ...]
    wants_grad: tuple[bool, ...]
    shared: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, value: Any, wants_grad: tuple[bool, ...] | None = None) -> Payload:
        """Flatten `value`; by default a tensor wants a gradient if it requires one.

        Raises:
            Unflattenable: it contains something that cannot be sent; the message has the path to
                it.
        """
        # Most messages are one plain tensor, which needs no search for its parts.
        if type(value) is Tensor and value.layout is torch.strided:
            check_tensor(value)
            return cls("", (value,), (value.requires_grad,) if wants_grad is None else wants_grad)
        leaves, structure = flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        wants = (
            tuple([tensor.requires_grad for tensor in tensors])
            if wants_grad is None
            else wants_grad
        )
        bare = structure.kind == "leaf" and bool(tensors)
        return cls("" if bare else structure, tuple(leaves), wants, overlapping_pairs(tensors))

    @classmethod
    def row(cls, tensors: Sequence[Tensor]) -> Payload:
        """Return a flat list of tensors without gradients; a tensor that occurs twice is sent
        twice.
        """
        return cls("*", tuple(tensors), (False,) * len(tensors))

    @classmethod
    def flat(cls, gradients: list[Tensor | None]) -> Payload:
        """Return a list of gradients, with None where there is none; a single one as a bare tensor,
        which has the cheapest form.
        """
        if len(gradients) == 1 and gradients[0] is not None:
            return cls("", (gradients[0],), (False,))
        return cls(
            "*", tuple(gradients), tuple(False for gradient in gradients if gradient is not None)
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Payload:
        """Return the payload with its tensors replaced."""
        replacements = iter(tensors)
        leaves = tuple(
            [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        )
        return Payload(self.structure, leaves, self.wants_grad, self.shared)

    def value(self) -> Any:
        """Return the nested value."""
        if isinstance(self.structure, Structure):
            return unflatten(self.structure, self.leaves)
        return self.leaves[0] if self.structure == "" else list(self.leaves)

    def form(self) -> tuple[object, ...]:
        """Return a hashable description of all but the tensors' contents. It is made for every
        message, so it must be cheap.
        """
        leaves = tuple(
            [
                (leaf.shape, leaf.dtype, leaf.stride())
                if isinstance(leaf, Tensor)
                else key_of(leaf)
                for leaf in self.leaves
            ]
        )
        return self.structure, leaves, self.wants_grad, self.shared

    def forms(self) -> list[TensorForm]:
        """Return the tensors' forms, in order."""
        return [
            TensorForm.of(tensor, wants_grad=wants)
            for tensor, wants in zip(self.tensors, self.wants_grad, strict=True)
        ]

    def header(self) -> str:
        """Return all but the tensors' contents as JSON.

        Raises:
            RunError: a constant is of a kind that cannot be sent between processes.
        """
        forms = iter(self.forms())
        described = [
            vars(next(forms)) if isinstance(leaf, Tensor) else {"constant": encode(leaf)}
            for leaf in self.leaves
        ]
        structure = self.structure if isinstance(self.structure, str) else wire.dump(self.structure)
        return json.dumps(
            {
                "version": VERSION,
                "structure": structure,
                "leaves": described,
                "shared": self.shared,
            }
        )


def _leaf_from_json(leaf: dict[str, Any]) -> Any:
    """Read a leaf of a header: a constant, or a tensor's form."""
    if "constant" in leaf:
        return decode(leaf["constant"])
    stride = None if leaf["stride"] is None else tuple(map(int, leaf["stride"]))
    shape = tuple(map(int, leaf["shape"]))
    form = TensorForm(shape, str(leaf["dtype"]), bool(leaf["wants_grad"]), stride)
    dtype_of(form.dtype)
    return form


@dataclass(frozen=True)
class Header:
    """The description of a payload, which arrives before its tensors."""

    structure: str | Structure
    leaves: tuple[Any, ...]
    shared: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Header:
        """Read what `Payload.header` wrote.

        Raises:
            RunError: it is of another version of Penstock, or this process does not have a class
            that it names.
        """
        fields = json.loads(text)
        if fields.get("version") != VERSION:
            raise RunError(
                f"a message from another rank is of version {fields.get('version')} and not "
                f"{VERSION}: all ranks need the same version of Penstock"
            )
        structure = fields["structure"]
        if structure not in ("", "*"):
            structure = wire.parse(structure)
        leaves = tuple([_leaf_from_json(leaf) for leaf in fields["leaves"]])
        return cls(structure, leaves, tuple((int(a), int(b)) for a, b in fields["shared"]))

    @property
    def forms(self) -> list[TensorForm]:
        """The tensors' forms, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def filled(self, tensors: list[Tensor]) -> Payload:
        """Return the payload with the tensors that have arrived."""
        arrived = iter(tensors)
        leaves = tuple(
            [next(arrived) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        )
        wants = tuple([form.wants_grad for form in self.forms])
        return Payload(self.structure, leaves, wants, self.shared)

    def unpacked(self, packed: Sequence[Tensor], *, copies: bool = False) -> Payload:
        """Return the payload from the tensors as they were sent, see `TensorForm.unpacked`."""
        tensors = [
            form.unpacked(tensor, copies=copies)
            for form, tensor in zip(self.forms, packed, strict=True)
        ]
        return self.filled(tensors)
