"""Parameters, buffers and gradients of all stages under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.files.text import join_names
from penstock.modules.state_names import parameters_of, state_of
from penstock.ranks.world import World
from penstock.stage.stage import Stage
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.payload import TensorForm
from penstock.values.constants import dtype_name
from penstock.values.sharded import copy_whole, is_sharded, whole


class IncompatibleKeys(NamedTuple):
    """The names that `load_state_dict` has skipped, as in torch's own result."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Placed:
    """The placement of layers and stages on ranks.

    Attributes:
        traced: the chain.
        lengths: the number of layers of each stage.
        home: the rank of each stage; of a stage with replicas the first rank.
        local: all stages of this process.
        at_home: those of them that are not replicas of another rank's stage.
        shared: for tensors that several stages use, the rank whose tensor counts, by the chain's
            name.
    """

    traced: TracedChain
    lengths: tuple[int, ...]
    home: tuple[int, ...]
    local: Sequence[Stage]
    at_home: Sequence[Stage]
    shared: Mapping[str, int] = field(default_factory=dict)

    def is_home(self, stage: Stage) -> bool:
        """Whether a local stage is no replica of another rank's stage."""
        return any(stage is home for home in self.at_home)

    def layers_of_rank(self) -> dict[int, list[int]]:
        """Return the ascending indices of the layers of each rank."""
        layers: dict[int, list[int]] = {}
        first = 0
        for length, rank in zip(self.lengths, self.home, strict=True):
            layers.setdefault(rank, []).extend(range(first, first + length))
            first += length
        return layers


def stage_tensors(stage: Stage) -> dict[str, Tensor]:
    """Return a stage's live parameters and persistent buffers.

    Their names are those in the whole model's `state_dict`.
    """
    tensors: dict[str, Tensor] = {}
    for layer in stage.layers:
        tensors |= state_of(layer.name, layer.module)
    return tensors


def copy_into_stages(placed: Placed, tensors: Mapping[str, Tensor]) -> None:
    """Copy values into all stages of this process, or into none if any does not fit.

    Args:
        placed: the placement of the stages.
        tensors: values by name. For a tensor with several names the first in the chain suffices.

    Raises:
        SettingError: a tensor is missing or has another shape.
    """
    _copy(placed, tensors, strict=True)


def load(placed: Placed, tensors: Mapping[str, Tensor], *, strict: bool = True) -> IncompatibleKeys:
    """Copy the state of a whole model into the stages of this process.

    Args:
        placed: the placement of the stages.
        tensors: values by the model's names.
        strict: whether to refuse missing and unexpected names; else they are skipped.

    Returns:
        The missing and unexpected names, of the whole model.

    Raises:
        SettingError: a tensor has another shape; or, with `strict`, names are missing or
            unexpected. Nothing has changed.
    """
    traced = placed.traced
    names = state_names(traced)
    missing = [
        name for name in names if name not in tensors and traced.first_name(name) not in tensors
    ]
    accepted = set(names)
    unexpected = [name for name in tensors if name not in accepted]
    if strict and (missing or unexpected):
        mismatch = _describe_mismatch(missing, unexpected)
        advice = _advice(names, unexpected)
        raise SettingError(f"the state is not that of this model: {mismatch}{advice}")
    _copy(placed, tensors, strict=strict)
    return IncompatibleKeys(missing, unexpected)


def state_names(traced: TracedChain) -> list[str]:
    """Return the names in the whole model's state, in the order of the chain."""
    names = (
        name
        for layer, module in zip(traced.layers, traced.modules, strict=True)
        for name in state_of(layer.name, module)
    )
    return [*dict.fromkeys([*names, *traced.container_names])]


def _describe_mismatch(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Describe missing and unexpected names of a state."""
    mismatches = []
    if missing:
        mismatches.append(f"it has no {join_names(list(map(repr, missing)))}")
    if unexpected:
        mismatches.append(f"the model has no {join_names(list(map(repr, unexpected)))}")
    return "; ".join(mismatches)


def _advice(names: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return advice for a state whose names do not fit the model's `names`."""
    for prefix in ("module.", "_orig_mod."):
        inner = [name.removeprefix(prefix) for name in unexpected if name.startswith(prefix)]
        if inner and inner[0] in names:
            return f". Take {prefix!r} off its names, which a wrapper of the model has put there"
    return ". With strict=False such names are skipped"


def _copy(placed: Placed, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
    """Copy values into the stages of this process; with `strict`, none may be missing.

    Raises:
        SettingError: a tensor is missing or has another shape. Nothing has changed.
    """
    pairs = []
    for stage in placed.local:
        for name, target in stage_tensors(stage).items():
            source = tensors.get(name, tensors.get(placed.traced.first_name(name)))
            if source is None:
                if not strict:
                    continue
                raise SettingError(f"the state has no {name!r}, which stage {stage.index} needs")
            if source.shape != target.shape:
                raise SettingError(
                    f"{name} has shape {tuple(source.shape)} in the state and "
                    f"{tuple(target.shape)} in the model"
                )
            pairs.append((target, source))
    # Only when all pairs have been checked: a state that does not fit changes nothing.
    with torch.no_grad():
        for target, source in pairs:
            copy_whole(target, source)


def owned_tensors(placed: Placed, stage: Stage, rank: int | None = None) -> dict[str, Tensor]:
    """Return those tensors of a stage that count in the model's state, as wholes.

    Each tensor has one name, and one that several stages use is in that of its home alone.
    Processes that share the stage call it in the same order, since wholes are gathered.

    Args:
        placed: the placement of the stages.
        stage: the stage.
        rank: the rank that holds it; by default its home.
    """
    if rank is None:
        rank = placed.home[stage.index]
    return {
        name: whole(tensor)
        for name, tensor in stage_tensors(stage).items()
        if _is_owned(placed, name, rank)
    }


def _is_owned(placed: Placed, name: str, rank: int) -> bool:
    """Whether a rank's tensor counts under this name."""
    return placed.traced.first_name(name) == name and placed.shared.get(name, rank) == rank


def collect(world: World, placed: Placed) -> dict[str, Tensor]:
    """Return the whole model's parameters and buffers on rank 0.

    Returns:
        Tensors under all of their names, in the order of the chain; empty on all other ranks.
    """
    forms = _owned_forms(placed)
    local: dict[int, dict[str, Tensor]] = {rank: {} for rank in world.local_ranks}
    for stage in placed.local:
        # Replicas take part in gathering a shared tensor, and only the home sends the whole.
        if placed.is_home(stage) or any(map(is_sharded, stage.tensors())):
            tensors = owned_tensors(placed, stage)
            if placed.is_home(stage):
                local[placed.home[stage.index]] |= tensors
    gathered = _gather(world, local, forms)
    if not gathered:
        return {}
    traced = placed.traced
    return {name: gathered[traced.first_name(name)] for name in state_names(traced)}


def collect_grads(world: World, placed: Placed) -> dict[str, Tensor]:
    """Return the gradients of all trainable parameters on rank 0.

    Returns:
        Dense gradients by the chain's names, zeros for parameters without a gradient; empty on all
        other ranks.
    """
    forms = _grad_forms(placed)
    local: dict[int, dict[str, Tensor]] = {rank: {} for rank in world.local_ranks}
    for stage in placed.at_home:
        rank = placed.home[stage.index]
        for layer in stage.layers:
            for name, parameter in parameters_of(layer.name, layer.module):
                if name in forms[rank] and name not in local[rank]:
                    local[rank][name] = _dense_grad(parameter)
    return _gather(world, local, forms)


def _dense_grad(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient as a dense tensor, zeros if it has none."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.to_dense() if grad.is_sparse else grad


def _grad_forms(placed: Placed) -> dict[int, dict[str, TensorForm]]:
    """Return the forms of the gradients that each rank sends, by parameter name."""
    facts = placed.traced.description
    forms: dict[int, dict[str, TensorForm]] = {}
    for rank, layers in placed.layers_of_rank().items():
        forms[rank] = {}
        for layer in layers:
            for name in placed.traced.layers[layer].parameters:
                fact = facts.tensor(name)
                if fact.trainable and _is_owned(placed, name, rank):
                    forms[rank][fact.name] = TensorForm(fact.shape, fact.dtype, wants_grad=False)
    return forms


def _owned_forms(placed: Placed) -> dict[int, dict[str, TensorForm]]:
    """Return the forms of the tensors that count of each rank, by name.

    Every rank can compute them, since every rank has the chain.
    """
    forms: dict[int, dict[str, TensorForm]] = {}
    for rank, layers in placed.layers_of_rank().items():
        tensors: dict[str, Tensor] = {}
        for layer in layers:
            tensors |= state_of(placed.traced.layers[layer].name, placed.traced.modules[layer])
        forms[rank] = {
            name: TensorForm(tuple(tensor.shape), dtype_name(tensor.dtype), wants_grad=False)
            for name, tensor in tensors.items()
            if _is_owned(placed, name, rank)
        }
    return forms


def _gather(
    world: World,
    local: Mapping[int, Mapping[str, Tensor]],
    forms: Mapping[int, Mapping[str, TensorForm]],
) -> dict[str, Tensor]:
    """Gather the tensors of all ranks on rank 0.

    Args:
        world: the ranks.
        local: the tensors of the ranks of this process, by name.
        forms: the forms of the tensors of every rank, by name, in the order of sending.
    """
    rows = {}
    for rank, tensors in local.items():
        rows[rank] = [tensors[name] for name in forms.get(rank, {})]
    row_forms = {rank: list(rank_forms.values()) for rank, rank_forms in forms.items()}
    gathered = world.gather(rows, row_forms)
    merged: dict[str, Tensor] = {}
    for rank, received in sorted(gathered.items()):
        merged.update(zip(forms.get(rank, {}), received, strict=True))
    return merged
