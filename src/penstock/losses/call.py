"""Calls of the loss function on the last stage.

Moves targets to the device, seeds random numbers, and copies the loss for evaluations that must not
change it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batches.batch import Batch
from penstock.batches.device_batch import TARGETS, device_batch
from penstock.errors import SettingError
from penstock.modules.randomness import drawing, may_draw, seed_generators, stream_seed
from penstock.values.structure import map_tensors, tensors_of

#: The loss's place among the layers, for the seed of what it draws: behind all of them.
_PLACE = 1 << 32

#: Functions of torch.nn.functional that are losses: they draw nothing, and no sample sees another.
_FUNCTIONS = frozenset(
    {
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "cross_entropy",
        "ctc_loss",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "nll_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
    }
)

#: Options of the loss modules of torch on which their divisors depend.
_OPTIONS = ("reduction", "ignore_index", "weight", "label_smoothing")


@dataclass
class LossCall:
    """One loss function on one device.

    Attributes:
        loss: `loss(output, target)`, with its tensors on the device.
        device: the device of the last stage.
        seed: seed of its random numbers, which also depend on the step and the micro-batch.
    """

    loss: Callable[[Any, Any], Any]
    device: torch.device
    seed: int = 0

    def __post_init__(self) -> None:
        self.loss = on_device(self.loss, self.device)
        self.is_torchs = is_torchs_loss(self.loss)
        self.draws = not self.is_torchs
        arguments = self.loss
        # Those of a partial function, which may be nested.
        self._arguments: list[Tensor] = []
        while isinstance(arguments, functools.partial):
            self._arguments += tensors_of((list(arguments.args), dict(arguments.keywords)))
            arguments = arguments.func
        self._on_host = self.device.type == "cpu"
        # Off once a function of the caller has failed on targets in host memory, such as one with
        # a tensor of its own on the device.
        self.reads_host_targets = True

    @property
    def may_use_parameters(self) -> bool:
        """Whether the graph of a loss may lead to weights other than through the model's output."""
        if not self.is_torchs:
            return True
        tensors: Sequence[Tensor | None] = self._arguments
        if isinstance(self.loss, nn.Module):
            # Torch's losses have no submodules. Its iterators over tensors take ten times as long.
            tensors = (*self.loss._parameters.values(), *self.loss._buffers.values())
        return any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def __call__(self, batch: Batch, number: int, value: Any, target: Any) -> Any:
        """Return the loss of a micro-batch or slice; of the whole batch if `number` is -1."""
        if not self.draws:
            return self.loss(value, target)
        with drawing(self.device):
            seed = stream_seed(self.seed, batch.step, _PLACE, number)
            seed_generators(self.device, seed)
            return self.loss(value, target)

    def settings(self) -> object:
        """Return the options of a loss module on which its divisor depends.

        The caller may change them at any time. None if the loss is no module.
        """
        if not isinstance(self.loss, nn.Module):
            return None
        return tuple([_setting(getattr(self.loss, name, None)) for name in _OPTIONS])

    def target(self, batch: Batch, number: int) -> Any:
        """Return the targets of a micro-batch or slice, on the device."""
        assert batch.targets is not None
        if not self._on_host:
            return device_batch(batch, self.device).part(TARGETS, number)
        return self._to_device(batch.targets[number])

    def whole_target(self, batch: Batch) -> Any:
        """Return the targets of the batch, on the device."""
        if not self._on_host:
            return device_batch(batch, self.device).whole(TARGETS)
        return self._to_device(batch.whole[1])

    def host_target(self, batch: Batch, number: int | None) -> Any | None:
        """Return targets in host memory, from which a loss's counts can be read without waiting for
        the device.

        Args:
            batch: the batch.
            number: a micro-batch or slice; None for the whole batch.

        Returns:
            None if the stage is on the CPU, the batch's targets are not in host memory, or
            `reads_host_targets` is off.
        """
        if self._on_host or not self.reads_host_targets:
            return None
        target = batch.whole[1] if number is None else (batch.targets or [])[number]
        return target if all(leaf.is_cpu for leaf in tensors_of(target)) else None

    def _to_device(self, target: Any) -> Any:
        if type(target) is Tensor:
            return target.to(self.device)
        return map_tensors(lambda leaf: leaf.to(self.device), target)

    def untouched(self) -> Callable[[Any, Any], Any]:
        """Return the loss for an evaluation that must not change its state.

        A module is copied, with its buffers and counters.
        """
        loss = getattr(self.loss, "_torchdynamo_orig_callable", self.loss)
        loss = getattr(loss, "_orig_mod", loss)
        if isinstance(loss, nn.Module) and not self.is_torchs:
            with suppress(Exception):  # what cannot be copied is called as it is
                loss = copy.deepcopy(loss)
        return loss


def _setting(value: object) -> object:
    """Return an option of a loss module; of a tensor a mark that differs if it has been changed."""
    if not isinstance(value, Tensor):
        return value
    return id(value), 0 if value.is_inference() else value._version


def is_torchs_loss(loss: object) -> bool:
    """Whether a loss is one of torch's own, unmodified."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    if isinstance(loss, nn.Module):
        return type(loss).__module__ == "torch.nn.modules.loss" and not may_draw(loss)
    name = getattr(loss, "__name__", "")
    return name in _FUNCTIONS and getattr(nn.functional, name, None) is loss


def on_device(loss: Any, device: torch.device) -> Any:
    """Return a loss whose tensors are on the device.

    These are the parameters and buffers of a module, and the arguments of a `functools.partial`.
    The caller's module is not changed.
    """
    if isinstance(loss, nn.Module):
        tensors = [*loss.buffers(), *loss.parameters()]
        if all(tensor.device == device for tensor in tensors):
            return loss
        return copy.deepcopy(loss).to(device)
    if isinstance(loss, functools.partial):
        args, keywords = pytree.tree_map_only(
            Tensor, lambda leaf: leaf.to(device), (loss.args, loss.keywords)
        )
        return functools.partial(on_device(loss.func, device), *args, **keywords)
    return loss


class NotOneNumber(SettingError):
    """Raised when a loss is not a tensor of one number."""


def one_number(loss: Any) -> Tensor:
    """Return a loss as a zero-dimensional tensor.

    Raises:
        NotOneNumber: it is not a tensor, or has several elements.
    """
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        raise NotOneNumber(
            "the loss must be a tensor of one number, such as the mean over the samples it is "
            f"given; this one is {kind}, which has no gradient. Return the tensor itself, without "
            "float(), item() or numpy()"
        )
    if loss.numel() != 1:
        raise NotOneNumber(
            "the loss must be one number, such as the mean over the samples it is given; this one "
            f"is {tuple(loss.shape)}"
        )
    return loss.reshape(()) if loss.dim() else loss
