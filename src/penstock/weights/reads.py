"""Place and Reads: where a micro-batch stands on a stage, and which versions of the weights its
forward and its backward read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One micro-batch on one stage. Versions are those of the copy of the weights that it reads and
    updates, counted from 0.

    Attributes:
        stage, stages: which stage, and how many there are.
        batch: its batch, counted from the stream's beginning.
        micro_batch, micro_batches: of those that its batch has on this rank: which in the order of
        their F, and how many. at_forward, at_backward: the newest version when its F begins, and
        when its B (or I) begins. batch_at_forward, batch_at_backward: the same for the first F and
        the first B that its batch has there. at_first_stage: the newest version of the first stage
        when the micro-batch's F begins there.
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
        """The place of the micro-batch that stands where this one does so many batches later."""
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

    `forward_ahead` and `backward_ahead` are how many versions further a rule predicts that it reads
    instead.
    """

    forward: int
    backward: int
    forward_ahead: int = 0
    backward_ahead: int = 0
