"""Weight prediction: ops read weights extrapolated to a later update.

Either forwards alone do so, or both directions, depending on the rule. The gradients computed with
predicted weights are applied unchanged to the newest version, never to a predicted one.

Sources: Chen et al. 2018, SpecTrain; Guan et al. 2019, XPipe; Guan et al. 2023, PipeOptim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import final

from penstock.errors import RunError
from penstock.optim.catalogue import kind_of, no_formula, register
from penstock.optim.directions import AdamDirection, Direction, RmspropDirection, SgdDirection
from penstock.optim.stage_weights import Site, StageWeights, State
from penstock.optim.working_weights import WorkingWeights
from penstock.registry import Registry
from penstock.weights.rule_types import Reads
from penstock.weights.weight_uses import Use

#: By the name of a weight rule, the function from a stage to the direction of its predictions.
#: Rules without an entry use PipeOptim's.
DIRECTIONS: Registry[Callable[[Site], Direction]] = Registry("prediction", "penstock.optim")


@DIRECTIONS.register("spectrain")
def spectrain(site: Site) -> Direction:
    """SpecTrain: momentum.

    The paper's v = γv + (1-γ)g is torch's SGD with dampening γ. Without dampening v is larger by
    1/(1-γ), and the learning rate that gives the same step is smaller by the same factor.
    """
    _refuse(site, lambda group: group["momentum"] == 0, "momentum=0", "give it momentum")
    return pipeoptim(site)


@DIRECTIONS.register("xpipe")
def xpipe(site: Site) -> Direction:
    """XPipe: Adam's ratio with the moments divided by 1 - β, not by 1 - β^t, as in the paper."""
    _refuse(site, lambda group: group["amsgrad"], "amsgrad=True", "omit amsgrad")
    return _adam(site, constant=True)


@DIRECTIONS.register("pipeoptim")
def pipeoptim(site: Site) -> Direction:
    """PipeOptim: the optimizer's own step.

    It is the gradient, momentum, Adam's ratio with its bias corrections, or RMSprop's ratio.
    """
    return _DIRECTION_OF_KIND[_kind(site)](site)


def _sgd(site: Site) -> Direction:
    _refuse(site, lambda group: group["nesterov"], "nesterov=True", "omit nesterov")
    assert site.update.optimizer is not None
    return SgdDirection(site.update.optimizer, site.update.parameters)


def _adam(site: Site, *, constant: bool = False) -> Direction:
    _refuse_complex(site)
    assert site.update.optimizer is not None
    return AdamDirection(site.update.optimizer, site.update.parameters, constant=constant)


def _rmsprop(site: Site) -> Direction:
    _refuse(site, lambda group: group["centered"], "centered=True", "omit centered")
    _refuse(site, lambda group: group["momentum"] != 0, "momentum", "omit momentum")
    _refuse_complex(site)
    assert site.update.optimizer is not None
    return RmspropDirection(site.update.optimizer, site.update.parameters)


_DIRECTION_OF_KIND: Mapping[str, Callable[[Site], Direction]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
}


def _kind(site: Site) -> str:
    assert site.update.optimizer is not None
    kind = kind_of(site.update.optimizer)
    if kind not in _DIRECTION_OF_KIND:
        raise no_formula(site, kind, f"it supports {', '.join(_DIRECTION_OF_KIND)}")
    return kind


def _refuse(
    site: Site,
    is_unsupported: Callable[[dict[str, object]], object],
    setting: str,
    instead: str,
) -> None:
    """Raise an error if any parameter group of the optimizer is unsupported."""
    kind = _kind(site)
    assert site.update.optimizer is not None
    if any(is_unsupported(group) for group in site.update.optimizer.param_groups):
        raise no_formula(site, f"{kind} with {setting}", instead)


def _refuse_complex(site: Site) -> None:
    if any(parameter.is_complex() for parameter in site.update.parameters):
        raise no_formula(site, f"{_kind(site)} on complex weights", "it is for real ones")


@final
class Predicted(StageWeights):
    """The newest version, and predictions that take its place while an op needs them.

    Contents of the parameters are named (version, number of updates predicted).
    """

    def __init__(self, site: Site) -> None:
        self._stage, self._update, self._use = site.stage, site.update, site.use
        self._direction = prediction_direction(site)
        self._newest = 0
        # Predictions that may be stored besides the working copy, so that they need not be
        # computed again. The forward's is stored first.
        stored = site.rule.extra - 1
        self._stores = {"forward": stored >= 1, "backward": stored >= 2}
        self._in_flight: dict[int, Use] = {}
        # Micro-batches whose backward has begun.
        self._in_backward: set[int] = set()
        self._working = WorkingWeights(site.update, newest=(0, 0))

    def before_forward(self, number: int) -> None:
        """Set the parameters to the prediction that the forward reads."""
        use = self._in_flight[number] = self._use(number)
        self._read(number, use.batch, "forward", _forward(use.reads))

    def before_backward(self, number: int) -> None:
        """Set the parameters to the prediction that the backward reads.

        A W may follow an update that came after its I. Then the version that it should read is no
        longer available, and it reads the newest.
        """
        use = self._in_flight[number]
        version, ahead = _backward(use.reads)
        if number in self._in_backward and not self._working.has((version, ahead)):
            version = self._newest
        self._in_backward.add(number)
        self._read(number, use.batch, "backward", (version, ahead))

    def finished(self, number: int) -> None:
        """Forget a micro-batch whose backward has ended."""
        self._in_backward.discard(number)
        self._in_flight.pop(number, None)

    def update(self, version: int) -> None:
        """Step the newest version."""
        self._working.begin_step()
        self._direction.remember()
        self._update.advance()
        self._newest = version
        self._working.end_step((version, 0))

    def drain(self) -> None:
        """Set the parameters to the newest version, which becomes version 0."""
        self._working.restart((0, 0))
        self._direction.restart()
        self._in_flight.clear()
        self._in_backward.clear()
        self._newest = 0

    def held_bytes(self) -> int:
        """Return the bytes of weights, stored predictions and the direction's tensors."""
        return self._working.held_bytes() + self._direction.held_bytes()

    def state(self) -> State:
        """Return the tensors that the direction needs besides the optimizer's state."""
        return self._direction.state()

    def load_state(self, state: State) -> None:
        """Restore the result of `state`."""
        self._direction.restart()
        self._direction.load_state(state)

    def _read(self, number: int, batch: int, kind: str, content: tuple[int, int]) -> None:
        version, ahead = content
        if version != self._newest and not self._working.has(content):
            raise RunError(
                f"stage {self._stage}: the {kind} of micro-batch {number} reads weight version "
                f"{version}, {ahead} ahead, and the newest is {self._newest}: predictions are made "
                "of the newest"
            )
        change = functools.partial(self._direction.move, updates=ahead) if ahead else None
        self._working.show(content, change)
        is_reused = self._is_reused(number, batch, kind, content)
        reused_content = content if is_reused else None
        self._working.keep(kind, reused_content, change, soon=self._stores[kind])

    def _is_reused(self, number: int, batch: int, kind: str, content: tuple[int, int]) -> bool:
        """Return whether a later micro-batch of the same batch reads this content.

        It may do so after an update, when the content could not be computed any more.
        """
        content_of = _forward if kind == "forward" else _backward
        rest_of_batch = itertools.takewhile(
            lambda use: use.batch == batch, map(self._use, itertools.count(number + 1))
        )
        return any(content_of(use.reads) == content for use in rest_of_batch)


def _forward(reads: Reads) -> tuple[int, int]:
    return reads.forward, reads.forward_ahead


def _backward(reads: Reads) -> tuple[int, int]:
    return reads.backward, reads.backward_ahead


def prediction_direction(site: Site) -> Direction:
    """Return the direction of a rule's predictions for a stage.

    Raises:
        SettingError: the paper has no formula for this optimizer or its options.
    """
    entries = DIRECTIONS.entries()
    return entries.get(site.rule.name, entries["pipeoptim"]).make(site)


@register("predicted")
def predicted(site: Site) -> Predicted:
    """Return weights with memory for the newest version and one prediction."""
    return Predicted(site)
