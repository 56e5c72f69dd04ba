"""StageWeights: the interface by which a stage's weights become the version that an op reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from penstock.optim.update import Update
from penstock.schedule.streaming.streams import Waves
from penstock.weights.catalogue import WeightRule
from penstock.weights.weight_uses import Use

#: By name, a list with one entry for every trainable parameter of a stage.
State = Mapping[str, Sequence[Tensor | None]]


class StageWeights(Protocol):
    """The weights of one stage, before and after its ops.

    Micro-batches and versions are numbered from 0 since the last drain. Only trainable parameters
    have versions. Frozen parameters are the same in every version, and of buffers (batch norm's
    statistics) only the newest exists.
    """

    def before_forward(self, number: int) -> None:
        """Set the stage's parameters to the version that the F of this micro-batch reads."""

    def before_backward(self, number: int) -> None:
        """Set the stage's parameters to the version that the micro-batch's B, I or W reads."""

    def finished(self, number: int) -> None:
        """Note that the B (or the W) of this micro-batch is done: it reads no more versions."""

    def update(self, version: int) -> None:
        """Create version `version` (U) from the gradients in `.grad`, and drop the gradients."""

    def drain(self) -> None:
        """Set the parameters to the newest version, and restart the numbering from 0.

        Called when no micro-batch is in flight.
        """

    @property
    def versions(self) -> int:
        """Number of full versions of the weights held now; 1 if all memory is shared."""
        return 1

    @property
    def peak_versions(self) -> int:
        """Maximum of `versions` over all ops so far."""
        return self.versions

    def held_bytes(self) -> int:
        """Return the bytes of trainable weights in all versions, copies and scratch memory.

        Gradients and optimizer state are not included.
        """
        ...

    def more_optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers that the rule has besides the stage's own."""
        return ()

    def state(self) -> State:
        """Return the tensors that a checkpoint needs besides parameters and optimizer.

        The stage has been drained.
        """
        return {}

    def load_state(self, state: State) -> None:
        """Restore the result of `state`; if empty, start from the parameters' present values."""
        del state

    def facts(self) -> Mapping[str, float]:
        """Return the numbers that a checkpoint needs. The stage has been drained."""
        return {}

    def load_facts(self, facts: Mapping[str, float]) -> None:
        """Restore the result of `facts`."""
        del facts


class WaveExchange(Protocol):
    """Communication of one replica of a stage with the other replicas."""

    @property
    def copies(self) -> int:
        """Number of replicas, including this one."""
        ...

    def send_wave(self, wave: int, tensors: list[Tensor]) -> None:
        """Send this replica's tensors of a wave to the other replicas.

        The tensors may be shared with them; they must not be changed afterwards.
        """

    def receive_wave(self, wave: int) -> list[list[Tensor]]:
        """Wait for the tensors that the other replicas sent for a wave.

        Returns:
            For each of the other replicas its tensors, in order of rank.
        """
        ...


@dataclass(frozen=True)
class Site:
    """The arguments of a stage's weight rule.

    Attributes:
        update: the stage's parameters, optimizer, and factory of optimizers.
        use: by micro-batch, counted from the beginning of the stream, how its ops use the weights
            of this stage.
        rule: the weight rule.
        options: the rule's options, with defaults filled in.
        stage: index of the stage.
        staleness: mean age of a gradient at this stage in the steady state, in updates.
        pipelines: number of replicas of the weights that take turns here.
        waves: when replicas on several ranks exchange their updates.
        exchange: the communication with the other replicas.
        stages: number of stages of the model; 0 if unknown.
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
