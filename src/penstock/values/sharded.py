"""Tensors that several processes share: `DTensor` of torch.

torch.distributed.tensor takes a second to import, and is imported by those who make such tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> Tensor:
    """Return the part of a tensor that this process has, in the same memory; plain tensors as they
    are.
    """
    if type(tensor) is Tensor:  # said at once, since this is asked after every backward
        return tensor
    part: Any = tensor
    if is_sharded(tensor):
        with torch.no_grad():
            part = tensor.to_local()
    # The result of an operation that may not have ended holds the tensor that it will fill.
    result: Tensor = getattr(part, "elem", part)
    return result


def whole(tensor: Any) -> Tensor:
    """Return the whole of a tensor, plain tensors as they are.

    All processes that share the tensor call it in the same order.
    """
    full: Tensor = tensor.detach().full_tensor() if is_sharded(tensor) else tensor
    return full


def copy_whole(target: Any, source: Tensor) -> None:
    """Copy a whole tensor into one that may be shared: into the part that this process has."""
    if not is_sharded(target):
        target.copy_(source)
        return
    from torch.distributed.tensor import distribute_tensor  # loaded already: it made the target

    value = source.to(target.device, target.dtype)
    # Without a source rank every process takes its part, and nothing is sent.
    shared = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    local_part(target).copy_(shared.to_local())
