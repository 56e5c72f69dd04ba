"""The weights of all stages under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import SettingError
from penstock.runtime.stage import Stage
from penstock.runtime.world import World
from penstock.tracing.chain import TracedChain
from penstock.tracing.names import parameters_of, state_of
from penstock.transport.payload import TensorForm


class IncompatibleKeys(NamedTuple):
    """Names that `load_state_dict` has passed over, as torch's own result has them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Placed:
    """Which rank holds which layers, and the stages that are held here. A stage with copies counts
    as its first rank's: `home`.

    `local` are all stages held here, `at_home` those of them that are not copies of another rank's.
    `shared` has, by the chain's name, the rank whose tensor counts of those that several stages
    use.
    """

    traced: TracedChain
    lengths: tuple[int, ...]
    home: tuple[int, ...]
    local: Sequence[Stage]
    at_home: Sequence[Stage]
    shared: Mapping[str, int] = field(default_factory=dict)

    def layers_of_rank(self) -> dict[int, list[int]]:
        """Layer indices by the rank that holds them, ascending."""
        placed: dict[int, list[int]] = {}
        first = 0
        for length, rank in zip(self.lengths, self.home, strict=True):
            placed.setdefault(rank, []).extend(range(first, first + length))
            first += length
        return placed


def own(stage: Stage) -> dict[str, Tensor]:
    """A stage's parameters and persistent buffers, live, by the names that the whole model's
    `state_dict` has for them.
    """
    held: dict[str, Tensor] = {}
    for layer in stage.layers:
        held |= state_of(layer.name, layer.module)
    return held


def put(placed: Placed, tensors: Mapping[str, Tensor]) -> None:
    """Copy values into the stages that are held here: into all, or if anything does not fit, into
    none.

    Of a tensor that has several names any of them will do.

    Raises:
        SettingError: a tensor is missing or has another shape.
    """
    _put(placed, tensors, strict=True)


def load(placed: Placed, tensors: Mapping[str, Tensor], *, strict: bool = True) -> IncompatibleKeys:
    """Likewise, from the state of a whole model.

    Args:
        placed: which rank holds what.
        tensors: by the model's names.
        strict: False passes over what is missing, and over names that the model does not have.

    Returns:
        Those names, of the whole model.

    Raises:
        SettingError: a tensor has another shape; or, with `strict`, there are such names.
    """
    aliases = placed.traced.aliases
    names = _names(placed.traced)
    missing = [
        name for name in names if name not in tensors and aliases.get(name, name) not in tensors
    ]
    known = {*names, *aliases}
    unexpected = [name for name in tensors if name not in known]
    if strict and (missing or unexpected):
        raise SettingError(
            "the state is not that of this model: "
            + "; ".join(
                f"it {verb} {_some(listed)}"
                for verb, listed in (
                    ("lacks", missing),
                    ("has, and the model has not,", unexpected),
                )
                if listed
            )
            + _advice(names, unexpected)
        )
    _put(placed, tensors, strict=strict)
    return IncompatibleKeys(missing, unexpected)


def _names(traced: TracedChain) -> list[str]:
    """The names in the whole model's state, in the order of the chain."""
    names = (
        name
        for layer, module in zip(traced.layers, traced.modules, strict=True)
        for name in state_of(layer.name, module)
    )
    return [*dict.fromkeys([*names, *traced.container_names])]


def _some(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _advice(names: Sequence[str], unexpected: Sequence[str]) -> str:
    for prefix in ("module.", "_orig_mod."):
        inner = [name.removeprefix(prefix) for name in unexpected if name.startswith(prefix)]
        if inner and inner[0] in names:
            return f". Take {prefix!r} off its names, which a wrapper of the model has put there"
    return ". With strict=False such names are passed over"


def _put(placed: Placed, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
    pairs = []
    for stage in placed.local:
        for name, target in own(stage).items():
            source = tensors.get(name, tensors.get(placed.traced.aliases.get(name, name)))
            if source is None:
                if not strict:
                    continue
                raise SettingError(f"the state has no {name!r}, which stage {stage.index} needs")
            if source.shape != target.shape:
                raise SettingError(
                    f"{name} has shape {tuple(source.shape)} in the state and {tuple(target.shape)} in the model"
                )
            pairs.append((target, source))
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def counted(placed: Placed, stage: Stage) -> dict[str, Tensor]:
    """Of `own`, what nobody else answers for: each tensor under one name, and what several stages
    use at its home alone.
    """
    rank = placed.home[stage.index]
    return {name: tensor for name, tensor in own(stage).items() if _counts(placed, name, rank)}


def _counts(placed: Placed, name: str, rank: int) -> bool:
    return placed.traced.aliases.get(name, name) == name and placed.shared.get(name, rank) == rank


def collect(world: World, placed: Placed) -> dict[str, Tensor]:
    """All stages' tensors on rank 0, in the order of the chain, under all of their names; elsewhere
    nothing.
    """
    described = _described(placed)
    local: dict[int, dict[str, Tensor]] = {rank: {} for rank in world.local_ranks}
    for stage in placed.at_home:
        local[placed.home[stage.index]] |= counted(placed, stage)
    found = _gathered(world, local, described)
    if not found:
        return {}
    aliases = placed.traced.aliases
    return {name: found[aliases.get(name, name)] for name in _names(placed.traced)}


def collect_grads(world: World, placed: Placed) -> dict[str, Tensor]:
    """The gradients of all trainable parameters on rank 0, by the chain's names; zeros where there
    is none.
    """
    described: dict[int, dict[str, TensorForm]] = {}
    facts = placed.traced.description
    for rank, layers in placed.layers_of_rank().items():
        names = dict.fromkeys(
            name for layer in layers for name in placed.traced.layers[layer].parameters
        )
        chosen = [
            facts.tensor(name)
            for name in names
            if facts.tensor(name).trainable and _counts(placed, name, rank)
        ]
        described[rank] = {
            fact.name: TensorForm(fact.shape, fact.dtype, wants_grad=False) for fact in chosen
        }
    local: dict[int, dict[str, Tensor]] = {rank: {} for rank in world.local_ranks}
    for stage in placed.at_home:
        held = local[placed.home[stage.index]]
        for layer in stage.layers:
            for name, parameter in parameters_of(layer.name, layer.module):
                if name not in described[placed.home[stage.index]]:
                    continue
                grad = parameter.grad
                held.setdefault(
                    name,
                    torch.zeros_like(parameter)
                    if grad is None
                    else grad.to_dense()
                    if grad.is_sparse
                    else grad,
                )
    return _gathered(world, local, described)


def _described(placed: Placed) -> dict[int, dict[str, TensorForm]]:
    """Names and forms of what every rank answers for, known everywhere since everywhere has the
    chain.
    """
    described: dict[int, dict[str, TensorForm]] = {}
    for rank, layers in placed.layers_of_rank().items():
        held: dict[str, Tensor] = {}
        for layer in layers:
            held |= state_of(placed.traced.layers[layer].name, placed.traced.modules[layer])
        described[rank] = {
            name: TensorForm(
                tuple(value.shape), str(value.dtype).removeprefix("torch."), wants_grad=False
            )
            for name, value in held.items()
            if _counts(placed, name, rank)
        }
    return described


def _gathered(
    world: World,
    local: Mapping[int, Mapping[str, Tensor]],
    described: Mapping[int, Mapping[str, TensorForm]],
) -> dict[str, Tensor]:
    """The described tensors of all ranks, on rank 0."""
    rows = {rank: [held[name] for name in described.get(rank, {})] for rank, held in local.items()}
    gathered = world.gather(rows, {rank: list(forms.values()) for rank, forms in described.items()})
    return {
        name: tensor
        for rank, tensors in sorted(gathered.items())
        for name, tensor in zip(described.get(rank, {}), tensors, strict=True)
    }
