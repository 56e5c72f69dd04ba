"""Comparison of the settings of all rank processes, before anything is computed.

Each rank describes its model, its settings and its optimizers; every rank gets the same error if
any two descriptions differ.
"""

from __future__ import annotations

from penstock.runtime.assembly import Assembly, Training
from penstock.runtime.description import describe_optimizers, describe_run
from penstock.runtime.meeting import Meeting
from penstock.runtime.ranks import Place, in_threads
from penstock.runtime.setting import Setting
from penstock.tracing.chain import TracedChain
from penstock.transport.group import join


def meeting_of(setting: Setting, place: Place) -> Meeting | None:
    """Return the object by which the ranks compare one pipeline's settings.

    Returns:
        None where all ranks are threads of this process, which have nothing to compare.

    Raises:
        SettingError: the settings contradict each other.
        RunError: this process is the only one of the run.
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
    """Compare this rank's model and settings with those of all other ranks.

    Args:
        meeting: how ranks exchange descriptions; with None nothing is compared.
        traced: the model.
        setting: the schedule, the cut and the placement.
        training: loss, optimizer and training options.
        further: other settings that all ranks must share, by name.

    Raises:
        RanksDiffer: ranks differ; the message is the same on every rank and lists the differences.
        RunError: a rank failed to construct its pipeline, or did not answer in time.
    """
    if meeting is not None:
        meeting.compare(describe_run(traced, setting, training, **further))


def compare_optimizers(meeting: Meeting | None, assembly: Assembly) -> None:
    """Compare the constructed optimizers with those of all other ranks, and end the comparison.

    Args:
        meeting: as for `compare_settings`.
        assembly: the ranks of this process.

    Raises:
        RanksDiffer, RunError: as `compare_settings`.
    """
    if meeting is None:
        return
    if assembly.steps:
        meeting.compare(describe_optimizers(assembly))
    meeting.closed = True
