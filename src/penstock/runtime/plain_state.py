"""The state of all stages' optimizers in the form that one optimizer of plain PyTorch over the
whole model has, both ways.

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

from penstock.errors import SettingError
from penstock.runtime.assembly import Assembly
from penstock.runtime.own_state import optimizer_state
from penstock.runtime.stage import Stage
from penstock.transport.payload import TensorForm

#: What torch's optimizers keep in the form of the parameter itself.
_LIKE_THE_PARAMETER = frozenset(
    [
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
        "sum",
        "ax",
        "prev",
        "step_size",
    ]
)


@dataclass(frozen=True)
class Numbering:
    """Which parameters the groups of the whole optimizer have, by the chain's names:
    `groups[g][n]`.
    """

    groups: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> list[str]:
        """The names in the order of their numbers."""
        return [name for group in self.groups for name in group]

    @property
    def numbers(self) -> dict[str, int]:
        """The number of every name."""
        return {name: number for number, name in enumerate(self.names)}


@dataclass(frozen=True)
class _Part:
    """What one rank says of its optimizers: the names in each group, the options of each group, and
    what is kept of each parameter.
    """

    groups: list[list[str]]
    options: list[str]
    forms: dict[str, dict[str, tuple[list[int], str]]]
    values: dict[str, dict[str, Any]]


def collect(made: Assembly) -> dict[str, Any]:
    """The state of the whole optimizer on rank 0, with tensors on the CPU; elsewhere an empty dict.
    Every rank must ask.

    Raises:
        SettingError: there is no optimizer; the stages' optimizers have unlike groups or options; a
        weight rule keeps more
            than one optimizer for a stage; or one keeps something that is neither tensor nor plain
            number.
    """
    _check_single(made, "has no form in plain PyTorch")
    optimizers = made.optimizers()
    tensors, parts = _local_parts(made)
    told = _exchanged(made, parts)
    numbering = _numbering(made, told)
    forms = {
        rank: [
            TensorForm(tuple(shape), dtype, wants_grad=False)
            for kept in part.forms.values()
            for shape, dtype in kept.values()
        ]
        for rank, part in told.items()
    }
    rows = {
        rank: [tensors[rank][name, key] for name, kept in part.forms.items() for key in kept]
        for rank, part in parts.items()
    }
    gathered = made.world.gather(rows, forms)
    if not gathered:
        return {}
    numbers = numbering.numbers
    state: dict[int, dict[str, Any]] = {}
    for rank, part in told.items():
        found = iter(gathered.get(rank, ()))
        for name, kept in part.forms.items():
            state[numbers[name]] = {key: next(found) for key in kept} | part.values[name]
    first = 0
    groups = []
    for members, group in zip(numbering.groups, optimizers[0].param_groups, strict=True):
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        groups.append(options | {"params": list(range(first, first + len(members)))})
        first += len(members)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def restore(made: Assembly, state: Mapping[str, Any]) -> None:
    """Take the options of groups and the state of the parameters that are held here from the state
    of a whole optimizer.

    Raises:
        SettingError: see `collect`; or the state is none of an optimizer over these parameters.
        Nothing has changed then.
    """
    _check_single(made, "cannot be taken from plain PyTorch")
    optimizers = made.optimizers()
    numbering = _numbering(made, _exchanged(made, _local_parts(made, with_state=False)[1]))
    groups = _checked(made, numbering, state)
    numbers = numbering.numbers
    given = [number for group in groups for number in group["params"]]
    for stage in made.stages:
        if stage.update.optimizer is None:
            continue
        names = {id(each): name for each, name in made.names(stage).items()}
        rows = [
            [given[numbers[names[id(each)]]] for each in group["params"]]
            for group in stage.update.optimizer.param_groups
        ]
        stage.update.optimizer.load_state_dict(_of_stage(state, groups, rows))
    for optimizer in optimizers:
        if not any(optimizer is stage.update.optimizer for stage in made.stages):
            _set_options(optimizer, groups)


def _of_stage(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """The part of a whole optimizer's state that is about some of its parameters, under numbers of
    their own, copied.
    """
    local: dict[int, Any] = {}
    chosen = []
    for group, keys in zip(groups, rows, strict=True):
        numbers = range(len(local), len(local) + len(keys))
        local.update(zip(numbers, keys, strict=True))
        chosen.append({**_options(group), "params": list(numbers)})
    kept = {
        number: copy.deepcopy(state["state"][key])
        for number, key in local.items()
        if key in state["state"]
    }
    return {"state": kept, "param_groups": chosen}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Names of parameters, which optimizers over named parameters have in their groups, are of the
    whole model.
    """
    return {
        key: copy.deepcopy(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _set_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(_options(saved))


def _checked(
    made: Assembly, numbering: Numbering, state: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The groups of a state that fits."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise SettingError(
            "load_optimizer_state_dict() takes the state_dict() of a torch.optim optimizer, with 'state' and 'param_groups', not "
            f"{sorted(state) if isinstance(state, Mapping) else type(state).__name__}"
        )
    groups: list[Mapping[str, Any]] = list(state["param_groups"])
    theirs = [len(group["params"]) for group in groups]
    ours = [len(group) for group in numbering.groups]
    if theirs != ours:
        raise SettingError(
            f"the state is of an optimizer whose parameter groups have {_listed(theirs)} parameters; this pipeline's have "
            f"{_listed(ours)}"
        )
    shapes = {fact.name: fact.shape for fact in made.traced.description.tensors}
    given = [number for group in groups for number in group["params"]]
    for name, key in zip(numbering.names, given, strict=True):
        for what, value in state["state"].get(key, {}).items():
            if (
                what in _LIKE_THE_PARAMETER
                and isinstance(value, Tensor)
                and tuple(value.shape) != tuple(shapes[name])
            ):
                raise SettingError(
                    f"{what} of parameter {key} has shape {tuple(value.shape)} in the state; {name}, the parameter in its "
                    f"place, has {tuple(shapes[name])}: the state is of another model, or its parameters are in another order"
                )
    return groups


def _local_parts(
    made: Assembly, *, with_state: bool = True
) -> tuple[dict[int, dict[tuple[str, str], Tensor]], dict[int, _Part]]:
    """By local rank, tensors by parameter and key, and what is told of them."""
    tensors: dict[int, dict[tuple[str, str], Tensor]] = {}
    parts: dict[int, _Part] = {}
    placed = made.placed
    for rank in made.world.local_ranks:
        tensors[rank] = {}
        parts[rank] = _Part([], [], {}, {})
        for stage in placed.at_home:
            if placed.home[stage.index] == rank and stage.update.optimizer is not None:
                _add_groups(made, stage, stage.update.optimizer, parts[rank])
                if with_state:
                    _add_state(made, stage, tensors[rank], parts[rank])
    return tensors, parts


def _add_groups(made: Assembly, stage: Stage, optimizer: Optimizer, part: _Part) -> None:
    names = {id(each): name for each, name in made.names(stage).items()}
    own = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    options = [_text(group) for group in optimizer.param_groups]
    if part.groups and part.options != options:
        raise _unlike(part.options, options)
    if not part.groups:
        part.groups.extend([] for _ in own)
        part.options.extend(options)
    for members, more in zip(part.groups, own, strict=True):
        members.extend(more)


def _add_state(
    made: Assembly, stage: Stage, tensors: dict[tuple[str, str], Tensor], part: _Part
) -> None:
    found, facts = optimizer_state(stage, "")
    aliases = made.traced.aliases
    for path, tensor in found.items():
        local, _, key = path.removeprefix("optimizer/").rpartition("/")
        name = aliases.get(local, local)
        tensors[name, key] = tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        part.forms.setdefault(name, {})[key] = (list(tensor.shape), dtype)
        part.values.setdefault(name, {})
    for local, fact in facts.items():
        if fact["state"]:
            name = aliases.get(local, local)
            part.forms.setdefault(name, {})
            part.values.setdefault(name, {}).update(fact["state"])


def _text(group: Mapping[str, Any]) -> str:
    """The options of a group that can be compared between ranks: numbers and words."""
    plain = {
        key: value.tolist() if isinstance(value, Tensor) else value for key, value in group.items()
    }
    return json.dumps(
        {
            key: value
            for key, value in plain.items()
            if key != "params" and isinstance(value, (bool, int, float, str, list, tuple))
        },
        sort_keys=True,
    )


def _exchanged(made: Assembly, parts: Mapping[int, _Part]) -> dict[int, _Part]:
    """What every rank tells, on every rank."""
    world = made.world
    texts = {rank: json.dumps(vars(part)) for rank, part in parts.items()}
    told: dict[int, _Part] = {}
    for rank in range(world.size):
        (text,) = world.broadcast([texts.get(rank, "")], rank)
        told[rank] = _Part(**json.loads(text))
    return told


def _numbering(made: Assembly, told: Mapping[int, _Part]) -> Numbering:
    speaking = [part for part in told.values() if part.groups]
    for part in speaking[1:]:
        if part.options != speaking[0].options:
            raise _unlike(speaking[0].options, part.options)
    place = {
        name: number
        for part in speaking
        for number, members in enumerate(part.groups)
        for name in members
    }
    order = [name for name in made.traced.parameter_names() if name in place]
    count = len(speaking[0].groups) if speaking else 0
    return Numbering(
        tuple(tuple(name for name in order if place[name] == group) for group in range(count))
    )


def _unlike(one: Sequence[str], other: Sequence[str]) -> SettingError:
    return SettingError(
        f"the stages' optimizers have unlike parameter groups, {', '.join(one)} and {', '.join(other)}, which one optimizer "
        "cannot have: give groups by parameter_groups=, which makes the same ones on every stage"
    )


def _check_single(made: Assembly, what: str) -> None:
    more = [
        each
        for interpreter in made.interpreters.values()
        for weights in interpreter.weights.values()
        for each in weights.more_optimizers()
    ]
    if more or made.lives > 1:
        raise SettingError(
            f"the optimizer's state {what}: {made.setting.schedule.name} keeps several copies of the weights, each with an "
            "optimizer of its own. Take save() and load()"
        )


def _listed(counts: Sequence[int]) -> str:
    return " and ".join(map(str, counts)) if counts else "no"
