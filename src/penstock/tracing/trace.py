"""From a model whose forward is written as its author liked to the layers of a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.tracing.capture import Form
from penstock.tracing.cuts import stack_of
from penstock.tracing.flow import Flow
from penstock.tracing.traced import TracedLayer
from penstock.tracing.variants import Variants


@dataclass(frozen=True)
class Part:
    """A layer: its name, the class of the module that it is made of, the modules it runs, and its
    module.
    """

    name: str
    kind: str
    modules: tuple[str, ...]
    module: nn.Module


def trace(model: nn.Module, example: Any) -> tuple[list[Part], Variants]:
    """Cut a model into the finest chain: a layer for every module with weights of its own.

    Raises:
        ChainError: the model cannot be traced; the message has the line.
    """
    _check_hooks(model)
    names: dict[int, str] = {}
    first: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if nn.parameter.is_lazy(tensor):
            raise ChainError(
                f"{name} has no shape yet: run the model once on an example before it is made a chain"
            )
        first[name] = names.setdefault(id(tensor), name)
        tensors.setdefault(first[name], tensor)
    variants = Variants(model, tensors, first)
    flows = variants.begin(Form.of(example))
    held = _held(model, variants)
    variants.holds = [{first for first, _ in row.values()} for row in held]
    made: list[Part] = []
    taken: dict[str, int] = {}
    for index, (path, _) in enumerate(variants.keys):
        ran = _ran(variants, flows, index)
        base = path or next(iter(ran), "") or type(model).__name__
        taken[base] = taken.get(base, 0) + 1
        name = base if taken[base] == 1 else f"{base}#{taken[base]}"
        kind = type(model.get_submodule(path) if path else model).__name__
        made.append(Part(name, kind, tuple(ran), TracedLayer(index, variants, held[index])))
    return made, variants


def _check_hooks(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ChainError(
                f"{name or type(model).__name__} has hooks on its backward, which a trace does not have: take them off"
            )


def _held(model: nn.Module, variants: Variants) -> list[dict[str, tuple[str, bool]]]:
    """By layer, the names under which it holds tensors, each with the first name of that tensor and
    whether it is part of the state.

    A tensor goes by a name of the module that uses it. What no op uses, but the state has, goes
    where its module's relatives are.
    """
    count = len(variants.keys)
    spellings: dict[str, list[str]] = {}
    for name, first in variants.names.items():
        spellings.setdefault(first, []).append(name)
    state = {
        name
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    users: list[dict[str, str]] = [{} for _ in range(count)]
    for variant in variants.all():
        for layer, segment in enumerate(variant.segments):
            for node in segment.weights:
                first = variant.flow.weights[node]
                users[layer].setdefault(
                    first, _spelling(spellings[first], segment.ops, variant.flow, node)
                )
    for first in variants.tensors:
        layers = [layer for layer, used in enumerate(users) if first in used]
        if len(layers) == 1:
            variants.home[first] = layers[0]
    held: list[dict[str, tuple[str, bool]]] = [{} for _ in range(count)]
    for layer, used in enumerate(users):
        for first, name in used.items():
            held[layer][name] = (
                first,
                isinstance(variants.tensors[first], nn.Parameter) or name in state,
            )
    placed = {name for row in held for name in row}
    home = {name: layer for layer, row in enumerate(held) for name in row}
    for name, first in variants.names.items():
        if name not in placed and name in state:
            user = next((layer for layer, used in enumerate(users) if first in used), None)
            held[_relative(name, home) if user is None else user][name] = first, True
    return held


def _spelling(names: Sequence[str], ops: range, flow: Flow, node: Any) -> str:
    """Of a tensor's names, that of a module that uses it here."""
    if len(names) == 1:
        return names[0]
    paths = [
        path
        for index in ops
        if node in flow.order[index].all_input_nodes
        for _, path in reversed(stack_of(flow.order[index]))
    ]
    return next(
        (name for path in paths for name in names if path and name.startswith(f"{path}.")), names[0]
    )


def _relative(name: str, home: Mapping[str, int]) -> int:
    """The layer with the tensor whose name has most of its beginning in common."""
    parts = name.split(".")

    def shared(other: str) -> int:
        alike = 0
        for one, two in zip(parts, other.split("."), strict=False):
            if one != two:
                break
            alike += 1
        return alike

    best = max(home, key=shared, default=None)
    return 0 if best is None else home[best]


def _ran(variants: Variants, flows: Sequence[Flow], layer: int) -> list[str]:
    """The modules that a layer's ops run in, innermost ones, in order."""
    found: dict[str, None] = {}
    for variant, flow in zip(variants.all(), flows, strict=False):
        for index in variant.segments[layer].ops:
            stack = stack_of(flow.order[index])
            if stack and stack[-1][1]:
                found.setdefault(stack[-1][1])
    return list(found)
