"""Ranks that are processes find out, before anything is computed, whether they are about to run the
same.
"""

from __future__ import annotations

from penstock.runtime.assembly import Assembly
from penstock.runtime.description import describe_optimizers, describe_run
from penstock.runtime.meeting import Meeting
from penstock.runtime.ranks import Place, in_threads
from penstock.runtime.setting import Setting
from penstock.runtime.stage_builder import Training
from penstock.tracing.chain import TracedChain
from penstock.transport.group import join


def meeting_of(setting: Setting, place: Place) -> Meeting | None:
    """The next meeting of all ranks; None where they are threads of this process.

    Raises:
        SettingError: what is asked for makes no sense.
        RunError: this process is alone.
    """
    if in_threads(setting.schedule, place):
        return None
    join()
    return Meeting.next(place.deadline_s)


def compare_settings(
    meeting: Meeting | None,
    traced: TracedChain,
    setting: Setting,
    training: Training,
    **further: object,
) -> None:
    """Compare this rank's model and settings with those of all others.

    Args:
        meeting: where, if anywhere.
        traced: the model.
        setting: what is run.
        training: how it is trained.
        further: other settings that ranks must share, by name.

    Raises:
        RanksDiffer: ranks differ; the message, the same on every rank, says in what.
        RunError: a rank could not make its pipeline, or did not come.
    """
    if meeting is not None:
        meeting.compare(describe_run(traced, setting, training, **further))


def compare_optimizers(meeting: Meeting | None, made: Assembly) -> None:
    """Compare the optimizers that were made with those of all other ranks. Raises as
    `compare_settings`.
    """
    if meeting is None:
        return
    if made.steps:
        meeting.compare(describe_optimizers(made))
    meeting.closed = True
