"""Read exported memory in another process.

A driver or a sandbox may give a handle to a card's memory (CUDA IPC) that no other process can
open; only another process can test that. The reader is this file, run as a program: it reads the
name of a method of `torch.UntypedStorage` and the handle, and prints the sum of the memory.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any, Final

#: Seconds in which the reader imports torch, opens the card and reads.
_READER_S: Final = 60.0


def sum_in_another_process(opener: str, handle: tuple[Any, ...]) -> float:
    """Return the sum of exported float32 memory as another process reads it.

    Args:
        opener: method of `torch.UntypedStorage` that opens the handle: `_new_shared_cuda` for what
            `_share_cuda_` returns.
        handle: numbers, bytes and None. The exported memory must stay allocated.

    Raises:
        RuntimeError: the reader cannot open or read the memory, or takes too long.
    """
    # -P: else the directory of this file, whose modules have names of the standard library's, would
    # be the first of sys.path.
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(  # noqa: S603 - our program
            command,
            input=repr((opener, handle)),
            capture_output=True,
            text=True,
            timeout=_READER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"another process has not read it in {_READER_S:g} s") from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"the reader ended with {done.returncode}")
    return float(done.stdout)


def _read() -> str:
    """Return the sum of the memory that standard input names."""
    import torch

    opener, handle = ast.literal_eval(sys.stdin.read())
    if opener == "_new_shared_cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = getattr(torch.UntypedStorage, opener)(*handle)
    values = torch.empty(0, dtype=torch.float32, device=storage.device).set_(storage)
    return repr(float(values.sum()))


if __name__ == "__main__":
    try:
        print(_read())
    except Exception as error:  # noqa: BLE001 - the other process raises it again
        sys.exit(f"{type(error).__name__}: {error}")
