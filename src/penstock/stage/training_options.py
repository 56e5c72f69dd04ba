"""Options of training: mixed precision, clipping, accumulation, compiled stages and others."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import SettingError
from penstock.losses.joint import check_joint
from penstock.losses.stage_loss import LossOptions
from penstock.modules.deferred_batch_norm import check_not_traced, convert
from penstock.optim.groups import GroupsOf
from penstock.option import CommonOptions, OnNonfinite, check_zero, option, options_of
from penstock.plan.plan import Plan
from penstock.schedule.op import Schedule
from penstock.stage.gradients.bucket_reduction import parse_hook
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.compressed import check_compression
from penstock.values.constants import dtype_name

_UNREDUCED = (
    "the loss has reduction='none', which gives one number for each sample; it must give one "
    "number: reduction='mean' or 'sum'"
)
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)
# Without torch.preserve_format, which is no format that weights can be converted to.
_MEMORY_FORMATS = (
    None,
    torch.channels_last,
    torch.channels_last_3d,
    torch.contiguous_format,
)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(CommonOptions):
    """Options of training. The fields are keyword arguments of `Pipeline`, whose signature and
    documentation are derived from them.
    """

    clip_norm_type: float = option(
        2.0,
        'Order of the norm of clip_grad_norm, such as 2.0, 1.0 or float("inf").',
        maximum=math.inf,
    )
    clip_grad_value: float | None = option(
        None,
        "Maximum absolute value of gradients, as in torch.nn.utils.clip_grad_value_.",
        maximum=math.inf,
        synchronous=True,
    )
    scaler: object = option(
        None,
        "True, options of torch.amp.GradScaler, or a GradScaler, for dynamic loss scaling. A step "
        "is skipped on all ranks or none.",
        synchronous=True,
    )
    parameter_groups: GroupsOf | None = option(
        None,
        "A function from name and parameter to the options of its group, such as "
        '`{"weight_decay": 0.0}`; the optimizer is then made from parameter groups.',
    )
    memory_format: torch.memory_format | None = option(
        None, "Memory format of weights, such as torch.channels_last."
    )
    deferred_batch_norm: bool = option(
        False, "Update running statistics once per batch, from the whole batch."
    )
    offload: bool | float = option(
        False,
        "Keep tensors saved for the backward in host memory, if the device is not the CPU; a "
        "number up to 1 keeps that share of their bytes there.",
        private=True,
    )
    boundary: str | None = option(
        None,
        '"bfloat16" or "int8" to send activations and their gradients in fewer bits. This changes '
        "the training result slightly (benchmarks/boundary).",
    )
    gradient_hook: str = option(
        "none",
        '"fp16", "bf16", "powersgd" or "powersgd-R" (of rank R) to send the gradients of copies of '
        "a stage between CPU hosts in fewer bytes. This changes the training result; on one host, "
        "and over NCCL, gradients are sent as they are.",
        synchronous=True,
        fixed=True,
    )
    loss_weight: Callable[[Any], Any] | None = option(
        None,
        "A function from the targets of a micro-batch to its weight, for a loss whose weights "
        "cannot be determined otherwise.",
    )
    loss_on: str = option(
        "micro_batch",
        '"batch" computes the loss once, on all outputs, for a loss that mixes samples (with gpipe '
        "and similar schedules).",
    )
    parallelize: Callable[[list[nn.Module], DeviceMesh], Any] | None = option(
        None,
        "A function that shares the layers of a stage between processes, by fully_shard or "
        "parallelize_module; called with the layers and the mesh (docs/mesh.md).",
        synchronous=True,
    )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of mixed precision; None without it."""
        return None if self.autocast is None else getattr(torch, self.autocast)

    @property
    def loss_options(self) -> LossOptions:
        """How the loss is divided into micro-batches."""
        return LossOptions(self.loss_weight, self.loss_on)

    @property
    def compiled(self) -> Mapping[str, Any] | None:
        """Options of `torch.compile`; None without compilation."""
        if isinstance(self.compile, Mapping):
            return self.compile
        return {} if self.compile else None

    def with_plan(self, plan: Plan | None) -> TrainingOptions:
        """Return the options with what a plan says, where they do not."""
        # An option that is given wins over the plan, zero=0 too.
        if plan is None or self.zero is not None:
            return self
        return replace(self, zero=plan.zero)

    def check(self, schedule: Schedule, loss: object, *, steps: bool) -> None:
        """Reject options that are invalid, alone or with the schedule.

        Args:
            schedule: the schedule of the run.
            loss: the loss function.
            steps: whether there is an optimizer.

        Raises:
            SettingError: an option is invalid; the message says which and why.
        """
        self._check_loss(schedule, loss)
        self._check_clipping()
        if self.autocast not in (None, *map(dtype_name, _AUTOCAST_DTYPES)):
            raise SettingError(
                f"autocast is torch.bfloat16 or torch.float16, not {self.autocast!r}"
            )
        if self.on_nonfinite not in get_args(OnNonfinite):
            raise SettingError(
                f"on_nonfinite is 'raise', 'skip' or 'warn', not {self.on_nonfinite!r}"
            )
        check_accumulate(self.accumulate, schedule)
        if not 0.0 <= self.offload <= 1.0:
            raise SettingError(
                "offload is True, False, or the share of the saved bytes that is kept in host "
                f"memory, from 0 to 1, not {self.offload}"
            )
        if self.boundary is not None:
            check_compression(self.boundary)
        _check_hook(self.gradient_hook)
        self._check_zero()
        if self.memory_format not in _MEMORY_FORMATS:
            raise SettingError(
                "memory_format is torch.channels_last or torch.channels_last_3d, not "
                f"{self.memory_format!r}"
            )
        self._check_update_options(schedule, steps=steps)

    @property
    def zero_level(self) -> int:
        """The level of ZeRO among copies of a stage."""
        return self.zero or 0

    def _check_zero(self) -> None:
        """Reject levels of ZeRO that do not run among copies of a stage."""
        if self.zero == 1 and self.gradient_hook != "none":
            raise SettingError(
                f"zero=1 and gradient_hook={self.gradient_hook!r}: hooks change the sums of all "
                "gradients on all copies, and with zero=1 a copy sums those of its part. Give one "
                "of them"
            )
        check_zero(self.zero)

    def _check_update_options(self, schedule: Schedule, *, steps: bool) -> None:
        """Reject options of the update that need another schedule or an optimizer."""
        update_options = []
        for entry, facts in options_of(self):
            value = getattr(self, entry.name)
            if facts.needs_synchronous(value, entry.default):
                update_options.append(entry.name)
        if update_options and not schedule.synchronous:
            raise SettingError(
                f"{' and '.join(update_options)}: {schedule.name} is asynchronous, its stages "
                "update at different times, so that the gradients of all stages never exist at the "
                "same time. Use a synchronous schedule; for mixed precision, torch.bfloat16 needs "
                "no scaler"
            )
        # It is no option of the update and would pass the check above; its statistics need the end
        # of a batch.
        if self.deferred_batch_norm and not schedule.synchronous:
            raise SettingError(
                f"deferred_batch_norm: {schedule.name} is asynchronous and begins a batch before "
                "the previous one has ended, so that statistics would mix samples of several "
                "batches. Use a synchronous schedule"
            )
        if self.parameter_groups:
            update_options.append("parameter_groups")
        if update_options and not steps:
            raise SettingError(
                f"{update_options[0]} is an option of the update, and this pipeline has no "
                "optimizer: pass one as optimizer="
            )

    def _check_clipping(self) -> None:
        """Reject invalid options of gradient clipping."""
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise SettingError(
                "clip_grad_norm is the maximum norm of the gradients, above 0, not "
                f"{self.clip_grad_norm}"
            )
        if self.clip_grad_value is not None and not self.clip_grad_value > 0:
            raise SettingError(
                "clip_grad_value is the largest absolute value that a gradient may have, above 0, "
                f"not {self.clip_grad_value}"
            )
        self._check_norm_type()
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise SettingError(
                f"clip_grad_norm={self.clip_grad_norm} and clip_grad_value={self.clip_grad_value}: "
                "give one of them, because the result would depend on their order"
            )

    def _check_norm_type(self) -> None:
        """Reject an invalid order of the gradient norm."""
        if not isinstance(self.clip_norm_type, (int, float)) or math.isnan(self.clip_norm_type):
            raise SettingError(
                "clip_norm_type is the order of the norm, a number such as 2.0, 1.0 or "
                f'float("inf"), not {self.clip_norm_type!r}'
            )
        if self.clip_norm_type != 2.0 and self.clip_grad_norm is None:
            raise SettingError(
                f"clip_norm_type={self.clip_norm_type} is an option of clip_grad_norm=, which is "
                "not given"
            )

    def _check_loss(self, schedule: Schedule, loss: object) -> None:
        """Reject an unreduced loss, and invalid options of its division over micro-batches."""
        if not callable(loss):
            raise SettingError(f"loss must be a function of output and target, not {loss!r}")
        # partial(cross_entropy, reduction="none") hides the option from the look at attributes
        # below.
        while isinstance(loss, partial):
            if loss.keywords.get("reduction") == "none":
                raise SettingError(_UNREDUCED)
            loss = loss.func
        if getattr(loss, "reduction", "mean") == "none":
            raise SettingError(_UNREDUCED)
        weight, on = self.loss_weight, self.loss_on
        if weight is not None and not callable(weight):
            raise SettingError(
                "loss_weight must be a function from the targets of a micro-batch to its weight, "
                f"such as lambda target: (target != -100).sum(), not {weight!r}"
            )
        if on not in ("micro_batch", "batch"):
            raise SettingError(f"loss_on must be 'micro_batch' or 'batch', not {on!r}")
        if on == "batch":
            if weight is not None:
                raise SettingError(
                    "loss_on='batch' computes the loss once, so that loss_weight has no effect: "
                    "give one of them"
                )
            check_joint(schedule)

    def converted(self, traced: TracedChain, micro_batches: int) -> TracedChain:
        """Return the chain with deferred batch norms, if the option is set.

        Args:
            traced: the model.
            micro_batches: number of micro-batches of a batch.

        Raises:
            SettingError: the option is set, and batch norms of a traced model do not defer.
        """
        if not self.deferred_batch_norm:
            return traced
        if traced.variants is not None:
            check_not_traced(traced.roots[0])
        return replace(
            traced, modules=tuple(convert(module, micro_batches) for module in traced.modules)
        )

    def check_compiler(self, device: torch.device) -> None:
        """Raise if stages are to be compiled and there is no C++ compiler.

        Torch would raise in the middle of the first batch.

        Raises:
            SettingError: there is no compiler.
        """
        options = self.compiled
        if (
            options is None
            or options.get("backend", "inductor") != "inductor"
            or device.type != "cpu"
        ):
            return
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None and shutil.which("clang++") is None:
            raise SettingError(
                "compile: torch.compile generates C++ for a stage on a CPU, and there is no "
                f"compiler {compiler!r} here. Install one, or name it in CXX; "
                "compile={'backend': 'aot_eager'} needs none, and is not faster"
            )


def parse_options(values: Mapping[str, Any]) -> TrainingOptions:
    """Return the options of keyword arguments of `Pipeline`.

    Raises:
        TypeError: there is no option of a name.
    """
    valid_names = [entry.name for entry, _ in options_of(TrainingOptions)]
    for name in values:
        # TypeError, as Python raises if a function has no such keyword: the options stand in
        # Pipeline's signature.
        if name not in valid_names:
            raise TypeError(
                f"Pipeline() got an unexpected keyword argument {name!r}; its options of training "
                f"are {', '.join(valid_names)}"
            )
    values = dict(values)
    if values.get("autocast") in _AUTOCAST_DTYPES:
        values["autocast"] = dtype_name(values["autocast"])  # as files hold it
    return TrainingOptions(**values)


def _check_hook(hook: object) -> None:
    """Reject an invalid gradient hook."""
    if isinstance(hook, str):
        with suppress(ValueError):
            parse_hook(hook)
            return
    raise SettingError(
        "gradient_hook is 'none', 'fp16', 'bf16', 'powersgd', or 'powersgd-R' with a rank R from 1 "
        f"to 1024, not {hook!r}"
    )


def check_accumulate(count: object, schedule: Schedule) -> None:
    """Reject an invalid number of batches per optimizer step.

    Raises:
        SettingError: it is not a positive integer; or it is above 1, and the schedule is
            asynchronous.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise SettingError(
            f"accumulate is a number of batches for each step, 1 or more, not {count!r}"
        )
    if count > 1 and not schedule.synchronous:
        raise SettingError(
            f"accumulate={count}: {schedule.name} is asynchronous and updates after every batch, "
            "while later ones are in flight. Use larger batches of more micro-batches instead"
        )
