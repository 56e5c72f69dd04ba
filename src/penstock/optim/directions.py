"""Directions: the change of the weights per update, predicted from the state of the optimizer.

An update with learning rate lr takes weights W to about W - lr ΔW, where ΔW is the direction.
AdamW's decoupled weight decay is in none of the papers' formulas, and so is not included here.

Sources: Chen et al. 2018, SpecTrain (momentum); Guan et al. 2019, XPipe (Adam, a form of its own);
Guan et al. 2023, PipeOptim (SGD, momentum, Adam, AdamW, RMSprop).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.optim.chunked_ratio import Ratio
from penstock.optim.stage_weights import State

Group = dict[str, Any]

#: Name in a checkpoint of the gradients from which a direction is computed.
GRADIENT = "last_gradient"


class Direction(Protocol):
    """Predicts the updates of one stage's weights."""

    def remember(self) -> None:
        """Store what the optimizer's state does not contain, before a step.

        The parameters have their gradients and the newest weights.
        """

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """Change `weights` in place as the next `updates` updates will.

        A parameter that has had no update stays.

        Args:
            weights: one tensor for each parameter of the stage.
            updates: number of updates, which may be a fraction.
        """
        ...

    def restart(self) -> None:
        """Forget what was read from the optimizer, whose state may have been replaced."""
        return

    def state(self) -> State:
        """Return the stored tensors that a checkpoint needs."""
        return {}

    def load_state(self, state: State) -> None:
        """Restore the result of `state`."""
        del state

    def held_bytes(self) -> int:
        """Return the bytes of stored tensors and scratch memory."""
        return 0


@final
class SgdDirection(Direction):
    """SGD: the momentum buffer, v = μv + (1-d)g.

    Without momentum it is the last gradient, with weight decay, which v contains too.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._gradients = _LastGradients(self._index)

    def remember(self) -> None:
        """Keep the gradients of the groups without momentum."""
        self._gradients.note(
            [group for group in self._optimizer.param_groups if not group["momentum"]]
        )

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """Set W to W - updates lr v."""
        for group in self._optimizer.param_groups:
            directions = self._momentum(group) if group["momentum"] else self._gradients.of(group)
            _add(weights, directions, -float(group["lr"]) * updates)

    def _momentum(self, group: Group) -> Mapping[int, Tensor | None]:
        """Return the momentum of a group's parameters; None where there has been no step."""
        return {
            self._index[parameter]: state.get("momentum_buffer")
            for parameter, state in _states(self._optimizer, group)
        }

    def state(self) -> State:
        """Return the last gradients, if there are any."""
        return self._gradients.state()

    def load_state(self, state: State) -> None:
        """Restore the last gradients."""
        self._gradients.load(state)

    def held_bytes(self) -> int:
        """Return the bytes of the last gradients."""
        return self._gradients.held_bytes()


@final
class AdamDirection(Direction):
    """Adam and AdamW: m̂ / (√v̂ + ε), with the bias corrections of the last step.

    With `constant`, the bias corrections are always those of the first step.
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
        """Count the steps on the host.

        Reading the optimizer's own count from a GPU would synchronise.
        """
        for parameter, i in self._index.items():
            if i in self._steps and parameter.grad is not None:
                self._steps[i] += 1

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """Set W to W - updates lr m̂ / (√v̂ + ε).

        Computed as m √c₂/c₁ / (√v + ε√c₂) with the corrections c₁ and c₂, which saves one pass over
        the weights.
        """
        for group in self._optimizer.param_groups:
            square = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
            beta1, beta2 = map(float, group["betas"])
            for step, members in self._by_step(group).items():
                correction1, correction2 = (1 - beta1**step, 1 - beta2**step)
                indices = tuple(i for i, _ in members)
                numerators_and_squares = (
                    [state["exp_avg"] for _, state in members],
                    [state[square] for _, state in members],
                )
                factor = -float(group["lr"]) * updates * math.sqrt(correction2) / correction1
                self._ratio.add(
                    indices,
                    [weights[i] for i in indices],
                    numerators_and_squares,
                    float(group["eps"]) * math.sqrt(correction2),
                    factor,
                )

    def restart(self) -> None:
        """Forget the counts; they are read from the optimizer again."""
        self._steps.clear()

    def held_bytes(self) -> int:
        """Return the bytes of the scratch memory."""
        return self._ratio.held_bytes()

    def _by_step(self, group: Group) -> dict[float, list[tuple[int, Mapping[str, Tensor]]]]:
        """Return the updated parameters of a group, with their state, by number of steps."""
        members: dict[float, list[tuple[int, Mapping[str, Tensor]]]] = {}
        for parameter, state in _states(self._optimizer, group):
            i = self._index[parameter]
            if not self._constant and i not in self._steps:
                self._steps[i] = float(state["step"])
            members.setdefault(1 if self._constant else self._steps[i], []).append((i, state))
        return members


@final
class RmspropDirection(Direction):
    """RMSprop: g / (√E[g²] + ε)."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._index = {parameter: i for i, parameter in enumerate(parameters)}
        self._gradients = _LastGradients(self._index)
        self._ratio = Ratio()

    def remember(self) -> None:
        """Keep the gradients."""
        self._gradients.note(self._optimizer.param_groups)

    def move(self, weights: Sequence[Tensor], updates: float) -> None:
        """Set W to W - updates lr g / (√E[g²] + ε)."""
        for group in self._optimizer.param_groups:
            states = {
                self._index[parameter]: state
                for parameter, state in _states(self._optimizer, group)
            }
            live = {i: gradient for i, gradient in self._gradients.of(group).items() if i in states}
            if live:
                numerators_and_squares = (
                    list(live.values()),
                    [states[i]["square_avg"] for i in live],
                )
                factor = -float(group["lr"]) * updates
                self._ratio.add(
                    tuple(live),
                    [weights[i] for i in live],
                    numerators_and_squares,
                    float(group["eps"]),
                    factor,
                )

    def state(self) -> State:
        """Return the last gradients, if there are any."""
        return self._gradients.state()

    def load_state(self, state: State) -> None:
        """Restore the last gradients."""
        self._gradients.load(state)

    def held_bytes(self) -> int:
        """Return the bytes of the last gradients and of the scratch memory."""
        return self._gradients.held_bytes() + self._ratio.held_bytes()


class _LastGradients:
    """The gradients of the last step as the optimizer's formula used them, by parameter index."""

    def __init__(self, index: Mapping[nn.Parameter, int]) -> None:
        self._index = index
        self._by_index: dict[int, Tensor] = {}

    @torch.no_grad()
    def note(self, groups: Sequence[Group]) -> None:
        """Keep the gradients in `.grad`.

        They are not copied, since nothing else uses them after the step.
        """
        self._by_index.clear()
        for group in groups:
            live = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in live]
            # The sign first and then the weight decay, as in torch's optimizers.
            if live and group.get("maximize"):
                gradients = list(torch._foreach_neg(gradients))
            if live and group["weight_decay"]:
                gradients = list(
                    torch._foreach_add(gradients, live, alpha=float(group["weight_decay"]))
                )
            self._by_index.update(
                zip((self._index[parameter] for parameter in live), gradients, strict=True)
            )

    def of(self, group: Group) -> dict[int, Tensor]:
        """Return the gradients of a group's parameters, without parameters that had none."""
        indices = (
            self._index[parameter] for parameter in group["params"] if parameter in self._index
        )
        return {i: self._by_index[i] for i in indices if i in self._by_index}

    def state(self) -> State:
        """Return the gradients for a checkpoint."""
        return (
            {GRADIENT: [self._by_index.get(i) for i in self._index.values()]}
            if self._by_index
            else {}
        )

    def load(self, state: State) -> None:
        """Restore the gradients from a checkpoint."""
        rows = zip(self._index.items(), state.get(GRADIENT, [None] * len(self._index)), strict=True)
        self._by_index = {
            i: value.to(parameter, copy=True) for (parameter, i), value in rows if value is not None
        }

    def held_bytes(self) -> int:
        """Return the bytes of the gradients."""
        return sum(gradient.nbytes for gradient in self._by_index.values())


def _states(
    optimizer: Optimizer, group: Group
) -> Iterator[tuple[nn.Parameter, Mapping[str, Tensor]]]:
    """Yield the updated parameters of a group, with the optimizer's state of each."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state:
            yield parameter, state


def _add(weights: Sequence[Tensor], directions: Mapping[int, Tensor | None], factor: float) -> None:
    live = {i: direction for i, direction in directions.items() if direction is not None}
    if live:
        torch._foreach_add_([weights[i] for i in live], list(live.values()), alpha=factor)
