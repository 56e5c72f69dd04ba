"""Whether this machine can exchange messages through shared memory: the one place that asks.

The README of this folder says why the list of machines is short, and what is used elsewhere.
"""

from __future__ import annotations

import os
import platform
import sys

#: Set to `0`, it makes ranks use the network back end, as on a machine without shared memory.
SWITCH = "PENSTOCK_SHARED_MEMORY"

#: What the room needs of the operating system, beside futexes, which all Linux kernels have.
_SYSTEM_CALLS = ("memfd_create", "pidfd_open", "posix_fallocate")


def unavailable_reason() -> str | None:
    """Return why shared memory cannot be used on this machine; None if it can.

    The result is the end of a sentence: "shared memory is not used: ...".
    """
    if os.environ.get(SWITCH) == "0":
        return f"the environment variable {SWITCH} is 0"
    if sys.platform != "linux":
        return f"it needs Linux, and this system is {sys.platform}"
    # Other processors make stores visible in other orders than the program's, and number the futex
    # system call differently. A 32-bit Python on x86-64 uses the system calls of i386.
    if platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return (
            f"it needs 64-bit x86, and this is {platform.machine()} ({platform.architecture()[0]})"
        )
    missing = [name for name in _SYSTEM_CALLS if not hasattr(os, name)]
    if missing:
        return f"this Python has no os.{missing[0]}"
    return None
