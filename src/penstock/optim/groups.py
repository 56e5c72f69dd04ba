"""Parameter groups: options of the optimizer by parameter, the same groups in every stage's
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.errors import SettingError
from penstock.optim.factory import OptimizerFactory

#: From a parameter's name in the model and the parameter to options of its group, such as
#: `{"weight_decay": 0.0}`.
GroupsOf = Callable[[str, nn.Parameter], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Groups:
    """The parameter groups of a whole model.

    Every stage's optimizer has all of them, in this order, some of them empty: so a learning rate
    by group, and what a scheduler says of it, mean the same on every rank and under every cut.

    Attributes:
        options: of every group.
        place: by a parameter's name, which group it is in.
    """

    options: tuple[Mapping[str, Any], ...]
    place: Mapping[str, int]
    _known: dict[nn.Parameter, int] = field(default_factory=dict)

    @classmethod
    def of(cls, function: GroupsOf, named: Iterable[tuple[str, nn.Parameter]]) -> Groups:
        """Ask `function` of every parameter; those with the same options are one group, in order of
        appearance.

        Trainable parameters come first: those that are frozen now, and may be thawed later, add
        groups only behind theirs.

        Args:
            function: the user's.
            named: the parameters of the whole model by name. They may be on the meta device.

        Raises:
            SettingError: the function gave something else than a dict of options.
        """
        options: list[Mapping[str, Any]] = []
        place: dict[str, int] = {}
        able = [row for row in named if row[1].is_floating_point() or row[1].is_complex()]
        for name, parameter in sorted(able, key=lambda row: not row[1].requires_grad):
            found = function(name, parameter)
            if not isinstance(found, Mapping) or "params" in found:
                what = "one with 'params'" if isinstance(found, Mapping) else type(found).__name__
                raise SettingError(
                    f"parameter_groups= is a function from a parameter's name and the parameter to a dict of options of its "
                    f"group, such as {{'weight_decay': 0.0}}; for {name} it returned {what}"
                )
            chosen = dict(found)
            if chosen not in options:
                options.append(chosen)
            place[name] = options.index(chosen)
        return cls(tuple(options), place)

    def know(self, names: Mapping[nn.Parameter, str]) -> None:
        """Learn what parameters are called, before their optimizer is made. Others come into the
        first group.
        """
        self._known.update(
            (parameter, self.place[name]) for parameter, name in names.items() if name in self.place
        )

    def factory(self, make: OptimizerFactory) -> OptimizerFactory:
        """The same factory, for plain lists of parameters, which it gets in groups.

        Args:
            make: takes torch's parameter groups.
        """

        def grouped(parameters: list[nn.Parameter]) -> Any:
            members: list[list[nn.Parameter]] = [[] for _ in self.options]
            for parameter in parameters:
                members[self._known.get(parameter, 0)].append(parameter)
            return make(
                [
                    {"params": row, **options}
                    for row, options in zip(members, self.options, strict=True)
                ]
            )

        return grouped
