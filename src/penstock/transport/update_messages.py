"""Numbers of the messages of an update, which share one space for each stage.

A message of kind U is identified by its stage and its number. Replicas of a stage, waves, and the
global step after a program, which uses stage 0, may send each other messages at the same time: all
numbers stand here, so that none is used twice.
"""

from __future__ import annotations

from enum import IntEnum, unique

from penstock.schedule.lower import Message
from penstock.schedule.op import Kind


@unique
class UpdateMessage(IntEnum):
    """Message numbers of an update.

    From GRADIENTS to COPIED, and UPDATED_WEIGHTS and OPTIMIZER_STATE, those of the replicas of a
    stage; from TIED_GRADIENTS to VERDICT those of the global step; from FIRST_WAVE on those of waves
    of batches.
    """

    GRADIENTS = 0
    SUMS = 1
    BUFFERS = 2
    WEIGHTS = 3
    SEGMENT = 4
    READY = 5
    SUMMED = 6
    COPIED = 7
    TIED_GRADIENTS = 8
    TIED_WEIGHTS = 9
    NORMS = 10
    VERDICT = 11
    UPDATED_WEIGHTS = 12
    OPTIMIZER_STATE = 13
    FIRST_WAVE = 16

    def of_stage(self, stage: int) -> Message:
        """The message of a stage."""
        return Message(Kind.U, stage, self)

    @property
    def of_run(self) -> Message:
        """The message of the global step: of stage 0, which every run has."""
        return self.of_stage(0)


#: Message numbers for waves; they are reused in turn.
_WAVE_NUMBERS = 4096


def wave_message(stage: int, wave: int) -> Message:
    """Return the message of a wave of batches."""
    number = UpdateMessage.FIRST_WAVE + wave % _WAVE_NUMBERS
    return Message(Kind.U, stage, number)
