"""Optimizer state of all stages in the form of one plain PyTorch optimizer over the whole model.

Parameters are numbered as torch numbers them: group by group, and within a group in the order of
`model.parameters()`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoint.optimizer_checkpoint import optimizer_state
from penstock.errors import SettingError
from penstock.optim.optimizer_state import PARAMETER_SHAPED
from penstock.runtime.assembly import Assembly
from penstock.stage.stage import Stage
from penstock.transport.payload import TensorForm
from penstock.values.constants import dtype_name

#: Tensors of optimizer state by parameter name and key.
_StateTensors = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Numbering:
    """The parameters of the whole optimizer, in the order of their numbers.

    Attributes:
        groups: for each parameter group the names of its parameters in the chain.
    """

    groups: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> list[str]:
        """The names in the order of their numbers."""
        return [name for group in self.groups for name in group]

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter by name."""
        return {name: number for number, name in enumerate(self.names)}


@dataclass(frozen=True)
class _Part:
    """A JSON-serialisable description of one rank's optimizers.

    Attributes:
        groups: for each parameter group the names of its parameters.
        options: the options of each group as JSON.
        forms: by parameter and key, shape and dtype of the tensors of the state.
        values: by parameter and key, the plain values of the state.
    """

    groups: list[list[str]]
    options: list[str]
    forms: dict[str, dict[str, tuple[list[int], str]]]
    values: dict[str, dict[str, Any]]

    def tensor_forms(self) -> list[TensorForm]:
        """Return the forms of all tensors, in the order in which they are sent."""
        return [
            TensorForm(tuple(shape), dtype, wants_grad=False)
            for forms in self.forms.values()
            for shape, dtype in forms.values()
        ]

    def tensor_keys(self) -> list[tuple[str, str]]:
        """Return parameter name and key of all tensors, in the same order."""
        return [(name, key) for name, forms in self.forms.items() for key in forms]


def collect(assembly: Assembly) -> dict[str, Any]:
    """Return the state of the whole optimizer on rank 0. Every rank must call it.

    Returns:
        The state with tensors on the CPU; an empty dictionary on all other ranks.

    Raises:
        SettingError: there is no optimizer; the stages' optimizers have different groups or
            options; or an optimizer keeps something else than tensors and plain values.
    """
    optimizers = assembly.optimizers()
    tensors, local_parts = _local_parts(assembly)
    parts = _exchange(assembly, local_parts)
    numbering = _numbering(assembly, parts)
    rows = {}
    for rank, part in local_parts.items():
        rows[rank] = [tensors[rank][name, key] for name, key in part.tensor_keys()]
    forms = {rank: part.tensor_forms() for rank, part in parts.items()}
    gathered = assembly.world.gather(rows, forms)
    if not gathered:
        return {}
    numbers = numbering.numbers
    state: dict[int, dict[str, Any]] = {}
    for rank, part in parts.items():
        received = iter(gathered.get(rank, ()))
        for name, tensor_forms in part.forms.items():
            state[numbers[name]] = {key: next(received) for key in tensor_forms}
            state[numbers[name]] |= part.values[name]
    groups = _whole_groups(numbering, optimizers[0])
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _whole_groups(numbering: Numbering, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of the whole optimizer, with the options of a stage's."""
    first = 0
    groups = []
    for members, group in zip(numbering.groups, optimizer.param_groups, strict=True):
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append(options | {"params": list(range(first, first + len(members)))})
        first += len(members)
    return groups


def restore(assembly: Assembly, state: Mapping[str, Any]) -> None:
    """Restore the options and states of this process's optimizers from a whole optimizer's state.

    Args:
        assembly: the ranks of this process.
        state: the `state_dict` of a plain PyTorch optimizer over the whole model.

    Raises:
        SettingError: as for `collect`; or the state is not of an optimizer over these parameters.
            Nothing has changed.
    """
    optimizers = assembly.optimizers()
    _, local_parts = _local_parts(assembly, with_state=False)
    numbering = _numbering(assembly, _exchange(assembly, local_parts))
    groups = _checked_groups(assembly, numbering, state)
    numbers = numbering.numbers
    saved_keys = _parameter_keys(groups)
    for stage in assembly.stages:
        if stage.update.optimizer is None:
            continue
        names = _names_by_id(assembly, stage)
        rows = []
        for group in stage.update.optimizer.param_groups:
            members = [names[id(parameter)] for parameter in group["params"]]
            rows.append([saved_keys[numbers[name]] for name in members])
        stage.update.optimizer.load_state_dict(_part_of_state(state, groups, rows))
    for optimizer in optimizers:
        # Optimizers without a stage exist on ranks without parameters, for the learning rate.
        if not any(optimizer is stage.update.optimizer for stage in assembly.stages):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(_options(saved))


def _parameter_keys(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the saved numbers of all parameters, in the order of the groups."""
    return [key for group in groups for key in group["params"]]


def _names_by_id(assembly: Assembly, stage: Stage) -> dict[int, str]:
    """Return the names of a stage's parameters by their `id`."""
    return {id(parameter): name for parameter, name in assembly.names(stage).items()}


def _part_of_state(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """Copy the part of a whole optimizer's state for the parameters of one stage, renumbered.

    Args:
        state: the whole state.
        groups: its parameter groups.
        rows: for each group, the saved numbers of the stage's parameters.
    """
    saved_keys: dict[int, Any] = {}
    stage_groups = []
    for group, row in zip(groups, rows, strict=True):
        numbers = range(len(saved_keys), len(saved_keys) + len(row))
        saved_keys.update(zip(numbers, row, strict=True))
        stage_groups.append({**_options(group), "params": list(numbers)})
    # Copied: replicas in this process, and the caller, must not share the tensors.
    stage_state = {
        number: copy.deepcopy(state["state"][key])
        for number, key in saved_keys.items()
        if key in state["state"]
    }
    return {"state": stage_state, "param_groups": stage_groups}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the options of a group, without the names of the whole model's parameters."""
    return {
        key: copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _checked_groups(
    assembly: Assembly, numbering: Numbering, state: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Check that a state fits the whole optimizer, and return its parameter groups.

    Raises:
        SettingError: the groups have other sizes, or a tensor has another shape.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        received = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise SettingError(
            "load_optimizer_state_dict() takes the state_dict() of a torch.optim optimizer, with "
            f"'state' and 'param_groups', not {received}"
        )
    groups: list[Mapping[str, Any]] = list(state["param_groups"])
    saved_sizes = [len(group["params"]) for group in groups]
    sizes = [len(group) for group in numbering.groups]
    if saved_sizes != sizes:
        raise SettingError(
            "the state is of an optimizer whose parameter groups have "
            f"{_join_counts(saved_sizes)} parameters; this pipeline's have {_join_counts(sizes)}"
        )
    _check_shapes(assembly, numbering, groups, state["state"])
    return groups


def _check_shapes(
    assembly: Assembly,
    numbering: Numbering,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Mapping[str, Any]],
) -> None:
    """Check that saved tensors have the shapes of their parameters.

    Args:
        assembly: the ranks of this process.
        numbering: the parameters of the pipeline.
        groups: the saved parameter groups.
        states: the saved state by saved number.

    Raises:
        SettingError: a tensor has another shape.
    """
    shapes = {fact.name: tuple(fact.shape) for fact in assembly.traced.description.tensors}
    for name, number in zip(numbering.names, _parameter_keys(groups), strict=True):
        for key, value in states.get(number, {}).items():
            if key not in PARAMETER_SHAPED or not isinstance(value, Tensor):
                continue
            if tuple(value.shape) != shapes[name]:
                raise SettingError(
                    f"{key} of parameter {number} has shape {tuple(value.shape)} in the state; "
                    f"{name}, the parameter in its place, has {shapes[name]}: the state is of "
                    "another model, or its parameters are in another order"
                )


def _local_parts(
    assembly: Assembly, *, with_state: bool = True
) -> tuple[dict[int, _StateTensors], dict[int, _Part]]:
    """Return, for each rank of this process, its state tensors and its description.

    Args:
        assembly: the ranks.
        with_state: whether to include the state, and not the groups alone.
    """
    tensors: dict[int, _StateTensors] = {}
    parts: dict[int, _Part] = {}
    placed = assembly.placed
    for rank in assembly.world.local_ranks:
        tensors[rank] = {}
        parts[rank] = _Part([], [], {}, {})
        for stage in placed.at_home:
            if placed.home[stage.index] == rank and stage.update.optimizer is not None:
                _add_groups(assembly, stage, stage.update.optimizer, parts[rank])
                if with_state:
                    _add_state(assembly, stage, tensors[rank], parts[rank])
    return tensors, parts


def _add_groups(assembly: Assembly, stage: Stage, optimizer: Optimizer, part: _Part) -> None:
    """Add the groups of a stage's optimizer to the description of its rank.

    Raises:
        SettingError: another stage of the rank has different options.
    """
    names = _names_by_id(assembly, stage)
    groups = []
    for group in optimizer.param_groups:
        groups.append([names[id(parameter)] for parameter in group["params"]])
    options = [_options_json(group) for group in optimizer.param_groups]
    if part.groups and part.options != options:
        raise _group_error(part.options, options)
    if not part.groups:
        part.groups.extend([] for _ in groups)
        part.options.extend(options)
    for members, stage_members in zip(part.groups, groups, strict=True):
        members.extend(stage_members)


def _add_state(assembly: Assembly, stage: Stage, tensors: _StateTensors, part: _Part) -> None:
    """Add the state of a stage's optimizer to the tensors and the description of its rank."""
    stage_tensors, facts = optimizer_state(stage, "")
    traced = assembly.traced
    for path, tensor in stage_tensors.items():
        local_name, _, key = path.removeprefix("optimizer/").rpartition("/")
        name = traced.first_name(local_name)
        tensors[name, key] = tensor
        part.forms.setdefault(name, {})[key] = (list(tensor.shape), dtype_name(tensor.dtype))
        part.values.setdefault(name, {})
    for local_name, fact in facts.items():
        if fact["state"]:
            name = traced.first_name(local_name)
            part.forms.setdefault(name, {})
            part.values.setdefault(name, {}).update(fact["state"])


def _options_json(group: Mapping[str, Any]) -> str:
    """Return the options of a group that ranks can compare, plain values, as JSON."""
    options = {}
    for key, value in group.items():
        option = value.tolist() if isinstance(value, Tensor) else value
        if key != "params" and isinstance(option, (bool, int, float, str, list, tuple)):
            options[key] = option
    return json.dumps(options, sort_keys=True)


def _exchange(assembly: Assembly, parts: Mapping[int, _Part]) -> dict[int, _Part]:
    """Return the descriptions of all ranks, on every rank."""
    world = assembly.world
    texts = {rank: json.dumps(vars(part)) for rank, part in parts.items()}
    all_parts: dict[int, _Part] = {}
    # One broadcast per rank, since every rank needs all names for the numbering.
    for rank in range(world.size):
        (text,) = world.broadcast([texts.get(rank, "")], rank)
        all_parts[rank] = _Part(**json.loads(text))
    return all_parts


def _numbering(assembly: Assembly, parts: Mapping[int, _Part]) -> Numbering:
    """Number the parameters of all ranks.

    Raises:
        SettingError: the ranks have groups with different options.
    """
    with_groups = [part for part in parts.values() if part.groups]
    if not with_groups:
        return Numbering(())
    _check_options(with_groups)
    group_of: dict[str, int] = {}
    for part in with_groups:
        for number, members in enumerate(part.groups):
            group_of.update(dict.fromkeys(members, number))
    groups: list[list[str]] = [[] for _ in with_groups[0].groups]
    # In the order of the whole model, as `model.parameters()` has them, and not rank by rank.
    for name in assembly.traced.parameter_names():
        if name in group_of:
            groups[group_of[name]].append(name)
    return Numbering(tuple(map(tuple, groups)))


def _check_options(parts: Sequence[_Part]) -> None:
    """Check that all ranks have groups with the same options.

    Raises:
        SettingError: they do not.
    """
    first, *others = parts
    for part in others:
        if part.options != first.options:
            raise _group_error(first.options, part.options)


def _group_error(first: Sequence[str], second: Sequence[str]) -> SettingError:
    """Return the error for optimizers whose groups have different options."""
    return SettingError(
        f"the stages' optimizers have different parameter groups, {', '.join(first)} and "
        f"{', '.join(second)}, which one optimizer cannot have: pass parameter_groups=, which "
        "creates the same groups on every stage"
    )


def _join_counts(counts: Sequence[int]) -> str:
    """List some counts; "no" if there are none."""
    return " and ".join(map(str, counts)) if counts else "no"
