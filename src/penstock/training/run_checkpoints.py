"""The checkpoints in a run's folder, and a request to go on with another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.checkpoint_index import INDEX
from penstock.checkpoint.folder_lock import has_lock
from penstock.checkpoint.series import SavedStep, newest_whole, step_folders
from penstock.errors import FileError
from penstock.files.read import read_json
from penstock.runtime.state.checkpoints import Checkpoints, SeriesContext
from penstock.standard_error import write_line
from penstock.store import write_json
from penstock.training.config import TrainConfig

#: Folder of the series in a run's folder, and of the single checkpoint of version 0.1.
CHECKPOINTS, SINGLE_CHECKPOINT = "checkpoints", "checkpoint"

#: File in a run's folder that asks for another number of ranks.
RESIZE = "resize.json"


@dataclass(frozen=True)
class ResizeRequest:
    """A request to go on with another number of ranks; the content of `resize.json`."""

    ranks: int


def run_checkpoints(
    config: TrainConfig,
    folder: Path,
    on_saved: Callable[[int, Path], None] | None = None,
    memory: Path | None = None,
) -> Checkpoints:
    """Return the checkpoints of a run, for its ranks.

    Args:
        config: of the run.
        folder: of the run.
        on_saved: called with the step and the folder of every checkpoint that is complete.
        memory: folder of a checkpoint in memory, from which the run may continue as well.
    """
    return Checkpoints(
        folder / CHECKPOINTS,
        every=config.checkpoint_every,
        keep=config.keep,
        context=SeriesContext(
            earlier=[folder / SINGLE_CHECKPOINT],
            logs=[folder / "metrics.jsonl"],
            stop_when=(folder / RESIZE).exists,
            on_saved=on_saved,
            memory=memory,
        ),
        say=write_line,
    )


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders in a run's folder that may hold a checkpoint, newest first."""
    single = folder / SINGLE_CHECKPOINT
    return [*step_folders(folder / CHECKPOINTS), *([single] if (single / INDEX).exists() else [])]


def newest_checkpoint(folder: Path, say: Callable[[str], None] | None = None) -> SavedStep:
    """Return the newest whole checkpoint of a run.

    Args:
        folder: of the run.
        say: receives a line for every checkpoint that is skipped.

    Raises:
        FileError: there is none.
    """
    lines: list[str] = []
    newest = newest_whole(checkpoint_folders(folder), lines.append)
    if newest is None:
        if lines:
            raise FileError(f"{folder} holds no whole checkpoint to continue from: {lines[0]}")
        raise FileError(
            f"{folder} holds no checkpoint to continue from: there is none in {CHECKPOINTS}. A "
            "run writes one at the end of an epoch, at --checkpoint-every and at "
            "SIGTERM, unless --checkpoint is end or never: start it anew, in another folder"
        )
    if say is not None:
        for line in lines:
            say(line)
    return newest


def request_ranks(folder: Path, ranks: int) -> None:
    """Ask a run to save and go on with another number of ranks.

    Raises:
        FileError: the folder holds no run or one that has ended, or cannot be written.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        reason = "is no regular file" if config.exists() else "is not there"
        raise FileError(f"{folder} holds no run: its config.yaml {reason}")
    if not has_lock(folder):
        raise FileError(
            f"no run is training in {folder}: continue it with another number of ranks by "
            f"`penstock train --resume {folder} --ranks {ranks}`"
        )
    write_json(folder / RESIZE, ResizeRequest(ranks))


def take_request(folder: Path) -> int | None:
    """Remove the request for another number of ranks, and return the number; None without one.

    Raises:
        FileError: the file is not what `request_ranks` writes.
    """
    path = folder / RESIZE
    if not path.exists():
        return None
    try:
        return read_json(path, ResizeRequest).ranks
    finally:
        # Also if it is damaged: it would stop the run again and again.
        path.unlink(missing_ok=True)
