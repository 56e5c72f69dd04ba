"""Peak memory of a process, above what it had after its imports. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path


def status() -> dict[str, int]:
    """Return the sizes in /proc/self/status, in bytes by name."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


class Peak:
    """Measures from its construction.

    The kernel keeps the largest resident size of a process (VmHWM), and resets it on request.
    Subtracted are pages of files, which are the libraries, and the anonymous pages of the imports.
    Pages that are shared with other ranks count in each of them.

    Attributes:
        whole: whether the peak includes the construction of the model, because the system does not
            allow to reset it.
    """

    def __init__(self) -> None:
        self._imports_bytes = status().get("RssAnon", 0)
        self.whole = True

    def reset(self) -> None:
        """Forget the peak so far, which includes the construction of the model."""
        # Free pages that the allocator keeps would count as used. Not every C library has the call.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            # 5 resets VmHWM to the current size, see proc(5).
            Path("/proc/self/clear_refs").write_text("5")
            self.whole = False
        except OSError:
            self.whole = True

    def read(self) -> int:
        """Return the peak in bytes."""
        now = status()
        return now["VmHWM"] - now.get("RssFile", 0) - self._imports_bytes

    def read_whole(self) -> int:
        """Return the peak in bytes with the anonymous pages of the imports: what the host needs."""
        return self.read() + self._imports_bytes


def limit_memory(limit_bytes: int) -> None:
    """Limit the private memory of this process to what it has now and `limit_bytes` more.

    The kernel refuses further allocations (RLIMIT_DATA), which PyTorch reports as an error. Pages
    that are shared with other processes do not count; reserved pages that are never touched do.
    """
    limit = status()["VmData"] + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
