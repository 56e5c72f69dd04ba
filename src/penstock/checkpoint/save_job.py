"""Save of a checkpoint while training goes on.

The state is copied to host memory at the start; a thread of every process writes it. A save has
three phases, and all ranks must have ended one before any begins the next:

1. every rank writes the files of its stages;
2. one rank of each disk writes the index, and publishes the folder;
3. the same rank removes what is no longer needed.

Only `advance`, which all ranks call after the same step, communicates.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpoint import CheckpointWriter, FileContent
from penstock.checkpoint.checkpoint_files import is_visible, remove_others
from penstock.checkpoint.checkpoint_index import Checkpoint, FileSum, write_index
from penstock.checkpoint.disks import Disks
from penstock.errors import FileError, PenstockError
from penstock.ranks.processes.rank_reports import Report, attempt, check_reports, exchange
from penstock.ranks.world import World

#: Niceness of the writing thread: what it computes, checksums, gives way to training.
_NICE = 10


@dataclass(frozen=True)
class Publication:
    """What completes a checkpoint on one disk.

    Attributes:
        folder: the folder that messages name.
        publish: called when the index has been written: gives the checkpoint its final name.
        clean: called when all disks have the checkpoint: removes what it replaces. Must not fail.
        discard: called after a failure, when the files have been removed. Must not fail.
    """

    folder: Path
    publish: Callable[[], None]
    clean: Callable[[Checkpoint], None]
    discard: Callable[[], None]


def in_place(folder: Path) -> Publication:
    """Return the publication of a folder that holds one checkpoint: older files are removed."""
    return Publication(
        folder,
        publish=lambda: None,
        clean=lambda index: remove_others(folder, index.files),
        discard=lambda: None,
    )


@dataclass
class _Background:
    """Jobs of the local ranks, run one after another in a thread.

    Attributes:
        jobs: by rank.
        reports: their reports, by rank, when the thread has ended.
        error: an exception that is no `PenstockError`.
    """

    jobs: Mapping[int, Callable[[], Any]]
    reports: dict[int, Report] = field(default_factory=dict)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Run the jobs with low priority."""
        with suppress(OSError, AttributeError):  # Linux alone has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            for rank, job in self.jobs.items():
                self.reports[rank] = attempt(rank, job)
        except BaseException as error:  # noqa: BLE001 - raised by `advance`, in the main thread
            self.error = error


class SaveJob:
    """A checkpoint that is being saved. The constructor copies the state to host memory.

    Args:
        writer: what writes the files; see `make_identity` for its identity.
        world: the ranks.
        disks: the disks on which the ranks see the folder.
        publication: what completes the checkpoint on a disk.
    """

    def __init__(
        self, writer: CheckpointWriter, world: World, disks: Disks, publication: Publication
    ) -> None:
        self.step = writer.progress.step
        self._writer, self._world, self._disks = writer, world, disks
        self._publication = publication
        self._index: Checkpoint | None = None
        self._phases = [self._commit, self._clean]
        captured = world.run(lambda rank: _capture(writer, rank))
        self._background = _Background(
            {rank: _write_job(writer, contents) for rank, contents in captured.items()}
        )

    @property
    def ready(self) -> bool:
        """Whether this process has ended its part of the current phase."""
        return not self._background.thread.is_alive()

    def advance(self) -> bool:
        """Begin the next phase. All ranks call it after the same step; it waits for all of them.

        Returns:
            Whether the checkpoint is complete.

        Raises:
            FileError: the folder cannot be written. The previous checkpoint is unchanged.
            SettingError: the state cannot be saved, or contains NaN.
        """
        self._background.thread.join()
        error = self._background.error
        if error is not None:
            # The other ranks are about to exchange reports, and would wait for this one.
            self._world.abandon(error)
            raise error
        reports = exchange(self._world, self._background.reports)
        try:
            folder = self._publication.folder
            check_reports(reports, f"the previous checkpoint in {folder} is unchanged")
        except PenstockError:
            self._writer.remove()
            self._publication.discard()
            raise
        if not self._phases:
            return True
        phase = self._phases.pop(0)
        self._background = _Background(phase(reports))
        return False

    def wait(self) -> None:
        """Complete the checkpoint. All ranks call it.

        Raises:
            FileError, SettingError: see `advance`.
        """
        while not self.advance():
            pass

    def _commit(self, reports: list[Report]) -> dict[int, Callable[[], Any]]:
        """Return the jobs that write the index, for the leaders of the disks."""
        sums: dict[str, FileSum] = {}
        hosts: dict[str, str] = {}
        for report in reports:
            for name, row in report.value["files"].items():
                sums[name] = FileSum(*row)
                hosts[name] = report.host
        keeps = any(report.value["keeps"] for report in reports)
        index = self._writer.index(sums, {} if self._disks.shared else hosts, keeps=keeps)
        self._index = index

        def commit(rank: int) -> None:
            """Complete the checkpoint on the disk of a rank."""
            if self._disks.leaders[rank] != rank:
                return
            self._check_visible(rank, reports, sums)
            self._writer.folder.mkdir(parents=True, exist_ok=True)  # a disk without a stage
            write_index(self._writer.folder, index)
            self._publication.publish()

        return {rank: _job(commit, rank) for rank in self._world.local_ranks}

    def _check_visible(
        self, leader: int, reports: list[Report], sums: Mapping[str, FileSum]
    ) -> None:
        """Check that a leader sees the files of all ranks that it has a disk with.

        Raises:
            FileError: it does not.
        """
        folder = self._writer.folder
        for member in self._disks.members(leader):
            report = reports[member]
            for name in report.value["files"]:
                if not is_visible(folder, name, sums[name]):
                    raise FileError(
                        f"rank {report.rank} on host {report.host} wrote {name} into "
                        f"{folder.absolute()}, which rank {leader} on host "
                        f"{reports[leader].host} does not see: no rank could load this "
                        "checkpoint. Save into one folder, on a disk that all ranks of a host see"
                    )

    def _clean(self, reports: list[Report]) -> dict[int, Callable[[], Any]]:
        """Return the jobs that remove what the checkpoint replaces."""
        del reports
        index = self._index
        assert index is not None

        def clean(rank: int) -> None:
            """Clean up on the disk of a rank."""
            if self._disks.leaders[rank] == rank:
                self._publication.clean(index)

        return {rank: _job(clean, rank) for rank in self._world.local_ranks}


class GatheredSave:
    """A save by other processes, which this one has only given its part of the state.

    Args:
        writer: what would write the files.
        world: the ranks.
    """

    ready = True

    def __init__(self, writer: CheckpointWriter, world: World) -> None:
        self.step = writer.progress.step
        world.run(writer.capture)

    def advance(self) -> bool:
        """See `SaveJob.advance`: there is nothing to do."""
        return True

    def wait(self) -> None:
        """See `SaveJob.wait`."""


def make_identity(world: World) -> str:
    """Return the random identity of a new checkpoint, the same on every rank."""
    return str(world.broadcast([secrets.token_hex(16)], 0)[0])


def _job(action: Callable[[int], None], rank: int) -> Callable[[], None]:
    """Bind an action to a rank."""
    return lambda: action(rank)


def _capture(writer: CheckpointWriter, rank: int) -> dict[str, FileContent] | PenstockError:
    """Return the state of a rank, or the error that forbids saving it, for all ranks to raise."""
    try:
        return writer.capture(rank)
    except PenstockError as error:
        return error


def _write_job(
    writer: CheckpointWriter, contents: dict[str, FileContent] | PenstockError
) -> Callable[[], Any]:
    """Return the job that writes the files of a rank."""

    def write() -> dict[str, Any]:
        if isinstance(contents, PenstockError):
            raise contents
        return writer.write(contents)

    return write
