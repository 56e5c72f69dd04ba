"""Temporary folders of launchers, which are removed later if their launcher was killed.

A launcher holds a lock on its folder, which the kernel releases however the launcher ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Seconds for which a new folder stays, in which its launcher locks it.
_NEW_S = 60.0


def make_locked_folder(prefix: str) -> tuple[Path, int]:
    """Make a temporary folder that only this user can enter, and remove those of killed launchers.

    Args:
        prefix: of the folder's name, and of those that may be removed.

    Returns:
        The folder; and a descriptor that holds its lock until it is closed.
    """
    remove_abandoned(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks: then no folder is ever removed
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, descriptor


@contextmanager
def locked_folder(prefix: str) -> Iterator[Path]:
    """Make a folder as `make_locked_folder` does, and remove it after the `with` block."""
    folder, descriptor = make_locked_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(prefix: str, new_s: float = _NEW_S) -> None:
    """Remove temporary folders of this user that no running process has locked.

    Args:
        prefix: of their names.
        new_s: age in seconds up to which a folder stays.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # removed meanwhile, a link, or locked
            facts = folder.lstat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < new_s:
                continue
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(folder, flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
