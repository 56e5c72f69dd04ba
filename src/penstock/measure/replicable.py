"""Find the layers of a model that cannot be replicated on several ranks, for its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.measure.timed_passes import named_failure
from penstock.modules.module_state import ModuleState
from penstock.modules.randomness import seed_generators
from penstock.modules.state_names import prefix_of
from penstock.profile.profile import Profile
from penstock.tracing.moving_state import observe
from penstock.tracing.single_copy import single_copy_reasons
from penstock.tracing.traced_chain import TracedChain


def with_single_copy_reasons(
    profile: Profile, traced: TracedChain, observed: Mapping[int, Sequence[str]] | None = None
) -> Profile:
    """Return the profile with, per layer, the reason why it cannot be replicated.

    Args:
        profile: of the model.
        traced: the model itself, since copies of it have lost the hooks of its weights.
        observed: by layer, the result of `moving_layers`.
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
    """Return by layer the state that its forward both reads and changes.

    Runs every layer on `value`, or what the layers before make of it.
    """
    findings_of_layer: dict[int, tuple[str, ...]] = {}
    for index, (layer, module) in enumerate(zip(traced.layers, modules, strict=True)):
        state = ModuleState(module.named_modules(prefix=prefix_of(layer.name, module)))
        run = partial(_run, module, value, device, index)
        with named_failure(layer.name):
            observation = observe(state, run, run)
        if observation.findings:
            findings_of_layer[index] = observation.findings
        value = pytree.tree_map_only(Tensor, Tensor.detach, observation.output)
    return findings_of_layer


def _run(module: nn.Module, value: Any, device: torch.device, seed: int) -> Any:
    """Return the layer's output, with the same random numbers in every call.

    `observe` compares two calls: dropout must not look like state that moves.
    """
    seed_generators(device, seed)
    return module(pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), value))
