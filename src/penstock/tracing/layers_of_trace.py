"""Division of a model with an arbitrary forward into the layers of a chain."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.tracing.cuts import stack_of
from penstock.tracing.flow import Flow
from penstock.tracing.form import Form
from penstock.tracing.traced_layer import TracedLayer
from penstock.tracing.variants import Variants


@dataclass(frozen=True)
class Part:
    """A layer before the chain is made.

    Attributes:
        name: its name.
        kind: class of the module from which it has its name.
        modules: the modules that it runs.
        module: the module that runs the layer.
    """

    name: str
    kind: str
    modules: tuple[str, ...]
    module: nn.Module


def trace(model: nn.Module, example: Any) -> tuple[list[Part], Variants]:
    """Divide a model into as many layers as possible: one for every module with weights of its own.

    Args:
        model: the model.
        example: its inputs, see `chain`.

    Returns:
        The layers, and the graphs that they run.

    Raises:
        ChainError: the model cannot be traced; the message has the line.
    """
    _check_hooks(model)
    tensors, first_names = _named_tensors(model)
    variants = Variants(model, tensors, first_names)
    flows = variants.begin(Form.of(example))
    used_names = _names_by_layer(variants)
    variants.home = _single_users(used_names)
    layer_tensors = _assign_tensors(model, variants, used_names)
    holds = []
    for tensors_by_name in layer_tensors:
        holds.append({first for first, _ in tensors_by_name.values()})
    # The graphs of the example define the layers: graphs captured later may use no other tensors.
    variants.holds = holds
    parts: list[Part] = []
    occurrences: dict[str, int] = {}
    for index, (path, _) in enumerate(variants.keys):
        modules = _modules_of(variants, flows, index)
        base = path or next(iter(modules), "") or type(model).__name__
        occurrences[base] = occurrences.get(base, 0) + 1
        # A module that is called twice is two layers.
        name = base if occurrences[base] == 1 else f"{base}#{occurrences[base]}"
        kind = type(model.get_submodule(path) if path else model).__name__
        layer = TracedLayer(index, variants, layer_tensors[index])
        parts.append(Part(name, kind, tuple(modules), layer))
    return parts, variants


def _named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return parameters and buffers by their first names, and the first name for every name.

    Raises:
        ChainError: a tensor has no shape yet.
    """
    tensors: dict[str, Tensor] = {}
    first_names: dict[str, str] = {}
    name_of: dict[int, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if nn.parameter.is_lazy(tensor):
            raise ChainError(
                f"{name} has no shape yet: run the model once on an example before it is made a "
                "chain"
            )
        first_names[name] = name_of.setdefault(id(tensor), name)
        tensors.setdefault(first_names[name], tensor)
    return tensors, first_names


def _check_hooks(model: nn.Module) -> None:
    """Reject hooks on backwards of modules, which a trace does not run."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ChainError(
                f"{name or type(model).__name__} has hooks on its backward, which a trace does "
                "not have: take them off"
            )


def _single_users(used_names: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Return, by the first name of a tensor, the layer that uses it; without tied tensors, which
    belong to several layers, so that their ops may be in any of them.
    """
    users: dict[str, list[int]] = {}
    for layer, names in enumerate(used_names):
        for first in names:
            users.setdefault(first, []).append(layer)
    return {first: layers[0] for first, layers in users.items() if len(layers) == 1}


def _assign_tensors(
    model: nn.Module, variants: Variants, used_names: Sequence[Mapping[str, str]]
) -> list[dict[str, tuple[str, bool]]]:
    """Return for each layer the names under which it has tensors.

    Each name has the first name of the tensor in the model, and whether it is part of the
    `state_dict`. A layer uses a name of the module that uses the tensor. A tensor that no op uses,
    but that is in the `state_dict`, belongs to the layer whose tensors have the most similar name.

    Args:
        model: the model.
        variants: its graphs.
        used_names: see `_names_by_layer`.
    """
    state = model.state_dict(keep_vars=True)
    persistent = {name for name, value in state.items() if isinstance(value, Tensor)}
    assigned: list[dict[str, tuple[str, bool]]] = [{} for _ in used_names]
    layer_of_name: dict[str, int] = {}
    first_user: dict[str, int] = {}
    for layer, names in enumerate(used_names):
        for first, name in names.items():
            is_parameter = isinstance(variants.tensors[first], nn.Parameter)
            assigned[layer][name] = (first, is_parameter or name in persistent)
            layer_of_name[name] = layer
            first_user.setdefault(first, layer)
    for name, first in variants.names.items():
        # What is left is an alias of a used tensor, or a tensor that no op uses.
        if name in persistent and name not in layer_of_name:
            user = first_user.get(first)
            layer = _most_similar(name, layer_of_name) if user is None else user
            assigned[layer][name] = first, True
    return assigned


def _names_by_layer(variants: Variants) -> list[dict[str, str]]:
    """Return the tensors that each layer uses.

    For each tensor, by its first name: a name that belongs to a module that uses it.
    """
    all_names: dict[str, list[str]] = {}
    for name, first in variants.names.items():
        all_names.setdefault(first, []).append(name)
    names_by_layer: list[dict[str, str]] = [{} for _ in variants.keys]
    for variant in variants.all():
        for layer, segment in enumerate(variant.segments):
            for node in segment.weights:
                first = variant.flow.weights[node]
                name = _name_of_user(all_names[first], segment.ops, variant.flow, node)
                names_by_layer[layer].setdefault(first, name)
    return names_by_layer


def _name_of_user(names: Sequence[str], ops: range, flow: Flow, node: Any) -> str:
    """Return that of a tensor's names which belongs to a module that uses the tensor in `ops`."""
    if len(names) == 1:
        return names[0]
    users = [flow.order[index] for index in ops if node in flow.order[index].all_input_nodes]
    # Innermost modules first.
    paths = [path for user in users for _, path in reversed(stack_of(user)) if path]
    matches = (name for path in paths for name in names if name.startswith(f"{path}."))
    return next(matches, names[0])


def _most_similar(name: str, layer_of_name: Mapping[str, int]) -> int:
    """Return the layer with the tensor whose name has the longest prefix in common with `name`."""
    parts = name.split(".")

    def common_length(other_name: str) -> int:
        """Return how many first parts a name has in common with the given one."""
        # Of two lists it compares the items.
        return len(os.path.commonprefix([parts, other_name.split(".")]))  # noqa: RUF071

    best = max(layer_of_name, key=common_length, default=None)
    return 0 if best is None else layer_of_name[best]


def _modules_of(variants: Variants, flows: Sequence[Flow], layer: int) -> list[str]:
    """Return the innermost modules in which a layer's ops run, in order."""
    paths: dict[str, None] = {}
    for variant, flow in zip(variants.all(), flows, strict=False):
        for index in variant.segments[layer].ops:
            stack = stack_of(flow.order[index])
            if stack and stack[-1][1]:
                paths.setdefault(stack[-1][1])
    return list(paths)
