"""Which layers of a model several ranks cannot hold at once, for its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.measure.passes import named_failure
from penstock.profile.profile import Profile
from penstock.tracing.chain import TracedChain
from penstock.tracing.module_state import ModuleState
from penstock.tracing.moving_state import observe
from penstock.tracing.names import prefix_of
from penstock.tracing.randomness import seed_generators
from penstock.tracing.single_copy import single_copy_reasons


def with_single_copy_reasons(
    profile: Profile, traced: TracedChain, observed: Mapping[int, Sequence[str]] | None = None
) -> Profile:
    """The profile with, per layer, why it cannot have copies.

    Args:
        profile: of the model.
        traced: the model itself: copies of it have lost the hooks of its weights.
        observed: by layer, what `moving_layers` has found.
    """
    reasons: dict[int, tuple[str, ...]] = dict(single_copy_reasons(traced))
    for index, findings in (observed or {}).items():
        reasons[index] = reasons.get(index, ()) + tuple(findings)
    if not reasons:
        return profile
    layers = tuple(
        replace(layer, single_copy_reason="; ".join(reasons.get(index, ())))
        for index, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers)


def moving_layers(
    traced: TracedChain, modules: Sequence[nn.Module], value: Any, device: torch.device
) -> dict[int, tuple[str, ...]]:
    """By layer, the state that its forward reads and changes, found by running every layer once on
    `value`, or what it becomes.
    """
    found: dict[int, tuple[str, ...]] = {}
    for index, (layer, module) in enumerate(zip(traced.layers, modules, strict=True)):
        state = ModuleState(module.named_modules(prefix=prefix_of(layer.name, module)))
        run = partial(_run, module, value, device, index)
        with named_failure(layer.name):
            seen = observe(state, run, run)
        if seen.findings:
            found[index] = seen.findings
        value = pytree.tree_map(_detached, seen.output)
    return found


def _run(module: nn.Module, value: Any, device: torch.device, seed: int) -> Any:
    """The layer's output; the same random numbers at every call."""
    seed_generators(device, seed)
    return module(pytree.tree_map(_fresh, value))


def _fresh(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
