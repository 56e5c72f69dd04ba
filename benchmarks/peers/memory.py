"""What a process needs at most, above what it had when its imports were done. Linux."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def status() -> dict[str, int]:
    """Bytes by the names of /proc/self/status."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


class Peak:
    """Counts from when it is made.

    The kernel keeps the most resident bytes of a process (VmHWM), and forgets them when told to.
    Pages of files, which is to say of libraries, are taken off, and so is what imports had left;
    pages that are shared with other ranks count in each of them.
    """

    def __init__(self) -> None:
        self._level = status().get("RssAnon", 0)
        self.whole = True

    def begin(self) -> None:
        """Forget the peak so far, with what making the model took. Where that is not allowed,
        `whole` says so.
        """
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.whole = False
        except OSError:
            self.whole = True

    def read(self) -> int:
        """Bytes."""
        now = status()
        return now["VmHWM"] - now.get("RssFile", 0) - self._level


def available_bytes() -> int:
    """What the host could still give."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
