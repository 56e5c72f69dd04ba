"""Example inputs of a model, with as many samples as a measurement needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import SettingError


def checked_tensors(example: Any) -> list[Tensor]:
    """Return the tensors of an example.

    Raises:
        SettingError: there are none, or one has no samples.
    """
    tensors = tensors_in(example)
    if not tensors or any(tensor.dim() == 0 or tensor.shape[0] == 0 for tensor in tensors):
        raise SettingError(
            "the example must be tensors with at least one sample in their first dimension"
        )
    return tensors


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of a nested value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def bytes_per_sample(tensors: Sequence[Tensor]) -> float:
    """Return the bytes of tensors for one sample of their first dimension."""
    return sum(leaf.numel() * leaf.element_size() / leaf.shape[0] for leaf in tensors)


def resize_example(example: Any, size: int, device: torch.device) -> Any:
    """Return `example` repeated or cut to `size` samples, on the device."""

    def resize(leaf: Tensor) -> Tensor:
        """Repeat or cut the samples of a tensor to the size."""
        return leaf[torch.arange(size) % leaf.shape[0]].to(device)

    return pytree.tree_map_only(Tensor, resize, example)


def example_to_trace(example: Any) -> Any:
    """Return the first two samples of an example, the first one twice if there is no other.

    A model that is traced on a single sample may have a graph for single samples only.

    Raises:
        SettingError: see `checked_tensors`.
    """
    return resize_example(example, 2, checked_tensors(example)[0].device)
