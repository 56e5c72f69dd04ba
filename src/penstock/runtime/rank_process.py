"""The main program of a rank that `launch` started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main(job: Path, result: Path) -> int:
    """Run the job and write down its value or its error. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C and ends all ranks
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import cloudpickle
    import torch

    from penstock.errors import PeerFailed, PenstockError

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = int(os.environ["RANK"])
    try:
        fn, args = cloudpickle.loads(job.read_bytes())
        record = {"value": fn(*args)}
        status = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher must hear of it
        text = str(error) if isinstance(error, PenstockError) else f"rank {rank}: {type(error).__name__}: {error}"
        record = {"rank": rank, "error": text, "traceback": traceback.format_exc(), "at": time.monotonic(),
                  "consequence": isinstance(error, PeerFailed)}  # fmt: skip
        status = 1
    if os.getppid() != parent:
        return 1
    partial = result.with_suffix(".partial")
    partial.write_bytes(cloudpickle.dumps(record))
    partial.rename(result)
    return status


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a failed rank must not stay behind in a destructor that waits for the others
    sys.exit(0)
