"""The part of a batch that one process has read, where the rest is on other processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.batches.splitting import sample_count
from penstock.errors import SettingError
from penstock.values.storage import overlapping_pairs
from penstock.values.structure import map_tensors, tensors_of


@dataclass(frozen=True, eq=False)
class BatchPart:
    """Inputs or targets of some samples of a batch.

    Attributes:
        value: the samples, nested tensors with one row per position. Without positions, one row or
            none, of which only shapes and types are used.
        positions: of the samples in the batch, ascending.
        samples: of the whole batch.
        order: a checksum of the numbers of all samples of the batch in their data set, by which
            processes that have read different parts know that these are of one batch; None if that
            is not known.
        sizes: numbers of samples of the micro-batches, where copies of a pipeline have batches of
            their own; None where the batch is cut evenly.

    Raises:
        SettingError: the value has no row for each position.
    """

    value: Any
    positions: Sequence[int]
    samples: int
    order: int | None = None
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        positions = list(self.positions)
        in_order = all(a < b for a, b in itertools.pairwise(positions))
        if not in_order or (positions and not 0 <= positions[0] <= positions[-1] < self.samples):
            raise SettingError(
                f"the positions of a BatchPart ascend from 0 to at most {self.samples - 1}, the "
                f"last of its {self.samples} samples: these are {positions[:8]}"
            )
        rows = sample_count(self.value, "a BatchPart's values") if positions else 0
        if rows != len(positions):
            raise SettingError(
                f"a BatchPart has {len(positions)} positions and values of {rows} samples: it "
                "needs one row for each position"
            )
        # A view may have strides or share memory, which the processes without these values cannot
        # know; what is known of a batch must be the same everywhere.
        shared = bool(overlapping_pairs(_distinct(tensors_of(self.value))))
        copied = map_tensors(lambda leaf: _contiguous(leaf, shared=shared), self.value)
        object.__setattr__(self, "value", copied)

    def __len__(self) -> int:
        """Return the number of samples of the whole batch."""
        return self.samples

    @property
    def is_whole(self) -> bool:
        """Whether all samples are there."""
        return len(self.positions) == self.samples

    @cached_property
    def on_meta(self) -> Any:
        """The whole batch on the meta device: its structure, shapes and types."""
        return self.missing(self.samples)

    def missing(self, samples: int) -> Any:
        """Return values of some samples that are not there: tensors on the meta device."""
        return map_tensors(
            lambda leaf: torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype, device="meta"),
            self.value,
        )

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """Split the batch into parts of these sizes.

        Returns:
            For each part its values if all of its samples are there, and else tensors on the meta
            device.
        """
        row_of = {position: row for row, position in enumerate(self.positions)}
        parts: list[Any] = []
        start = 0
        for size in sizes:
            end = start + size
            if all(position in row_of for position in range(start, end)):
                # Positions ascend, so consecutive samples are consecutive rows.
                parts.append(_rows(self.value, row_of[start], size))
            else:
                parts.append(self.missing(size))
            start = end
        return parts


def _rows(value: Any, start: int, count: int) -> Any:
    """Return views of consecutive rows of all tensors."""
    return map_tensors(lambda leaf: leaf[start : start + count], value)


def _contiguous(tensor: Tensor, *, shared: bool) -> Tensor:
    """Return a contiguous tensor without a graph: a copy if it shares memory with another."""
    tensor = tensor.detach()
    return tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def whole_value(value: Any) -> Any:
    """Return inputs or targets as far as every process knows them.

    Returns:
        The value itself; of a `BatchPart` with all samples its values, and of any other the whole
        batch on the meta device.
    """
    if not isinstance(value, BatchPart):
        return value
    return value.value if value.is_whole else value.on_meta


def is_missing(value: Any) -> bool:
    """Return whether inputs or targets of a micro-batch have not been read by this process."""
    if type(value) is Tensor:
        return value.is_meta
    return any(leaf.is_meta for leaf in tensors_of(value))
