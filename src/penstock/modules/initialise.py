"""Initial values for tensors of a model on the meta device, by its own modules' methods.

A tensor is initialised by `reset_parameters` of the module that has it, then by `_init_weights` of
the model around it, as in the transformers library. Both run on a copy of the model in which only
these tensors have memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ChainError


def initial_values(
    skeleton: nn.Module,
    names: Mapping[str, str],
    meta_tensors: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Allocate and initialise some tensors.

    Args:
        skeleton: the model on the meta device; it is not changed.
        names: for every name of a tensor its first name.
        meta_tensors: by first name, the tensors to initialise, on the meta device.
        device: where they are allocated. Its generators have been seeded by the caller.

    Returns:
        The initialised tensors, by first name.

    Raises:
        ChainError: no method initialises one of them.
    """
    if not meta_tensors:
        return {}
    model = copy.deepcopy(skeleton)
    fresh = {first: _unset_copy(tensor, device) for first, tensor in meta_tensors.items()}
    owners = _insert(model, names, fresh)
    with torch.no_grad():
        _initialise(model, owners)
    for first, tensor in fresh.items():
        if not _is_set(tensor):
            owner = model.get_submodule(first.rpartition(".")[0])
            raise ChainError(
                f"{first} ({type(owner).__name__}) is on the meta device, and neither "
                "reset_parameters() of its module nor _init_weights() of the model gives it "
                "values. Write one that does, or build the model on a real device"
            )
    return fresh


def _insert(model: nn.Module, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[str]:
    """Put tensors into a model under all their names; return the paths of their modules."""
    owners: dict[str, None] = {}
    for name, first in names.items():
        if first not in tensors:
            continue
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        is_parameter = key in module._parameters
        members: dict[str, Any] = module._parameters if is_parameter else module._buffers
        members[key] = tensors[first]
        # Under its first name alone: a tied tensor is initialised once, by one module.
        if name == first:
            owners[path] = None
    return list(owners)


def _initialise(model: nn.Module, owners: Sequence[str]) -> None:
    """Call the methods that initialise the tensors of some modules."""
    resetting: set[str] = set()
    for owner in owners:
        resetting.update(_resetting_modules(model, owner))
    for path in _innermost_first(owners):
        if path in resetting:
            _reset_method(model.get_submodule(path))()
    # After all resets, as in transformers: `_init_weights` replaces torch's default values.
    for path in _innermost_first(owners):
        model_part = _initialiser(model, path)
        if model_part is not None:
            model_part._init_weights(model.get_submodule(path))


def _unset_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate memory filled with a marker: not a number, or the smallest integer.

    A tensor that still has the marker afterwards was not initialised.
    """
    empty: Tensor = torch.empty_like(tensor, device=device)
    if empty.is_floating_point() or empty.is_complex():
        empty.fill_(float("nan"))
    elif empty.dtype is not torch.bool:
        empty.fill_(torch.iinfo(empty.dtype).min)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_set(tensor: Tensor) -> bool:
    """Return whether a tensor has other values than the marker of `_unset_copy`.

    Booleans have no value left for a marker: they count as set.
    """
    if tensor.dtype is torch.bool or tensor.numel() == 0:
        return True
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return not bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _reset_method(module: nn.Module) -> Any:
    """Return the method that initialises a module's own tensors; None if it has none."""
    # Some modules of torch, such as nn.MultiheadAttention, have only the private name.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _resetting_modules(model: nn.Module, owner: str) -> Iterator[str]:
    """Yield the paths of the modules whose reset initialises the tensors of a module.

    It is the module itself, or the closest module around it that has a reset. In addition, torch's
    transformer initialises the tensors of all its submodules again.
    """
    has_reset = False
    for path in _enclosing_paths(owner):
        module = model.get_submodule(path)
        if _reset_method(module) is not None and (
            not has_reset or isinstance(module, nn.Transformer)
        ):
            has_reset = True
            yield path


def _enclosing_paths(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it, up to the model."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        yield ".".join(parts[:length])


def _innermost_first(paths: Sequence[str]) -> list[str]:
    """Return paths with those of all modules around them, innermost first.

    The order matters: a block may initialise its last projection differently than that module does
    by itself.
    """
    all_paths: dict[str, None] = {}
    for path in paths:
        all_paths.update(dict.fromkeys(_enclosing_paths(path)))
    return sorted(all_paths, key=_depth, reverse=True)


def _depth(path: str) -> int:
    """Return the number of modules around the module at a path."""
    return path.count(".") + 1 if path else 0


def _initialiser(model: nn.Module, path: str) -> Any:
    """Return the innermost module around a path, or at it, that has `_init_weights`; else None."""
    for outer_path in _enclosing_paths(path):
        module = model.get_submodule(outer_path)
        if callable(getattr(module, "_init_weights", None)):
            return module
    return None
