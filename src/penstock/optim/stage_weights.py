"""StageWeights: how the tensors of one stage come to be the version that a weight rule says an op
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from penstock.optim.update import Update
from penstock.schedule.stream import Waves
from penstock.weights.catalogue import WeightRule
from penstock.weights.uses import Use

#: By name, one entry for every trainable parameter of a stage.
State = Mapping[str, Sequence[Tensor | None]]


class StageWeights(Protocol):
    """The weights of one stage, before and after its ops. Numbers of micro-batches and versions
    count from 0 since the last drain.

    Only trainable parameters are meant. Frozen ones are the same for every version, and buffers
    (batch norm's statistics) have none: the newest is the only one.
    """

    def before_forward(self, number: int) -> None:
        """Let the stage's parameters be what the F of this micro-batch reads."""

    def before_backward(self, number: int) -> None:
        """Let the stage's parameters be what its B, I or W reads."""

    def finished(self, number: int) -> None:
        """Its B (or its W) is done: nothing of it is in flight any more."""

    def update(self, version: int) -> None:
        """U: with the gradients that are in `.grad` make this version, and drop them."""

    def drain(self) -> None:
        """Nothing is in flight: the parameters become the newest version, and numbers and versions
        start anew from 0.
        """

    @property
    def versions(self) -> int:
        """Full versions of the weights that are held now; 1 when all is shared."""
        return 1

    @property
    def peak_versions(self) -> int:
        """The most of them since this was made, after any op."""
        return self.versions

    def held_bytes(self) -> int:
        """Bytes of the trainable weights in all versions, copies and scratch. Gradients and
        optimizer state are not counted.
        """
        ...

    def more_optimizers(self) -> Sequence[Optimizer]:
        """Those that the rule keeps besides the stage's own."""
        return ()

    def state(self) -> State:
        """Of a drained stage, the tensors that a checkpoint must have besides parameters and
        optimizer.
        """
        return {}

    def load_state(self, state: State) -> None:
        """Go on from what `state` gave; without anything, from the parameters as they are."""
        del state

    def facts(self) -> Mapping[str, float]:
        """Likewise, plain numbers."""
        return {}

    def load_facts(self, facts: Mapping[str, float]) -> None:
        """Take what `facts` gave."""
        del facts


class WaveExchange(Protocol):
    """The other copies of a stage, to which one of them hands on what it has learnt."""

    @property
    def copies(self) -> int:
        """How many there are, this one included."""
        ...

    def hand_on(self, wave: int, tensors: list[Tensor]) -> None:
        """Give the other copies this one's tensors of a wave. They may be shared with it; nobody
        changes them afterwards.
        """

    def take_in(self, wave: int) -> list[list[Tensor]]:
        """What the other copies handed on for that wave, in the order of their ranks; waits until
        it is there.
        """
        ...


@dataclass(frozen=True)
class Site:
    """What the weights of one stage are made of.

    Attributes:
        update: its parameters, optimizer, and the factory of optimizers.
        use: by micro-batch, counted from the stream's beginning, what its ops do with the weights
        of this stage. rule: the weight rule. options: the rule's options, defaults filled in.
        stage: which one. staleness: mean age of a gradient at this stage in the steady state of the
        program, in updates. pipelines: copies of the weights that take turns here. waves: when
        copies on several ranks tell each other. exchange: the other copies. stages: how many stages
        the model has; 0 where nobody says.
    """

    update: Update
    use: Callable[[int], Use]
    rule: WeightRule
    options: Mapping[str, float]
    stage: int = 0
    staleness: float = 0.0
    pipelines: int = 1
    waves: Waves | None = None
    exchange: WaveExchange | None = None
    stages: int = 0
