"""Open files that must not be pipes or devices, of which some never end and others never begin."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file to read.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder: a pipe might be waited for
            forever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def check_regular(path: str | Path) -> None:
    """Refuse what is no regular file, before a library opens it by its name.

    Raises:
        OSError: see `open_file`.
    """
    open_file(path).close()
