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

_PR_SET_PDEATHSIG = 1


def main(job: Path, result: Path, launcher: int) -> int:
    """Run the job and write down its value or its error. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C and ends all ranks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        return 1
    from penstock.transport.host_memory import keep_freed_memory

    keep_freed_memory()
    import cloudpickle
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = int(os.environ["RANK"])
    try:
        fn, args = cloudpickle.loads(job.read_bytes())
        record = {"value": _value(fn, args)}
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher must hear of it
        record = _error(rank, error)
    try:
        content = cloudpickle.dumps(record)
    except Exception as error:  # noqa: BLE001 - pickling runs the value's own code
        what = f"rank {rank}: the {type(record['value']).__name__} that it returned cannot be sent back: {error}"
        record = {**_error(rank, error), "error": what}
        content = cloudpickle.dumps(record)
    partial = result.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(result)
    return int("error" in record)


def _value(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What `fn` returns; None if it ends the program as one ends a program that went well."""
    try:
        return fn(*args)
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        raise


def _error(rank: int, error: BaseException) -> dict[str, Any]:
    """What the launcher must know of an error."""
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
        os._exit(
            code
        )  # a failed rank must not stay behind in a destructor that waits for the others
    sys.exit(0)
