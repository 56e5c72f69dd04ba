"""A batch, split into micro-batches, and these into slices if the schedule has them; the same on
every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.batches.batch_parts import BatchPart, whole_value
from penstock.batches.splitting import (
    cut,
    even_sizes,
    fault_of_rows,
    join,
    sample_count,
    sizes_by_share,
    token_count,
)
from penstock.errors import SettingError
from penstock.schedule.slicing import Slicing
from penstock.values.constants import describe
from penstock.values.storage import overlapping_pairs
from penstock.values.structure import flatten, tensors_of


@dataclass
class Batch:
    """Inputs and targets of the micro-batches, and the results of ops, all indexed by op number.

    The number of an op is its micro-batch, or, if the schedule slices micro-batches, its slice.

    Attributes:
        step: batches trained before this one.
        inputs, targets: by number; targets are None in `Pipeline.forward`.
        shares: by number, its share of the batch's samples, or of their tokens if sequences are
            sliced. Side losses are weighted by it.
        signature: identifies the shapes of the micro-batches; equal in all processes.
        training: whether gradients are computed.
        losses: by number, the loss, set by the last stage; see `loss_shares`.
        loss_factors: by number, what its loss is multiplied by for its share; 1 by default.
        outputs: by number, the outputs of the model, set by the last stage.
        slicing: how the micro-batches are sliced, if they are.
        keeps_outputs: store the outputs even though there are targets.
        check: checksum of the batch, to compare it between ranks (see `calls`).
        pending_check: computes the checksum, for `checksum`; None if `check` has it.
        loss_weights: by number, the factor of its loss in the loss of the batch; the last stage
            sets it before its first loss (see `loss_weights.py`).
        loss_counts: by number, the count (such as tokens) from which its loss weight follows.
        whole: inputs and targets of the whole batch; on the meta device where this process has not
            read all samples (see `BatchPart`), as are `inputs` and `targets` of its missing
            numbers.
        device_batches: copies of inputs and targets on other devices (see `device_batch.py`).
    """

    step: int
    inputs: list[Any]
    targets: list[Any] | None
    shares: list[float]
    signature: str
    training: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    loss_factors: dict[int, float] = field(default_factory=dict)
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
        """Number of micro-batches.

        Slices of samples count as micro-batches, as in `Schedule.first_micro_batches`.
        """
        return (
            len(self.slicing.shares)
            if self.slicing is not None and self.cuts_tokens
            else len(self.inputs)
        )

    @property
    def numbers(self) -> range:
        """The numbers of the ops on this batch."""
        return range(len(self.inputs))

    @cached_property
    def cuts_tokens(self) -> bool:
        """Whether ops work on slices of sequences, which pass state to the next slice."""
        return self.slicing is not None and self.slicing.along == "tokens"

    @cached_property
    def forms(self) -> list[str]:
        """By number, a name for the shapes that stages pass on; equal names mean equal shapes."""
        return _forms(self.signature, len(self.inputs))

    def place(self, number: int) -> tuple[int, int]:
        """Return the whole micro-batch that `number` belongs to, and the number of those."""
        if self.slicing is None:
            return number, len(self.inputs)
        return self.slicing.micro_batch_of[number], len(self.slicing.shares)

    def next_slice(self, number: int) -> int | None:
        """Return the next slice of the same sequences, None after the last or without slices."""
        return (
            self.slicing.neighbour(number, +1)
            if self.slicing is not None and self.cuts_tokens
            else None
        )

    def loss_shares(self, numbers: Sequence[int]) -> Tensor:
        """Return the losses of some numbers as shares of the batch's loss, shape (numbers,)."""
        losses = [self.losses[number] for number in numbers]
        factors = [self.loss_factors.get(number, 1.0) for number in numbers]
        if factors.count(factors[0]) == len(factors):
            # One multiplication instead of one per micro-batch, of the same bits.
            return torch.stack(losses) * factors[0]
        pairs = zip(losses, factors, strict=True)
        return torch.stack([loss * factor for loss, factor in pairs])

    def rows(self) -> list[list[int]]:
        """Return, by micro-batch, the numbers of its slices; one number each without slices."""
        if self.slicing is None or not self.cuts_tokens:
            return [[number] for number in self.numbers]
        return [
            list(range(first, first + len(row)))
            for first, row in zip(self.slicing.first_of, self.slicing.shares, strict=True)
        ]

    def with_whole_sequences(self) -> Batch:
        """Return the same samples in the same micro-batches, with unsliced sequences."""
        rows = self.rows()
        shares: list[float] = []
        for row in rows:
            shares.append(sum(self.shares[number] for number in row))
        return Batch(
            self.step,
            _join_rows(self.inputs, rows),
            None if self.targets is None else _join_rows(self.targets, rows),
            shares,
            self.signature,
            self.training,
            whole=self.whole,
        )

    def joined(self, outputs: Mapping[int, Any]) -> Any:
        """Concatenate outputs by number to the output of the whole batch.

        Raises:
            SettingError: an output has no samples dimension, or not the tokens of its slice.
        """
        if self.slicing is None or not self.cuts_tokens:
            return self._joined_samples(outputs)
        for number, output in outputs.items():
            tokens = token_count(self.inputs[number], "the inputs of a slice")
            for leaf in tensors_of(output):
                if leaf.dim() < 2 or leaf.shape[1] != tokens:
                    raise SettingError(
                        f"the model's output for a slice of {tokens} tokens has a tensor of "
                        f"{tuple(leaf.shape)}: outputs of slices are joined along their second "
                        "dimension, which indexes the tokens"
                    )
        return join(_join_rows(outputs, self.rows()))

    def _joined_samples(self, outputs: Mapping[int, Any]) -> Any:
        """Concatenate the outputs of micro-batches along their first dimension; see `joined`."""
        numbers = sorted(outputs)
        values = [outputs[number] for number in numbers]
        joined = join(values)
        samples = [sample_count(self.inputs[number], "the inputs") for number in numbers]
        for column in zip(*map(tensors_of, values), strict=True):
            fault = fault_of_rows(column, samples)
            if fault:
                raise SettingError(
                    f"the model {fault}: transpose or reduce the output where it is used, or use "
                    "micro_batches=1"
                )
        return joined


def _join_rows(values: Sequence[Any] | Mapping[int, Any], rows: list[list[int]]) -> list[Any]:
    """Join the values of each micro-batch's slices along their tokens.

    Args:
        values: by slice.
        rows: by micro-batch, its slices.
    """
    return [join([values[number] for number in row], dim=1) for row in rows]


def make_batch(
    x: Any, y: Any, micro_batches: int, *, step: int, training: bool, slicing: Slicing | None = None
) -> Batch:
    """Split a batch into micro-batches, and these into slices if there is a slicing.

    Args:
        x: inputs, nested tensors with the samples in their first dimension; or a `BatchPart`.
        y: targets, likewise, or None.
        micro_batches: number of micro-batches; a batch with fewer samples has one sample in each.
        step: batches trained before this one.
        training: whether gradients will be computed.
        slicing: how the schedule slices micro-batches.

    Raises:
        SettingError: a tensor requires a gradient; inputs and targets have no samples, or not the
            same number; or sequences are to be sliced, and the tokens are not the second dimension
            of all tensors, or there are fewer tokens than slices.
    """
    x_source, y_source = x, y
    part_sizes = x.sizes if isinstance(x, BatchPart) else None
    x, y = whole_value(x), whole_value(y)
    is_plain = part_sizes is None and _is_plain(x) and _is_plain(y)
    if slicing is None and is_plain and x.shape[0] == y.shape[0]:
        # The usual batch, without the description of nested values, which takes longer than its
        # cut.
        return _cut_tensors(x, y, micro_batches, step, training)
    if training:
        _check_no_grad(x, "inputs")
        _check_no_grad(y, "targets")
    samples = common_sample_count(x, y)
    if part_sizes is None:
        sizes, slicing = micro_batch_sizes(samples, micro_batches, slicing)
    else:
        sizes = list(part_sizes)
    shares = [size / samples for size in sizes]
    inputs, targets = _cut(x_source, sizes), None if y is None else _cut(y_source, sizes)
    if slicing is not None and slicing.along == "tokens":
        # A batch with few samples has fewer micro-batches than the schedule.
        slicing = replace(slicing, shares=slicing.shares[: len(sizes)])
        lengths = _slice_lengths(x, y, slicing)
        tokens = sum(lengths[0])
        inputs = _slice_tokens(inputs, lengths)
        targets = None if targets is None else _slice_tokens(targets, lengths)
        rows = zip(shares, lengths, strict=True)
        shares = [length / tokens * share for share, row in rows for length in row]
    forms, structure = _describe_inputs(x)
    count = part_sizes or len(sizes)
    signature = _signature(training, y is not None, count, forms, structure, slicing)
    return Batch(step, inputs, targets, shares, signature, training, slicing=slicing, whole=(x, y))


def _cut(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Split inputs or targets, or what is there of them, into micro-batches."""
    return value.cut(sizes) if isinstance(value, BatchPart) else cut(value, sizes)


def common_sample_count(x: Any, y: Any) -> int:
    """Return the number of samples of a batch.

    Raises:
        SettingError: inputs and targets have no samples, or not the same number.
    """
    samples = sample_count(x, "the inputs of a batch")
    if y is not None and sample_count(y, "the targets of a batch") != samples:
        raise SettingError(
            f"a batch has {samples} inputs and {sample_count(y, 'the targets')} targets"
        )
    return samples


def micro_batch_sizes(
    samples: int, micro_batches: int, slicing: Slicing | None
) -> tuple[list[int], Slicing | None]:
    """Return the samples of each micro-batch, and the slicing if there are samples enough for it.

    Slices of samples count as micro-batches here.
    """
    if slicing is None or slicing.along != "samples":
        return even_sizes(samples, min(micro_batches, samples)), slicing
    if samples >= len(slicing.share):
        return sizes_by_share(samples, slicing.share), slicing
    return [1] * samples, None


def _is_plain(value: Any) -> bool:
    """Return whether a value is one dense tensor that can be split without further checks."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_meta
        and value.dim() > 0
        and value.shape[0] > 0
    )


def _cut_tensors(x: Tensor, y: Tensor, micro_batches: int, step: int, training: bool) -> Batch:
    """Make the batch of one tensor of inputs and one of targets.

    This is a fast path: its time counts for small models, which train many batches per second.
    """
    sizes, shares = _even_shares(x.shape[0], micro_batches)
    signature = _signature(training, True, len(sizes), (_tensor_form(x),), "", None)
    # Not `torch.split`, whose Python takes longer than the split.
    inputs, targets = list(x.split_with_sizes(sizes)), list(y.split_with_sizes(sizes))
    # A copy of the shares: the list in the cache is that of all batches of this size.
    return Batch(step, inputs, targets, [*shares], signature, training, whole=(x, y))


# A run has few forms of batches, and asks for them in every step: this and the two caches below
# take a few microseconds off each.
@lru_cache(maxsize=1024)
def _even_shares(samples: int, micro_batches: int) -> tuple[list[int], list[float]]:
    sizes = even_sizes(samples, min(micro_batches, samples))
    return sizes, [size / samples for size in sizes]


def _describe_inputs(x: Any) -> tuple[object, str]:
    """Describe leaves and structure of inputs, in text that is equal in all processes."""
    if type(x) is Tensor:
        return (_tensor_form(x),), ""
    leaves, structure = flatten(x)
    forms = [_tensor_form(leaf) if isinstance(leaf, Tensor) else describe(leaf) for leaf in leaves]
    shared = overlapping_pairs([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return (*forms, shared), structure.describe()


def _tensor_form(tensor: Tensor) -> tuple[object, ...]:
    form = tuple(tensor.shape), str(tensor.dtype)
    return form if tensor.is_contiguous() else (*form, tensor.stride())


def _check_no_grad(value: Any, what: str) -> None:
    """Reject inputs or targets that require gradients: a pipeline computes none for them."""
    leaves = [value] if type(value) is Tensor else flatten(value)[0]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise SettingError(
                f"the {what} of a batch have a tensor of shape {tuple(leaf.shape)} that requires a "
                "gradient, and a Pipeline computes gradients of parameters only: detach() it; or "
                "use ps.Pipe, which computes gradients of its inputs"
            )


@lru_cache(maxsize=1024)
def _signature(*facts: object) -> str:
    """Hash the facts that determine the shapes of micro-batches; equal in all processes."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


@lru_cache(maxsize=1024)
def _forms(signature: str, count: int) -> list[str]:
    return [f"{signature}.{number}" for number in range(count)]


def _slice_lengths(x: Any, y: Any, slicing: Slicing) -> list[list[int]]:
    """Return, by micro-batch, the numbers of tokens of its slices."""
    tokens = token_count(x, "the inputs of a batch")
    if y is not None and token_count(y, "the targets of a batch") != tokens:
        raise SettingError(
            f"the schedule cuts sequences: the inputs have {tokens} tokens each, the targets "
            f"{token_count(y, 'the targets')}, and must have as many"
        )
    slices = max(map(len, slicing.shares))
    if tokens < slices:
        raise SettingError(
            f"sequences of {tokens} tokens cannot be cut into {slices} slices: use a schedule with "
            f"at most {tokens} slices, or longer sequences"
        )
    return [sizes_by_share(tokens, row) for row in slicing.shares]


def _slice_tokens(micro_batches: list[Any], lengths: list[list[int]]) -> list[Any]:
    """Split micro-batches along their tokens, and return all slices in order."""
    return [
        part
        for value, row in zip(micro_batches, lengths, strict=True)
        for part in cut(value, row, dim=1)
    ]


def parse_pair(item: Any) -> tuple[Any, Any]:
    """Return inputs and targets of an item of a data loader.

    Raises:
        SettingError: the item is not a tuple or list of two.
    """
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, Mapping):
        keys = ", ".join(repr(key) for key in item)
        description = f"a {type(item).__name__} with the keys {keys}"
    elif isinstance(item, (tuple, list)):
        description = f"a {type(item).__name__} of {len(item)}"
    else:
        description = f"a {type(item).__name__}"
    raise SettingError(
        f"the loader yields {description}, and train takes pairs (x, y): the inputs of the model "
        "and the targets of the loss. Yield pairs, such as "
        '((batch, batch["labels"]) for batch in loader)'
    )
