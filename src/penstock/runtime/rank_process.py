"""The main program of a rank that `launch` started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Option of prctl(2): the signal that this process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


def main(job: Path, result: Path, launcher: int) -> int:
    """Run the job and write its value or its error to a file.

    Args:
        job: file with the pickled function and its arguments.
        result: file to write.
        launcher: process id of the parent.

    Returns:
        The exit status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C and ends all ranks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # The launcher died before prctl, which then sends no signal.
        return 1
    from penstock.transport.host_memory import keep_freed_memory

    keep_freed_memory()
    import cloudpickle
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = int(os.environ["RANK"])
    try:
        fn, args = cloudpickle.loads(job.read_bytes())
        record = {"value": _call(fn, args)}
    except BaseException as error:  # noqa: BLE001 - reported to the launcher, which raises it
        record = _error_record(rank, error)
    try:
        content = cloudpickle.dumps(record)
    except Exception as error:  # noqa: BLE001 - pickling runs the value's own code
        type_name = type(record["value"]).__name__
        message = f"rank {rank}: the {type_name} that it returned cannot be sent back: {error}"
        record = {**_error_record(rank, error), "error": message}
        content = cloudpickle.dumps(record)
    # Renamed when complete: the launcher may look for the file at any time.
    partial = result.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(result)
    return int("error" in record)


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the result of `fn(*args)`; None if it calls `sys.exit` with status 0."""
    try:
        return fn(*args)
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        raise


def _error_record(rank: int, error: BaseException) -> dict[str, Any]:
    """Return the description of an error for the launcher."""
    from penstock.errors import PeerFailed, PenstockError

    text = (
        str(error)
        if isinstance(error, PenstockError)
        else f"rank {rank}: {type(error).__name__}: {error}"
    )
    return {
        "rank": rank,
        "error": text,
        "traceback": "".join(traceback.format_exception(error)),
        "at": time.monotonic(),
        "consequence": isinstance(error, PeerFailed),
    }


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # Skip destructors: those of a failed rank could wait for other ranks forever.
        os._exit(code)
    sys.exit(0)
