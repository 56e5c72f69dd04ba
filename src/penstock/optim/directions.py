"""Directions: by how much the next updates will change the weights, as far as an optimizer's state
tells.

A direction ΔW is such that an update with learning rate lr takes weights W to about W - lr ΔW. What
the optimizer does to weights besides, AdamW's decoupled weight decay, is in none of the papers'
formulas, and so in none of these.

Sources: Chen et al. 2018, SpecTrain (momentum); Guan et al. 2019, XPipe (Adam, its own form); Guan
et al. 2023, PipeOptim (SGD, momentum, Adam, AdamW, RMSprop).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.optim.ratio import Ratio
from penstock.optim.stage_weights import State

Group = dict[str, Any]

#: The name in a checkpoint of gradients that a direction is made of.
GRADIENT = "last_gradient"


class Direction(Protocol):
    """Where the weights of one stage are going."""

    def remember(self) -> None:
        """Before a step, with gradients and newest weights in the parameters: note what the
        optimizer's state will not say.
        """

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """Change weights, in place, as so many updates are going to. A parameter that has had no
        update stays.
        """
        ...

    def restart(self) -> None:
        """The optimizer's state may be another than it was."""
        return

    def state(self) -> State:
        """What was noted and a checkpoint must have."""
        return {}

    def load_state(self, state: State) -> None:
        """Take what `state` gave."""
        del state

    def held_bytes(self) -> int:
        """Bytes of what was noted, and of scratch."""
        return 0


@final
class SgdDirection(Direction):
    """SGD: the momentum buffer, v = μv + (1-d)g; without momentum the last gradient, weight decay
    included as it is in v.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._gradients = _Gradients(self._index)

    def remember(self) -> None:
        """Keep gradients, where there is no momentum."""
        self._gradients.note(
            [group for group in self._optimizer.param_groups if not group["momentum"]]
        )

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """W - updates lr v."""
        for group in self._optimizer.param_groups:
            directions = (
                {
                    self._index[parameter]: state.get("momentum_buffer")
                    for parameter, state in _states(self._optimizer, group)
                }
                if group["momentum"]
                else self._gradients.of(group)
            )
            _add(weights, directions, -float(group["lr"]) * updates)

    def state(self) -> State:
        """The last gradients, if there are any."""
        return self._gradients.state()

    def load_state(self, state: State) -> None:
        """Take them back."""
        self._gradients.load(state)

    def held_bytes(self) -> int:
        """Those of the last gradients."""
        return self._gradients.held_bytes()


@final
class AdamDirection(Direction):
    """Adam and AdamW: m̂ / (√v̂ + ε), with the bias corrections of the last step, or for ever those
    of the first (`constant`).
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, constant: bool
    ) -> None:
        self._optimizer = optimizer
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._constant = constant
        self._steps: dict[int, float] = {}
        self._ratio = Ratio()

    def remember(self) -> None:
        """Count steps here: to ask a GPU for its count would make it wait."""
        for parameter, i in self._index.items():
            if i in self._steps and parameter.grad is not None:
                self._steps[i] += 1

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """W - updates lr m̂ / (√v̂ + ε), as m √c₂/c₁ / (√v + ε√c₂) with c₁ and c₂ the corrections:
        one pass less over the weights.
        """
        for group in self._optimizer.param_groups:
            square = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
            beta1, beta2 = map(float, group["betas"])
            for step, members in self._by_step(group).items():
                first, second = (1 - beta1**step, 1 - beta2**step)
                indices = tuple(i for i, _ in members)
                over = (
                    [state["exp_avg"] for _, state in members],
                    [state[square] for _, state in members],
                )
                factor = -float(group["lr"]) * updates * math.sqrt(second) / first
                self._ratio.add(
                    indices,
                    [weights[i] for i in indices],
                    over,
                    float(group["eps"]) * math.sqrt(second),
                    factor,
                )

    def restart(self) -> None:
        """Read the counts anew."""
        self._steps.clear()

    def held_bytes(self) -> int:
        """Those of the room for roots."""
        return self._ratio.held_bytes()

    def _by_step(self, group: Group) -> dict[float, list[tuple[int, Mapping[str, Tensor]]]]:
        """A group's parameters that have been updated, by how often."""
        found: dict[float, list[tuple[int, Mapping[str, Tensor]]]] = {}
        for parameter, state in _states(self._optimizer, group):
            i = self._index[parameter]
            if not self._constant and i not in self._steps:
                self._steps[i] = float(state["step"])
            found.setdefault(1 if self._constant else self._steps[i], []).append((i, state))
        return found


@final
class RmspropDirection(Direction):
    """RMSprop: g / (√E[g²] + ε)."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._gradients = _Gradients(self._index)
        self._ratio = Ratio()

    def remember(self) -> None:
        """Keep the gradients."""
        self._gradients.note(self._optimizer.param_groups)

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """W - updates lr g / (√E[g²] + ε)."""
        for group in self._optimizer.param_groups:
            states = {
                self._index[parameter]: state
                for parameter, state in _states(self._optimizer, group)
            }
            live = {i: gradient for i, gradient in self._gradients.of(group).items() if i in states}
            if live:
                over = list(live.values()), [states[i]["square_avg"] for i in live]
                factor = -float(group["lr"]) * updates
                self._ratio.add(
                    tuple(live), [weights[i] for i in live], over, float(group["eps"]), factor
                )

    def state(self) -> State:
        """The last gradients, if there are any."""
        return self._gradients.state()

    def load_state(self, state: State) -> None:
        """Take them back."""
        self._gradients.load(state)

    def held_bytes(self) -> int:
        """Those of the last gradients, and of the room for roots."""
        return self._gradients.held_bytes() + self._ratio.held_bytes()


class _Gradients:
    """The gradients of the last step, as they went into the optimizer's formula, by parameter."""

    def __init__(self, index: Mapping[nn.Parameter, int]) -> None:
        self._index = index
        self._held: dict[int, Tensor] = {}

    @torch.no_grad()
    def note(self, groups: Sequence[Group]) -> None:
        """Keep those in `.grad`. They are not copied: after the step nobody else needs them."""
        self._held.clear()
        for group in groups:
            live = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in live]
            if live and group.get("maximize"):
                gradients = list(torch._foreach_neg(gradients))
            if live and group["weight_decay"]:
                gradients = list(
                    torch._foreach_add(gradients, live, alpha=float(group["weight_decay"]))
                )
            self._held.update(
                zip((self._index[parameter] for parameter in live), gradients, strict=True)
            )

    def of(self, group: Group) -> dict[int, Tensor]:
        """Those of the group's parameters that had one."""
        indices = (self._index[each] for each in group["params"] if each in self._index)
        return {i: self._held[i] for i in indices if i in self._held}

    def state(self) -> State:
        """For a checkpoint."""
        return {GRADIENT: [self._held.get(i) for i in self._index.values()]} if self._held else {}

    def load(self, state: State) -> None:
        """Of a checkpoint."""
        rows = zip(self._index.items(), state.get(GRADIENT, [None] * len(self._index)), strict=True)
        self._held = {
            i: value.to(parameter, copy=True) for (parameter, i), value in rows if value is not None
        }

    def held_bytes(self) -> int:
        """How much memory they take."""
        return sum(gradient.nbytes for gradient in self._held.values())


def _states(
    optimizer: Optimizer, group: Group
) -> Iterator[tuple[nn.Parameter, Mapping[str, Tensor]]]:
    """The parameters of a group that have been updated, and the optimizer's state of each."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state:
            yield parameter, state


def _add(weights: Sequence[Tensor], directions: Mapping[int, Tensor | None], factor: float) -> None:
    live = {i: direction for i, direction in directions.items() if direction is not None}
    if live:
        torch._foreach_add_([weights[i] for i in live], list(live.values()), alpha=factor)
