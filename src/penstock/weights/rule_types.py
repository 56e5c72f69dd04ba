"""Input and output of a weight rule: a micro-batch on a stage, and the versions that it reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One micro-batch on one stage: what a weight rule decides by.

    Versions count from 0, and are those of the copy of the weights that the micro-batch reads and
    updates.

    Attributes:
        stage, stages: the stage, and the number of stages.
        batch: the batch, counted from the beginning of the stream.
        micro_batch, micro_batches: position among the micro-batches of the batch that run on this
            rank, in the order of their F, and the number of these.
        at_forward, at_backward: the newest version when its F begins, and when its B (or I) begins.
        batch_at_forward, batch_at_backward: the same for the first F and the first B of its batch
            on this rank.
        at_first_stage: the newest version of the first stage when the micro-batch's F begins there.
    """

    stage: int
    stages: int
    batch: int
    micro_batch: int
    micro_batches: int
    at_forward: int
    at_backward: int
    batch_at_forward: int
    batch_at_backward: int
    at_first_stage: int

    def later(self, batches: int, updates: int, updates_of_first_stage: int) -> Place:
        """Return the equivalent place a number of batches later.

        Args:
            batches: number of batches.
            updates, updates_of_first_stage: number of updates of this stage, and of the first
                stage, in these batches.
        """
        return Place(
            self.stage,
            self.stages,
            self.batch + batches,
            self.micro_batch,
            self.micro_batches,
            self.at_forward + updates,
            self.at_backward + updates,
            self.batch_at_forward + updates,
            self.batch_at_backward + updates,
            self.at_first_stage + updates_of_first_stage,
        )


@dataclass(frozen=True)
class Reads:
    """The versions that the forward and the backward of a micro-batch read.

    Attributes:
        forward, backward: the versions.
        forward_ahead, backward_ahead: number of versions beyond these that the rule predicts and
            reads instead; 0 for no prediction.
    """

    forward: int
    backward: int
    forward_ahead: int = 0
    backward_ahead: int = 0
