"""Parameter groups: optimizer options by parameter, with the same groups on every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.errors import SettingError
from penstock.optim.factory import OptimizerFactory

#: Takes a parameter's name in the model and the parameter, and returns the options of its group,
#: such as `{"weight_decay": 0.0}`.
GroupsOf = Callable[[str, nn.Parameter], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Groups:
    """The parameter groups of a whole model.

    Every stage's optimizer has all of them, in this order, some of them empty. So the learning
    rates of the groups, and a scheduler's state, mean the same on every rank and under every
    partition.

    Attributes:
        options: the options of each group.
        place: the index of the group, by parameter name.
    """

    options: tuple[Mapping[str, Any], ...]
    place: Mapping[str, int]
    _group_of: dict[nn.Parameter, int] = field(default_factory=dict)

    @classmethod
    def of(cls, function: GroupsOf, named: Iterable[tuple[str, nn.Parameter]]) -> Groups:
        """Call `function` for every parameter, and make one group of parameters with equal options.

        Groups are in order of appearance, trainable parameters first, so that parameters that are
        frozen now and may be trained later add their groups at the end.

        Args:
            function: the user's function.
            named: the parameters of the whole model by name. They may be on the meta device.

        Raises:
            SettingError: the function returned something other than a dict of options.
        """
        options: list[Mapping[str, Any]] = []
        place: dict[str, int] = {}
        differentiable = [row for row in named if row[1].is_floating_point() or row[1].is_complex()]
        for name, parameter in sorted(differentiable, key=lambda row: not row[1].requires_grad):
            group_options = function(name, parameter)
            if not isinstance(group_options, Mapping) or "params" in group_options:
                what = (
                    "one with 'params'"
                    if isinstance(group_options, Mapping)
                    else type(group_options).__name__
                )
                raise SettingError(
                    "parameter_groups= is a function from a parameter's name and the parameter to "
                    "a dict of options of its group, such as {'weight_decay': 0.0}; for "
                    f"{name} it returned {what}"
                )
            plain_options = dict(group_options)
            if plain_options not in options:
                options.append(plain_options)
            place[name] = options.index(plain_options)
        return cls(tuple(options), place)

    def add_names(self, names: Mapping[nn.Parameter, str]) -> None:
        """Register the names of parameters before their optimizer is created.

        Parameters that are not registered go into the first group.
        """
        self._group_of.update(
            (parameter, self.place[name]) for parameter, name in names.items() if name in self.place
        )

    def factory(self, make: OptimizerFactory) -> OptimizerFactory:
        """Return a factory for plain lists of parameters that passes them to `make` in groups.

        Args:
            make: takes torch's parameter groups.
        """

        def grouped(parameters: list[nn.Parameter]) -> Any:
            members: list[list[nn.Parameter]] = [[] for _ in self.options]
            for parameter in parameters:
                members[self._group_of.get(parameter, 0)].append(parameter)
            return make(
                [
                    {"params": row, **options}
                    for row, options in zip(members, self.options, strict=True)
                ]
            )

        return grouped
