"""First values for tensors of a model on the meta device, by its own modules' ways to draw them.

A tensor gets them from `reset_parameters` of the module that has it, then from `_init_weights` of
the model around it, as models of transformers have it; both run on a copy of the model of which
nothing else is real.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ChainError


def drawn(
    skeleton: nn.Module,
    names: Mapping[str, str],
    wanted: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Memory with values for some tensors.

    Args:
        skeleton: the model on the meta device; stays as it is.
        names: of every name of a tensor, the first.
        wanted: by first name, what is to be drawn, as it is on the meta device.
        device: where the memory is. Its generators are seeded.

    Raises:
        ChainError: nothing gives one of them a value.
    """
    if not wanted:
        return {}
    model = copy.deepcopy(skeleton)
    fresh = {first: _unset(tensor, device) for first, tensor in wanted.items()}
    owners: dict[str, None] = {}
    for name, first in names.items():
        if first in fresh:
            path, _, key = name.rpartition(".")
            owner = model.get_submodule(path)
            holder: dict[str, Any] = (
                owner._parameters if key in owner._parameters else owner._buffers
            )
            holder[key] = fresh[first]
            if name == first:
                owners[path] = None
    with torch.no_grad():
        resetting = {path for owner in owners for path in _resetting(model, owner)}
        for path in _upwards(owners):
            if path in resetting:
                _reset_of(model.get_submodule(path))()
        for path in _upwards(owners):
            whole = _initialiser(model, path)
            if whole is not None:
                whole._init_weights(model.get_submodule(path))
    for first, tensor in fresh.items():
        if not _is_set(tensor):
            owner = model.get_submodule(first.rpartition(".")[0])
            raise ChainError(
                f"{first} ({type(owner).__name__}) is on the meta device, and neither reset_parameters() of its module nor _init_weights() of "
                "the model gives it values. Write one that does, or build the model on a real device"
            )
    return fresh


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory whose content tells whether anybody has written there: not a number, or the least
    whole number.
    """
    empty: Tensor = torch.empty_like(tensor, device=device)
    if empty.is_floating_point() or empty.is_complex():
        empty.fill_(float("nan"))
    elif empty.dtype is not torch.bool:
        empty.fill_(torch.iinfo(empty.dtype).min)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_set(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool or tensor.numel() == 0:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return not bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _reset_of(module: nn.Module) -> Any:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _resetting(model: nn.Module, owner: str) -> Iterator[str]:
    """Whose reset draws the tensors of a module: its own, or that of the next module around it that
    has one; and torch's transformer draws those of all its parts once more.
    """
    found = False
    for path in _around(owner):
        module = model.get_submodule(path)
        if _reset_of(module) is not None and (not found or isinstance(module, nn.Transformer)):
            found = True
            yield path


def _around(path: str) -> Iterator[str]:
    """A module and those around it, outwards to the model."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        yield ".".join(parts[:length])


def _upwards(paths: Mapping[str, None]) -> Iterator[str]:
    """Some modules and all around them, inner ones first: a block may draw its last projection in
    another way than others.
    """
    found = dict.fromkeys(around for path in paths for around in _around(path))
    yield from sorted(found, key=lambda each: -(each.count(".") + (each != "")))


def _initialiser(model: nn.Module, path: str) -> Any:
    """The innermost module around a path, itself included, that says how weights are drawn."""
    return next(
        (
            module
            for each in _around(path)
            if callable(getattr(module := model.get_submodule(each), "_init_weights", None))
        ),
        None,
    )
