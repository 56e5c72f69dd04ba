"""Fetch files of a checkpoint from the disks of other hosts, where every host has its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.checkpoint_index import INDEX, read_index
from penstock.checkpoint.disks import find_disks
from penstock.errors import CheckpointDamaged, FileError
from penstock.ranks.processes.rank_reports import Report, attempt, check_reports, exchange
from penstock.ranks.world import World
from penstock.store import sync_file, sync_folder

#: Bytes that are sent at once.
_CHUNK = 64 * 2**20


@dataclass(frozen=True)
class _Inventory:
    """What one rank sees of a checkpoint.

    Attributes:
        rank: the rank.
        host: its host.
        identity: identity of the checkpoint; empty if the rank sees no index.
        files: names of all files of the checkpoint.
        sizes: sizes of those that the rank sees, by name.
        separate_disks: whether every host wrote to its own disk.
    """

    rank: int
    host: str
    identity: str
    files: tuple[str, ...]
    sizes: Mapping[str, int]
    separate_disks: bool


def fetch_missing(folder: Path, world: World) -> None:
    """Copy to every host the files of a checkpoint that are missing there and that another host
    has.

    Nothing is done if every rank sees everything, or no rank sees an index, or ranks see different
    checkpoints: `load` then reads, or refuses with what is wrong. What is fetched is verified as
    all files are.

    Args:
        folder: the folder of the checkpoint, on all hosts.
        world: the ranks.

    Raises:
        FileError: on every rank: a file is on no host, or cannot be written.
    """
    if len(world.local_ranks) == world.size:
        return
    first = world.local_ranks[0]
    reports = exchange(world, {first: attempt(first, lambda: _inventory(folder))})
    rows = [_parse(report) for report in reports]
    sources = [row for row in rows if row.identity]
    if not sources or len({row.identity for row in sources}) > 1:
        return
    # The index last: a folder that has one then has the files that it names.
    files = (*sources[0].files, INDEX)
    separate_disks = any(row.separate_disks for row in sources)
    missing = {row.rank: [name for name in files if name not in row.sizes] for row in rows}
    if not any(missing.values()):
        return
    lost = next((name for name in files if not _holders(rows, name)), None)
    if lost is not None:
        if not separate_disks:
            return  # a missing file of a shared folder, which every rank reports itself
        raise _lost_error(folder, lost, rows)
    disks = find_disks(world, folder)
    # One rank of each disk writes for all ranks that see it.
    receivers = [rank for rank in missing if missing[rank] and disks.leaders[rank] == rank]
    for name in files:
        needing = [rank for rank in receivers if name in missing[rank]]
        if not needing:
            continue
        holder = _holders(rows, name)[0]
        _send(world, folder / name, holder.rank, holder.sizes[name], set(needing))
    world.barrier()


def _holders(rows: Sequence[_Inventory], name: str) -> list[_Inventory]:
    """Return the inventories of the ranks that see a file."""
    return [row for row in rows if name in row.sizes]


def _lost_error(folder: Path, name: str, rows: Sequence[_Inventory]) -> CheckpointDamaged:
    """Return the error for a file of a checkpoint on separate disks that no host has."""
    hosts = ", ".join(sorted({row.host for row in rows}))
    return CheckpointDamaged(
        f"{name} of the checkpoint {folder} is on none of the hosts {hosts}: every host "
        "wrote to its own disk. Start a rank on the host that has it, copy it here, or "
        "load an older checkpoint; to be safe from the loss of a host, save on a disk that "
        "all hosts share"
    )


def unseen_files(folder: Path, world: World) -> list[str]:
    """Return the names of files of a checkpoint that no rank sees, the same on every rank.

    If no rank sees an index, it is the name of the index.

    Args:
        folder: the folder of the checkpoint.
        world: the ranks.
    """
    first = world.local_ranks[0]
    rows = [
        _parse(report)
        for report in exchange(world, {first: attempt(first, lambda: _inventory(folder))})
    ]
    names = {INDEX}.union(*(row.files for row in rows))
    return sorted(name for name in names if not _holders(rows, name))


def _inventory(folder: Path) -> list[Any]:
    """Return identity, names and sizes of the files of a checkpoint that this process sees."""
    try:
        index = read_index(folder)
    except FileError:
        # What is wrong with an index is left to `load`, which says it.
        return ["", [], {}, False]
    sizes = {}
    for name in (*index.files, INDEX):
        file = folder / name
        if file.exists():
            sizes[name] = file.stat().st_size
    return [index.identity or index.content_sha256(), list(index.files), sizes, bool(index.hosts)]


def _parse(report: Report) -> _Inventory:
    """Return the inventory in a report."""
    identity, files, sizes, separate_disks = report.value
    return _Inventory(report.rank, report.host, identity, tuple(files), sizes, separate_disks)


def _send(world: World, file: Path, source: int, size: int, needing: set[int]) -> None:
    """Send a file from one rank to others, in parts.

    Raises:
        FileError: on every rank, if it cannot be read or written.
    """
    first = world.local_ranks[0]
    # Pipelines of one job that load the same checkpoint, as those of the coordinates of a mesh's
    # "tp", may write to the same disk at the same time: each its own copy, of which the last stays.
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    copy = _Copy(file, partial, first == source, first in needing)
    copy.begin()
    for start in range(0, size, _CHUNK):
        part = copy.read(start, min(_CHUNK, size - start))
        copy.write(world.broadcast(part, source))
    reports = exchange(world, {first: attempt(first, copy.finish)})
    check_reports(reports, "nothing was loaded on any rank")


@dataclass
class _Copy:
    """The part of one process in sending a file. Errors are kept to the end: others are waiting.

    Attributes:
        file: the file.
        partial: its name until it is complete.
        sends: whether this process has the file.
        receives: whether this process writes it.
        error: the first error.
    """

    file: Path
    partial: Path
    sends: bool
    receives: bool
    error: OSError | None = None

    def begin(self) -> None:
        """Create the file, empty."""
        if self.receives:
            try:
                self.partial.parent.mkdir(parents=True, exist_ok=True)
                self.partial.write_bytes(b"")
            except OSError as error:
                self.error = error

    def read(self, start: int, length: int) -> Tensor | None:
        """Return some bytes of the file to send, (length,) uint8; None in other processes."""
        if not self.sends:
            return None
        content = b""
        try:
            with self.file.open("rb") as source:
                source.seek(start)
                content = source.read(length)
        except OSError as error:
            # The ranks copy in step, so that this one goes on with zeros; `finish` raises the
            # error.
            self.error = self.error or error
        return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8)

    def write(self, received: Tensor) -> None:
        """Append some bytes, (length,) uint8."""
        if self.receives and self.error is None:
            try:
                with self.partial.open("ab") as target:
                    target.write(received.numpy().tobytes())
            except OSError as error:
                self.error = error

    def finish(self) -> None:
        """Give the file its name.

        Raises:
            FileError: it could not be read or written.
        """
        try:
            if self.error is not None:
                raise self.error
            if self.receives:
                sync_file(self.partial)
                self.partial.rename(self.file)
                sync_folder(self.file.parent)
        except OSError as error:
            with suppress(OSError):
                self.partial.unlink(missing_ok=True)
            raise FileError(f"cannot copy {self.file} between hosts: {error.strerror}") from error
