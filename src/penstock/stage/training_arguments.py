"""Types of the training options as keyword arguments, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.optim.groups import GroupsOf


class TrainingArguments(TypedDict, total=False):
    """Training options as keyword arguments of `Pipeline`.

    Type checkers cannot read names that are derived at run time, so they stand here again.
    `TrainingOptions` declares them, and a test holds names and types equal. The only difference is
    `autocast`, which a caller may give as a dtype too.
    """

    clip_grad_norm: float | None
    autocast: Literal["bfloat16", "float16"] | torch.dtype | None
    accumulate: int
    on_nonfinite: Literal["raise", "skip", "warn"]
    zero: int | None
    compile: bool | dict[str, Any]
    clip_norm_type: float
    clip_grad_value: float | None
    scaler: object
    parameter_groups: GroupsOf | None
    memory_format: torch.memory_format | None
    deferred_batch_norm: bool
    offload: bool | float
    boundary: str | None
    gradient_hook: str
    loss_weight: Callable[[Any], Any] | None
    loss_on: str
    parallelize: Callable[[list[nn.Module], DeviceMesh], Any] | None
