"""Predicted: forwards, or both directions, read weights from ahead of their time, where the
optimizer is going to take them.

The gradients that they give are applied to the weights as they are: the newest version, never a
predicted one.

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
from penstock.optim.working import Working
from penstock.registry import Registry
from penstock.weights.reads import Reads
from penstock.weights.uses import Use

#: From the stage to the direction that a rule predicts along, by the rule's name. Rules that are
#: not here do as PipeOptim does.
DIRECTIONS: Registry[Callable[[Site], Direction]] = Registry("prediction", "penstock.optim")


@DIRECTIONS.register("spectrain")
def spectrain(site: Site) -> Direction:
    """Momentum. The paper's v = γv + (1-γ)g is torch's SGD with dampening γ; without, lr and v each
    have the factor the other lacks.
    """
    _refuse(site, lambda group: group["momentum"] == 0, "momentum=0", "give it momentum")
    return pipeoptim(site)


@DIRECTIONS.register("xpipe")
def xpipe(site: Site) -> Direction:
    """Adam's ratio with the moments divided by 1 - β and not by 1 - β^t, as in the paper."""
    _refuse(site, lambda group: group["amsgrad"], "amsgrad=True", "leave amsgrad away")
    return _adam(site, constant=True)


@DIRECTIONS.register("pipeoptim")
def pipeoptim(site: Site) -> Direction:
    """What the optimizer itself would do: the gradient, momentum, Adam's ratio with its bias
    corrections, or RMSprop's.
    """
    return _OF_KIND[_kind(site)](site)


def _sgd(site: Site) -> Direction:
    _refuse(site, lambda group: group["nesterov"], "nesterov=True", "leave nesterov away")
    assert site.update.optimizer is not None
    return SgdDirection(site.update.optimizer, site.update.parameters)


def _adam(site: Site, *, constant: bool = False) -> Direction:
    _refuse_complex(site)
    assert site.update.optimizer is not None
    return AdamDirection(site.update.optimizer, site.update.parameters, constant=constant)


def _rmsprop(site: Site) -> Direction:
    _refuse(site, lambda group: group["centered"], "centered=True", "leave centered away")
    _refuse(site, lambda group: group["momentum"] != 0, "momentum", "leave momentum away")
    _refuse_complex(site)
    assert site.update.optimizer is not None
    return RmspropDirection(site.update.optimizer, site.update.parameters)


_OF_KIND: Mapping[str, Callable[[Site], Direction]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
}


def _kind(site: Site) -> str:
    assert site.update.optimizer is not None
    kind = kind_of(site.update.optimizer)
    if kind not in _OF_KIND:
        raise no_formula(site, kind, f"those it has are for {', '.join(_OF_KIND)}")
    return kind


def _refuse(
    site: Site, bad: Callable[[dict[str, object]], object], setting: str, instead: str
) -> None:
    kind = _kind(site)
    assert site.update.optimizer is not None
    if any(bad(group) for group in site.update.optimizer.param_groups):
        raise no_formula(site, f"{kind} with {setting}", instead)


def _refuse_complex(site: Site) -> None:
    if any(parameter.is_complex() for parameter in site.update.parameters):
        raise no_formula(site, f"{_kind(site)} on complex weights", "it is for real ones")


@final
class Predicted(StageWeights):
    """The newest version, and in its place, while an op needs it, a prediction. Contents are named
    (version, updates ahead).
    """

    def __init__(self, site: Site) -> None:
        self._stage, self._update, self._use = site.stage, site.update, site.use
        self._direction = direction_of(site)
        self._newest = 0
        # Besides the working copy a rule may have room for predictions, the forward's first: what
        # is kept need not be made again.
        self._spare = site.rule.extra - 1
        self._in_flight: dict[int, Use] = {}
        self._begun: set[int] = set()
        self._working = Working(site.update, newest=(0, 0))

    def before_forward(self, number: int) -> None:
        """The version that it reads, moved ahead."""
        use = self._in_flight[number] = self._use(number)
        self._read(number, use.batch, "forward", _forward(use.reads))

    def before_backward(self, number: int) -> None:
        """The version that it reads, moved ahead. A W may come when an update later than its I has
        made another the newest.
        """
        use = self._in_flight[number]
        version, ahead = _backward(use.reads)
        if number in self._begun and not self._working.has((version, ahead)):
            version = self._newest
        self._begun.add(number)
        self._read(number, use.batch, "backward", (version, ahead))

    def finished(self, number: int) -> None:
        """Its backward has ended."""
        self._begun.discard(number)
        self._in_flight.pop(number, None)

    def update(self, version: int) -> None:
        """Step the newest version."""
        self._working.begin_step()
        self._direction.remember()
        self._update.advance()
        self._newest = version
        self._working.end_step((version, 0))

    def drain(self) -> None:
        """The newest version, now 0."""
        self._working.restart((0, 0))
        self._direction.restart()
        self._in_flight.clear()
        self._begun.clear()
        self._newest = 0

    def held_bytes(self) -> int:
        """Weights, those put aside, predictions that are kept, and what the direction takes."""
        return self._working.held_bytes() + self._direction.held_bytes()

    def state(self) -> State:
        """What the direction is made of besides the optimizer's state."""
        return self._direction.state()

    def load_state(self, state: State) -> None:
        """Take that back."""
        self._direction.restart()
        self._direction.load_state(state)

    def _read(self, number: int, batch: int, kind: str, content: tuple[int, int]) -> None:
        version, ahead = content
        if version != self._newest and not self._working.has(content):
            raise RunError(
                f"stage {self._stage}: the {kind} of micro-batch {number} reads weight version {version}, {ahead} ahead, and "
                f"the newest is {self._newest}: predictions are made of the newest"
            )
        change = functools.partial(self._direction.move, updates=ahead) if ahead else None
        self._working.show(content, change)
        again = self._again(number, batch, kind, content)
        self._working.keep(
            kind,
            content if again else None,
            change,
            soon=self._spare >= (1 if kind == "forward" else 2),
        )

    def _again(self, number: int, batch: int, kind: str, content: tuple[int, int]) -> bool:
        """Whether a later micro-batch of the batch reads the same. Maybe after an update, when it
        could not be made any more.
        """
        read = _forward if kind == "forward" else _backward
        later = itertools.takewhile(
            lambda use: use.batch == batch, map(self._use, itertools.count(number + 1))
        )
        return any(read(use.reads) == content for use in later)


def _forward(reads: Reads) -> tuple[int, int]:
    return reads.forward, reads.forward_ahead


def _backward(reads: Reads) -> tuple[int, int]:
    return reads.backward, reads.backward_ahead


def direction_of(site: Site) -> Direction:
    """Where a rule says that the weights of a stage are going.

    Raises:
        SettingError: its paper has no formula for this optimizer, or for how it is set.
    """
    entries = DIRECTIONS.entries()
    return entries.get(site.rule.name, entries["pipeoptim"]).make(site)


@register("predicted")
def predicted(site: Site) -> Predicted:
    """A storage for the newest version and one for what is read."""
    return Predicted(site)
