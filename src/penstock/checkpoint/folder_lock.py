"""A lock on the folder of a run, so that two runs do not write into it.

The lock is held by an open file and ends with the process that has it, however that ends: a run
that was killed can be resumed at once. Where the file system has no locks, nothing is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

from penstock.errors import FileError
from penstock.files.text import quote_path

#: Name of the file in a folder.
_LOCK = ".lock"

#: Bytes of the file that are read for a message.
_MAX_OWNER = 200


class FolderLock:
    """The lock of one folder. It is released by `release`, at the end of a `with` block, and when
    the object or its process ends.

    Args:
        folder: the folder, which exists.

    Raises:
        FileError: another run has the lock, or something in the folder is no file, see
            `check_files`.
    """

    _descriptor: int | None = None

    def __init__(self, folder: Path) -> None:
        check_files(folder)
        self._path = folder / _LOCK
        self._descriptor = _lock_file(self._path)
        if self._descriptor is not None:
            owner = json.dumps(f"process {os.getpid()} on {socket.gethostname()}")
            with suppress(OSError):  # a full disk
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, owner.encode(), 0)

    def release(self) -> None:
        """Let other runs use the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Removed while it is locked: a run that has opened it meanwhile notices, see `_lock_file`.
            with suppress(OSError):
                self._path.unlink()
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def has_lock(folder: Path) -> bool:
    """Return whether a run uses a folder, or was killed while it did.

    The file is looked for, and not locked: the run may be on another host that shares the disk.
    """
    return (folder / _LOCK).exists()


def check_files(folder: Path) -> None:
    """Refuse a folder with pipes, devices or sockets in the place of files.

    A run reads and writes its files by name, such as metrics.jsonl; it would wait for another
    process at a pipe, and lose what it writes into a device.

    Raises:
        FileError: there is one, in the folder itself.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError:  # the first file that is written into the folder reports it
        return
    for path in entries:
        with suppress(OSError):  # removed meanwhile, or a link that leads nowhere
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise FileError(
                    f"{quote_path(path)} is {_kind(mode)}, and the folder of a run has files "
                    "alone: remove it, or choose another folder"
                )


def _kind(mode: int) -> str:
    """Return what something other than a file or a folder is."""
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def _lock_file(path: Path) -> int | None:
    """Lock a file that is made if necessary.

    Returns:
        Its descriptor; None if it cannot be made, or the file system has no locks.

    Raises:
        FileError: another run has the lock.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:  # the first file that is written into the folder reports it
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(descriptor)
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise FileError(
                f"another run{owner} writes into {path.parent}: wait for its end or stop "
                "it, or choose another folder"
            ) from error
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # a run that has just ended has removed the file


def _owner(descriptor: int) -> str:
    """Return who has a lock, from its file; nothing if the file is not whole."""
    with suppress(OSError, ValueError):  # OSError: it is a pipe, say
        owner = json.loads(os.pread(descriptor, _MAX_OWNER, 0))
        if isinstance(owner, str):
            return f" ({ascii(owner)[1:-1]})"
    return ""
