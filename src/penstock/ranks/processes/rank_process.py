"""The main program of a rank that `launch` started."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from penstock.standard_error import write_line

#: Options of prctl(2), from Linux's prctl.h.
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent: process id. This process ends at once if that is no longer its parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(job: Path, result: Path) -> int:
    """Run the job and write its value or its error to a file. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher receives Ctrl-C and ends all ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server ignores it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for a checkpoint, once training begins
    # Opened before the job can use up all descriptors, so that its error is reported even then.
    # Renamed when complete: the launcher may look for the file at any time.
    partial = result.with_suffix(".partial")
    output = partial.open("wb")
    from penstock.transport.host_memory import disable_memory_trimming

    disable_memory_trimming()
    import cloudpickle
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = int(os.environ["RANK"])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"penstock-rank{rank}".encode()[:15])
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
    try:
        with output:
            output.write(content)
    except OSError as error:  # such as a full disk of temporary files
        write_line(record.get("error") or f"rank {rank}: its result: {error}")
        return 1
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


def finish(code: int) -> NoReturn:
    """End the process of a rank, or of the fork server, with an exit status.

    A rank that succeeded ends as a child of multiprocessing does: its threads end, the functions
    registered with atexit run, and files that are still open are flushed. Then the process ends
    without the tear-down of its modules, which would take 0.25 s of a core for torch's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a failed rank must not wait for the others in a destructor
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.exit(0)  # profilers of GPUs write their records when the C library's exit runs
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing.popen_fork does
    atexit._run_exitfuncs()
    gc.collect()  # destructors of cycles run now; what was imported before the fork is not walked
    for value in gc.get_objects():
        # By its type: `isinstance` asks the object, and a dead weak proxy answers with an error.
        if issubclass(type(value), io.IOBase) and not value.closed:
            with contextlib.suppress(OSError, ValueError):
                value.flush()
    os._exit(0)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    finish(main(Path(sys.argv[1]), Path(sys.argv[2])))
