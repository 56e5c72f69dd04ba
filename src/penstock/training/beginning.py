"""The beginning of a run on a rank: new weights, or those of its newest checkpoint."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint.weight_files import load_weights
from penstock.errors import FileError
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.state.checkpoints import Checkpoints
from penstock.standard_error import write_line
from penstock.training.config import TrainConfig
from penstock.training.first_check import check_first_batch
from penstock.training.recovery.live_recovery import release
from penstock.training.resume import accept_run, set_options
from penstock.training.task import Task


def begin(pipe: Pipeline, task: Task, config: TrainConfig, *, quiet: bool) -> None:
    """Load the initial weights of a new run, if it has any, and check its first batch.

    Args:
        pipe: to be trained.
        task: of the run.
        config: of the run.
        quiet: do not print the result of the check.
    """
    if config.initial_weights is not None:
        pipe.load_state_dict(load_weights(config.initial_weights))
    if config.self_check:
        line = check_first_batch(pipe, task, config)
        if not quiet:
            write_line(line)


def resume(
    pipe: Pipeline, checkpoints: Checkpoints, config: TrainConfig, folder: Path, *, is_rank_0: bool
) -> None:
    """Load the newest whole checkpoint of a run that continues, on disk or in memory.

    Args:
        pipe: to be trained.
        checkpoints: of the run.
        config: of the run.
        folder: of the run.
        is_rank_0: whether this is rank 0, which accepts the new files of the run.

    Raises:
        FileError: there is no whole checkpoint, or it does not fit.
    """
    if checkpoints.resume(pipe) is None:
        raise FileError(f"{folder} holds no checkpoint to continue from")
    set_options(pipe, config)
    if is_rank_0:
        accept_run(folder, pipe.step)
        if checkpoints.memory is not None:
            release(checkpoints.memory)
