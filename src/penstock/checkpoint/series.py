"""A series of checkpoints of one run, each in a folder of its own: `checkpoints/step-000123/`.

A checkpoint is written under another name, and gets its own when it is complete and on the disk.
Only then are older ones removed. So whatever interrupts a save, all checkpoints of the series but
the newest stay as they were, and a folder with the name of a step has been complete once.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.checkpoint_files import read_header
from penstock.checkpoint.checkpoint_index import INDEX, Checkpoint, read_index
from penstock.checkpoint.save_job import Publication
from penstock.errors import FileError
from penstock.store import sync_file, sync_folder

#: Name of the folder of a step. Six digits at least keep the order of names that of steps in
#: listings.
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class SavedStep:
    """A whole checkpoint.

    Attributes:
        folder: its folder.
        index: its index.
    """

    folder: Path
    index: Checkpoint

    @property
    def step(self) -> int:
        """Number of trained batches."""
        return self.index.step

    @property
    def score(self) -> float:
        """How good its weights are, lower is better; infinity if that is not known."""
        return math.inf if self.index.score is None else self.index.score


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return root / f"step-{step:06d}"


def partial_folder(root: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of a step is written."""
    return root / f".step-{step:06d}.partial"


def step_folders(root: Path) -> list[Path]:
    """Return the folders of a series that have the name of a step, newest first."""
    folders: list[tuple[int, Path]] = []
    with suppress(OSError, ValueError):
        for folder in root.iterdir():
            match = _STEP.fullmatch(folder.name)
            if match and folder.is_dir():
                folders.append((int(match[1]), folder))
    return [folder for _, folder in sorted(folders, reverse=True)]


def whole_checkpoints(
    candidates: Sequence[Path], say: Callable[[str], None] | None = None
) -> list[SavedStep]:
    """Return the whole ones of some checkpoints, newest first.

    A checkpoint is whole if its index and the headers of all its files have the recorded checksums
    and the files have the recorded sizes. The tensors themselves are verified when they are loaded.

    Args:
        candidates: folders of checkpoints.
        say: receives a line for every checkpoint that is not whole.
    """
    whole = []
    for folder in candidates:
        try:
            whole.append(SavedStep(folder, _verify(folder)))
        except FileError as error:
            # An older checkpoint may be whole.
            if say is not None:
                say(f"skipping the checkpoint {folder}: {error}")
    return sorted(whole, key=lambda saved: -saved.step)


def newest_whole(
    candidates: Sequence[Path], say: Callable[[str], None] | None = None
) -> SavedStep | None:
    """Return the newest whole checkpoint, None if there is none; see `whole_checkpoints`."""
    return next(iter(whole_checkpoints(candidates, say)), None)


def best_whole(candidates: Sequence[Path]) -> SavedStep | None:
    """Return the whole checkpoint with the best known score, None if no score is known."""
    scored = [saved for saved in whole_checkpoints(candidates) if saved.score < math.inf]
    return min(scored, key=lambda saved: (saved.score, -saved.step), default=None)


def _verify(folder: Path) -> Checkpoint:
    """Return the index of a checkpoint of which this host has all that it should have.

    Raises:
        FileError: it has not.
    """
    index = read_index(folder)
    for name in index.files:
        # Where every host has its own disk, the others' files are fetched when they are loaded.
        if name in index.hosts and not (folder / name).exists():
            continue
        read_header(folder, name, index)
    return index


def publication(root: Path, step: int, keep: int, logs: Sequence[Path] = ()) -> Publication:
    """Return what completes the checkpoint of a step.

    Args:
        root: the folder of the series.
        step: number of trained batches.
        keep: number of newest checkpoints that stay; the best one stays too.
        logs: files that are put on the disk first.
    """
    partial, target = partial_folder(root, step), step_folder(root, step)

    def publish() -> None:
        """Give the complete checkpoint its name.

        Raises:
            FileError: the folder cannot be renamed.
        """
        try:
            for log in logs:
                if log.exists():
                    sync_file(log)
            _remove(target)  # one of the same step, which was not whole or was not continued from
            partial.rename(target)
            sync_folder(root)
        except OSError as error:
            raise FileError(f"cannot write the checkpoint {target}: {error.strerror}") from error

    def clean(index: Checkpoint) -> None:
        """Remove older checkpoints, and what interrupted saves have left."""
        del index
        prune(root, keep)

    def discard() -> None:
        """Remove the folder of a save that has failed."""
        shutil.rmtree(partial, ignore_errors=True)

    return Publication(root, publish, clean, discard)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints and the best one; errors are ignored.

    Folders that are not whole do not count, and are removed when they are older than those that
    stay.
    """
    whole = whole_checkpoints(step_folders(root))
    best = best_whole([saved.folder for saved in whole])
    oldest = min((saved.step for saved in whole[:keep]), default=0)
    for folder in step_folders(root):
        is_best = best is not None and folder == best.folder
        if not is_best and int(folder.name.removeprefix("step-")) < oldest:
            _remove(folder)
    for folder in root.glob(".step-*"):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(root: Path, step: int) -> None:
    """Rename the checkpoints of later steps, which a run that continues from `step` cannot use.

    They are damaged, as the run would have continued from them.
    """
    for folder in step_folders(root):
        if int(folder.name.removeprefix("step-")) > step:
            target = root / f"damaged-{folder.name}"
            shutil.rmtree(target, ignore_errors=True)
            with suppress(OSError):
                folder.rename(target)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its index first: what is left of it is never taken for a whole one."""
    # As `rmtree` below, which tries the rest whatever fails.
    with suppress(OSError):
        (folder / INDEX).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
