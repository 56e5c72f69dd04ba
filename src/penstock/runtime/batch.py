"""A batch on its way: cut into micro-batches, and these into slices where a schedule says so, the
same on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.schedule.slicing import Slicing
from penstock.values.constants import describe, same_constant
from penstock.values.memory import overlapping
from penstock.values.structure import (
    Structure,
    Unflattenable,
    flatten,
    tensors_of,
    unflatten,
)


@dataclass
class Batch:
    """Micro-batches of inputs and targets, and the results that ops leave behind, all by the
    numbers that ops have.

    `shares[n]` is the share of micro-batch n in the batch's samples, and in their tokens where
    those are cut. Side losses are weighed by it. `loss_weights[n]` is what the loss of micro-batch
    n is multiplied by in the loss of the batch; the last stage sets it before its first loss (see
    `loss_weights.py`). `slicing` is how those micro-batches that this batch fills are cut.
    `keeps_outputs`: leave the model's outputs behind, though there are targets. `check` is a
    checksum that all ranks have in common, see `calls`; `pending_check` computes it, for `checksum`.
    `whole`: inputs and targets before they
    were cut. `device_batches`: their copies on other devices, see `device_batch.py`.
    """

    step: int
    inputs: list[Any]
    targets: list[Any] | None
    shares: list[float]
    signature: str
    training: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    slicing: Slicing | None = None
    keeps_outputs: bool = False
    check: int = 0
    pending_check: Callable[[], int] | None = None
    loss_weights: list[float] | None = None
    loss_counts: dict[int, float] = field(default_factory=dict)
    whole: tuple[Any, Any] = (None, None)
    device_batches: dict[torch.device, Any] = field(default_factory=dict, init=False, repr=False)

    def checksum(self) -> int:
        """Return `check`, computed now if that was put off until the rank waits for a message."""
        pending, self.pending_check = self.pending_check, None
        if pending is not None:
            self.check = pending()
        return self.check

    @property
    def micro_batches(self) -> int:
        """How many micro-batches there are. Slices of samples count each, as in
        `Schedule.first_micro_batches`.
        """
        return (
            len(self.slicing.shares)
            if self.slicing is not None and self.cuts_tokens
            else len(self.inputs)
        )

    @property
    def numbers(self) -> range:
        """The numbers that ops on this batch have."""
        return range(len(self.inputs))

    @property
    def cuts_tokens(self) -> bool:
        """Whether ops work on slices of sequences, which hand something on to each other."""
        return self.slicing is not None and self.slicing.along == "tokens"

    @cached_property
    def forms(self) -> list[str]:
        """By number, a name for the form of what stages pass on: what has the same name has the
        same shapes.
        """
        return _forms(self.signature, len(self.inputs))

    def place(self, number: int) -> tuple[int, int]:
        """Which whole micro-batch `number` belongs to, and how many of those there are."""
        if self.slicing is None:
            return number, len(self.inputs)
        return self.slicing.micro_batch_of[number], len(self.slicing.shares)

    def next_slice(self, number: int) -> int | None:
        """The slice of the same sequences that comes after `number`, if they are cut and there is
        one.
        """
        return (
            self.slicing.neighbour(number, +1)
            if self.slicing is not None and self.cuts_tokens
            else None
        )

    def rows(self) -> list[list[int]]:
        """The numbers of each micro-batch's slices of sequences; where none are cut, each number
        alone.
        """
        if self.slicing is None or not self.cuts_tokens:
            return [[number] for number in self.numbers]
        return [
            [first + i for i in range(len(row))]
            for first, row in zip(self.slicing.first_of, self.slicing.shares, strict=True)
        ]

    def with_whole_sequences(self) -> Batch:
        """The same samples in the same micro-batches, with no sequence cut."""
        rows = self.rows()
        inputs, targets = (
            [join([values[n] for n in row], dim=1) for row in rows]
            for values in (self.inputs, self.targets or self.inputs)
        )
        shares = [sum(self.shares[n] for n in row) for row in rows]
        return Batch(
            self.step,
            inputs,
            None if self.targets is None else targets,
            shares,
            self.signature,
            self.training,
            whole=self.whole,
        )

    def joined(self, outputs: Mapping[int, Any]) -> Any:
        """Outputs by number as those of the whole batch.

        Raises:
            SettingError: an output has no samples, or not the tokens of its slice.
        """
        if self.slicing is None or not self.cuts_tokens:
            return join([outputs[number] for number in sorted(outputs)])
        for number, output in outputs.items():
            tokens = token_count(self.inputs[number], "the inputs of a slice")
            for leaf in tensors_of(output):
                if leaf.dim() < 2 or leaf.shape[1] != tokens:
                    raise SettingError(
                        f"the model's output for a slice of {tokens} tokens has a tensor of {tuple(leaf.shape)}: outputs "
                        "of slices are joined along their second dimension, which has the tokens"
                    )
        return join([join([outputs[number] for number in row], dim=1) for row in self.rows()])


def sample_count(value: Any, what: str) -> int:
    """The common first extent of all tensors in `value`.

    Raises:
        SettingError: there is none, or the tensors differ.
    """
    return _extent(
        value,
        0,
        what,
        f"{what} must be tensors with the same number of samples, at least 1, in their first dimension",
    )


def token_count(value: Any, what: str) -> int:
    """The common second extent of all tensors in `value`.

    Raises:
        SettingError: there is none, or the tensors differ.
    """
    return _extent(
        value,
        1,
        what,
        f"the schedule cuts sequences, so {what} must be tensors with the same number of tokens, at least 1, "
        "in their second dimension",
    )


def _dense(value: Any, what: str) -> list[Tensor]:
    """The tensors of a value that is to be cut.

    Raises:
        SettingError: it cannot be taken apart, or has a sparse tensor in it.
    """
    if type(value) is Tensor and value.layout is torch.strided:
        return [value]
    try:
        leaves, structure = flatten(value)
    except Unflattenable as error:
        raise SettingError(f"{what} cannot be cut into micro-batches: {error}") from error
    if structure.has("sparse"):
        raise SettingError(
            f"{what} have a sparse tensor in them, which cannot be cut into micro-batches: give its indices by sample as "
            "padded dense tensors, and make it in the first layer; or to_dense()"
        )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _extent(value: Any, dim: int, what: str, otherwise: str) -> int:
    tensors = _dense(value, what)
    counts = {int(tensor.shape[dim]) if tensor.dim() > dim else 0 for tensor in tensors}
    if len(counts) != 1 or 0 in counts:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensors"
        raise SettingError(f"{otherwise}; these have {shapes}")
    return counts.pop()


def cut(value: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """`value` in parts of these sizes along one dimension of its tensors."""
    if type(value) is Tensor:
        return list(torch.split(value, list(sizes), dim))
    leaves, structure = flatten(value)
    parts = len(sizes)
    pieces = [
        list(torch.split(leaf, list(sizes), dim)) if isinstance(leaf, Tensor) else [leaf] * parts
        for leaf in leaves
    ]
    return [unflatten(structure, [piece[part] for piece in pieces]) for part in range(parts)]


def join(values: list[Any], dim: int = 0) -> Any:
    """Put cut values together again.

    Raises:
        SettingError: a tensor among them has no dimension, so that it cannot be of one sample or
        another; or they nest differently,
            or have different constants.
    """
    flat = [flatten(value) for value in values]
    first, structure = flat[0]
    if structure.has("sparse"):
        raise SettingError(
            "the model's output has a sparse tensor in it, and outputs of micro-batches are joined along their first "
            "dimension: return its to_dense()"
        )
    if any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in first):
        raise SettingError(
            "the model's output has a tensor without a dimension: outputs of micro-batches are joined along their "
            "first one, which has the samples"
        )
    if any(other != structure for _, other in flat):
        raise SettingError(
            "the model's output for one micro-batch nests in another way than that for another: they cannot be "
            "joined"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [
        torch.cat(list(column), dim)
        if isinstance(column[0], Tensor)
        else _common(column, place, structure)
        for place, column in enumerate(columns)
    ]
    return unflatten(structure, joined)


def _common(column: Sequence[Any], place: int, structure: Structure) -> Any:
    """The constant that all micro-batches have.

    Raises:
        SettingError: they have several.
    """
    for other in column:
        if not same_constant(other, column[0]):
            raise SettingError(
                f"the model's output has {column[0]!r} for one micro-batch and {other!r} for another, at "
                f"output{structure.labels()[place]}: only tensors can be joined. Return a tensor with a number for every "
                "sample, or leave it out"
            )
    return column[0]


def even_sizes(total: int, parts: int) -> list[int]:
    """`total` in equal or nearly equal parts, larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def sizes_by_share(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers above 0 that add up to `total`, each as near to its share as that allows; of
    equals the first is larger.

    >>> sizes_by_share(10, [1 / 3, 1 / 3, 1 / 3]), sizes_by_share(4, [0.9, 0.05, 0.05])
    ([4, 3, 3], [2, 1, 1])

    Args:
        total: at least as many as there are shares.
        shares: above 0; only how large they are to each other counts.
    """
    whole = sum(shares)
    wanted = [
        round(total * share / whole, 9) for share in shares
    ]  # rounded, for shares such as 1/3 are not exact
    sizes = [max(1, int(size)) for size in wanted]
    while left := total - sum(sizes):
        step = 1 if left > 0 else -1
        able = [i for i, size in enumerate(sizes) if size + step >= 1]
        sizes[max(able, key=lambda i: (step * (wanted[i] - sizes[i]), -i))] += step
    return sizes


def make_batch(
    x: Any, y: Any, micro_batches: int, *, step: int, training: bool, slicing: Slicing | None = None
) -> Batch:
    """Cut a batch into `micro_batches` parts, or into single samples if there are fewer; with
    `slicing`, into its slices.

    Raises:
        SettingError: a tensor requires a gradient; inputs and targets have no samples, or not the
        same number; or sequences are to be cut, and they are not the
            second dimension of everything, or are shorter than they have slices.
    """
    if slicing is None and _is_plain(x) and _is_plain(y) and x.shape[0] == y.shape[0]:
        return _cut_tensors(x, y, micro_batches, step, training)
    if training:
        _check_no_grad(x, "inputs")
        _check_no_grad(y, "targets")
    samples = sample_count(x, "the inputs of a batch")
    if y is not None and sample_count(y, "the targets of a batch") != samples:
        raise SettingError(
            f"a batch has {samples} inputs and {sample_count(y, 'the targets')} targets"
        )
    if slicing is not None and slicing.along == "samples" and samples >= len(slicing.share):
        sizes = sizes_by_share(samples, slicing.share)
    elif slicing is not None and slicing.along == "samples":
        sizes, slicing = [1] * samples, None
    else:
        sizes = even_sizes(samples, min(micro_batches, samples))
    shares = [size / samples for size in sizes]
    inputs, targets = cut(x, sizes), None if y is None else cut(y, sizes)
    if slicing is not None and slicing.along == "tokens":
        slicing = replace(slicing, shares=slicing.shares[: len(sizes)])
        lengths = _slice_lengths(x, y, slicing)
        tokens = sum(lengths[0])
        inputs = _sliced(inputs, lengths)
        targets = None if targets is None else _sliced(targets, lengths)
        shares = [
            length / tokens * share
            for share, row in zip(shares, lengths, strict=True)
            for length in row
        ]
    forms, structure = _described(x)
    signature = _signature(training, y is not None, len(sizes), forms, structure, slicing)
    return Batch(step, inputs, targets, shares, signature, training, slicing=slicing, whole=(x, y))


def _is_plain(value: Any) -> bool:
    """Whether a value is one tensor that can be cut as it is."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.requires_grad
        and value.dim() > 0
        and value.shape[0] > 0
    )


def _cut_tensors(x: Tensor, y: Tensor, micro_batches: int, step: int, training: bool) -> Batch:
    """The batch of one tensor of inputs and one of targets. Small models run so many batches a
    second that it must be quick.
    """
    sizes, shares = _even_shares(x.shape[0], micro_batches)
    signature = _signature(training, True, len(sizes), (_tensor_form(x),), "", None)
    inputs, targets = list(torch.split(x, sizes)), list(torch.split(y, sizes))
    return Batch(step, inputs, targets, [*shares], signature, training, whole=(x, y))


@lru_cache(maxsize=1024)
def _even_shares(samples: int, micro_batches: int) -> tuple[list[int], list[float]]:
    sizes = even_sizes(samples, min(micro_batches, samples))
    return sizes, [size / samples for size in sizes]


def _described(x: Any) -> tuple[object, str]:
    """Forms of the leaves and the nesting of inputs, in words that are the same in every process."""
    if type(x) is Tensor:
        return (_tensor_form(x),), ""
    leaves, structure = flatten(x)
    forms = [_tensor_form(leaf) if isinstance(leaf, Tensor) else describe(leaf) for leaf in leaves]
    shared = overlapping([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return (*forms, shared), structure.describe()


def _tensor_form(tensor: Tensor) -> tuple[object, ...]:
    form = tuple(tensor.shape), str(tensor.dtype)
    return form if tensor.is_contiguous() else (*form, tensor.stride())


def _check_no_grad(value: Any, what: str) -> None:
    leaves = [value] if type(value) is Tensor else flatten(value)[0]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise SettingError(
                f"the {what} of a batch have a tensor of shape {tuple(leaf.shape)} that requires a gradient, and a Pipeline "
                "gives gradients to parameters only: detach() it; or use ps.Pipe, which gives gradients to its inputs"
            )


@lru_cache(maxsize=1024)
def _signature(*what: object) -> str:
    """A short name of what makes the shapes of a batch's micro-batches, the same in every process."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


@lru_cache(maxsize=1024)
def _forms(signature: str, count: int) -> list[str]:
    return [f"{signature}.{number}" for number in range(count)]


def _slice_lengths(x: Any, y: Any, slicing: Slicing) -> list[list[int]]:
    """Per micro-batch, how many tokens its slices have."""
    tokens = token_count(x, "the inputs of a batch")
    if y is not None and token_count(y, "the targets of a batch") != tokens:
        raise SettingError(
            f"the schedule cuts sequences: the inputs have {tokens} tokens each, the targets "
            f"{token_count(y, 'the targets')}, and must have as many"
        )
    most = max(map(len, slicing.shares))
    if tokens < most:
        raise SettingError(
            f"sequences of {tokens} tokens cannot be cut into {most} slices: take a schedule with at most {tokens}, "
            "or longer sequences"
        )
    return [sizes_by_share(tokens, row) for row in slicing.shares]


def _sliced(micro_batches: list[Any], lengths: list[list[int]]) -> list[Any]:
    return [
        part
        for value, row in zip(micro_batches, lengths, strict=True)
        for part in cut(value, row, dim=1)
    ]


def pair_of(item: Any) -> tuple[Any, Any]:
    """Inputs and targets of what a loader yields.

    Raises:
        SettingError: it is no tuple or list of two.
    """
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, Mapping):
        keys = ", ".join(repr(key) for key in item)
        what = f"a {type(item).__name__} with the keys {keys}"
    elif isinstance(item, (tuple, list)):
        what = f"a {type(item).__name__} of {len(item)}"
    else:
        what = f"a {type(item).__name__}"
    raise SettingError(
        f"the loader yields {what}, and train takes pairs (x, y): the inputs of the model and the targets of the loss. Yield "
        'pairs, such as ((batch, batch["labels"]) for batch in loader)'
    )
