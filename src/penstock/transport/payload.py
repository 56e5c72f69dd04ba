"""What crosses a boundary: leaves (tensors and constants) and how they nest, see `penstock.values`.

Only tensors travel. The structure, constants, the tensors' forms and which of them want a gradient
go ahead once, as JSON, and are
remembered. Reading that makes nothing and runs nothing: classes in it are looked up among those
that the receiver has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.values import wire
from penstock.values.constants import decode, dtype_of, encode, key_of
from penstock.values.memory import Stride, kept_stride, overlapping
from penstock.values.structure import Structure, check_tensor, flatten, unflatten

#: Of what `Payload.header` writes. Ranks of two versions say so instead of misreading each other.
VERSION = 2


@dataclass(frozen=True)
class TensorForm:
    """Shape, dtype and strides of a tensor, and whether it wants a gradient.

    Strides are those that it has at the receiver: the sender's own, or None for those of a
    contiguous tensor. What travels are the
    elements in the order of memory, once each (`packed`): of an expanded tensor those that it
    repeats.
    """

    shape: tuple[int, ...]
    dtype: str
    wants_grad: bool
    stride: Stride | None = None

    @classmethod
    def of(cls, tensor: Tensor, *, wants_grad: bool) -> TensorForm:
        """The form of a tensor."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        own = kept_stride(shape, stride)
        return cls(shape, str(tensor.dtype).removeprefix("torch."), wants_grad, own)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return dtype_of(self.dtype)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the contiguous tensor that travels."""
        shape, order = self._compact()
        return tuple(shape[dim] for dim in order)

    def packed(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor of this form, as they travel; a view of it where it has no gaps."""
        if self.stride is None:
            return tensor
        shape, order = self._compact()
        for dim, (extent, whole) in enumerate(zip(shape, self.shape, strict=True)):
            if extent != whole:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor.permute(order)

    def unpacked(self, packed: Tensor, *, copies: bool) -> Tensor:
        """The tensor of this form, from what `packed` gave.

        Args:
            packed: contiguous.
            copies: whether the memory of `packed` must not be the tensor's; without it, it may be.
        """
        if self.stride is None:
            return packed.clone() if copies else packed
        shape, order = self._compact()
        back = [order.index(dim) for dim in range(len(order))]
        laid = packed.permute(back)
        repeats = [
            1 if extent != whole else step
            for extent, whole, step in zip(shape, self.shape, self.stride, strict=True)
        ]
        if copies or laid.stride() != tuple(repeats):
            compact = torch.empty_strided(shape, repeats, dtype=packed.dtype, device=packed.device)
            laid = compact.copy_(laid)
        return laid if shape == self.shape else laid.as_strided(self.shape, self.stride)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """A tensor that can take what `packed` gives, on the CPU or on another device."""
        shape = self.shape if self.stride is None else self.packed_shape
        return torch.empty(shape, dtype=self.torch_dtype, device=device or "cpu")

    def _compact(self) -> tuple[tuple[int, ...], list[int]]:
        """The shape without repetition, and the dimensions from the longest stride to the shortest."""
        strides = self.stride
        assert strides is not None
        shape = tuple(
            1 if step == 0 and extent > 1 else extent
            for step, extent in zip(strides, self.shape, strict=True)
        )
        order = sorted(
            range(len(shape)), key=lambda dim: (-strides[dim] if shape[dim] > 1 else 0, dim)
        )
        return shape, order


@dataclass(frozen=True)
class Payload:
    """A flattened value: `leaves` are tensors and constants, `structure` is how they nest: empty
    for a bare tensor, `*` for a
    flat list, else a `Structure`.

    `wants_grad` says for every tensor whether a gradient is to come back for it. `shared` are pairs
    of tensors, by place among the
    tensors, that have memory in common where they are made.
    """

    structure: str | Structure
    leaves: tuple[Any, ...]
    wants_grad: tuple[bool, ...]
    shared: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, value: Any, wants_grad: tuple[bool, ...] | None = None) -> Payload:
        """Flatten `value`; by default a tensor wants a gradient when it requires one.

        Raises:
            Unflattenable: there is something in it that cannot cross, with the place where it
            stands.
        """
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
        return cls("" if bare else structure, tuple(leaves), wants, overlapping(tensors))

    @classmethod
    def row(cls, tensors: Sequence[Tensor]) -> Payload:
        """A flat list of tensors, for which no gradient comes back; one that stands in it twice
        travels twice.
        """
        return cls("*", tuple(tensors), (False,) * len(tensors))

    @classmethod
    def flat(cls, gradients: list[Tensor | None]) -> Payload:
        """A list of gradients, with None where there is none; a single one as itself, which is the
        shortest to say.
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
        """The same with other tensors in the tensors' places."""
        replacements = iter(tensors)
        leaves = tuple(
            [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        )
        return Payload(self.structure, leaves, self.wants_grad, self.shared)

    def value(self) -> Any:
        """The nested value."""
        if isinstance(self.structure, Structure):
            return unflatten(self.structure, self.leaves)
        return self.leaves[0] if self.structure == "" else list(self.leaves)

    def form(self) -> tuple[object, ...]:
        """All but the tensors' contents, cheap to make and to compare."""
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
        """The tensors' forms, in order."""
        return [
            TensorForm.of(tensor, wants_grad=wants)
            for tensor, wants in zip(self.tensors, self.wants_grad, strict=True)
        ]

    def header(self) -> str:
        """All but the tensors' contents, as JSON.

        Raises:
            RunError: a constant is of a kind that does not travel between processes.
        """
        forms = iter(self.forms())
        described = [
            _written(next(forms)) if isinstance(leaf, Tensor) else {"constant": encode(leaf)}
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


def _written(form: TensorForm) -> dict[str, Any]:
    stride = None if form.stride is None else list(form.stride)
    return {
        "shape": list(form.shape),
        "dtype": form.dtype,
        "wants_grad": form.wants_grad,
        "stride": stride,
    }


def _read(leaf: dict[str, Any]) -> Any:
    if "constant" in leaf:
        return decode(leaf["constant"])
    stride = None if leaf["stride"] is None else tuple(map(int, leaf["stride"]))
    shape = tuple(map(int, leaf["shape"]))
    form = TensorForm(shape, str(leaf["dtype"]), bool(leaf["wants_grad"]), stride)
    dtype_of(form.dtype)
    return form


@dataclass(frozen=True)
class Header:
    """What is known of a payload before its tensors arrive."""

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
        found = json.loads(text)
        if found.get("version") != VERSION:
            raise RunError(
                f"a message from another rank is of version {found.get('version')} and not "
                f"{VERSION}: all ranks need the same "
                "version of Penstock"
            )
        text_or_tree = found["structure"]
        known = text_or_tree in ("", "*")
        structure = text_or_tree if known else wire.parse(text_or_tree)
        leaves = tuple([_read(leaf) for leaf in found["leaves"]])
        return cls(structure, leaves, tuple((int(a), int(b)) for a, b in found["shared"]))

    @property
    def forms(self) -> list[TensorForm]:
        """The tensors' forms, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def filled(self, tensors: list[Tensor]) -> Payload:
        """The payload whose tensors have arrived."""
        arrived = iter(tensors)
        leaves = tuple(
            [next(arrived) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        )
        wants = tuple([form.wants_grad for form in self.forms])
        return Payload(self.structure, leaves, wants, self.shared)

    def unpacked(self, packed: Sequence[Tensor], *, copies: bool = False) -> Payload:
        """The payload, from what its forms' `packed` gave, see `TensorForm.unpacked`."""
        made = [
            form.unpacked(each, copies=copies)
            for form, each in zip(self.forms, packed, strict=True)
        ]
        return self.filled(made)
