"""Initialise the process group. Each rank is a process, started by torchrun, by `launch`, or by the
user's own init_process_group.
"""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.transport.host_memory import disable_memory_trimming


def started() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and (dist.is_initialized() or "RANK" in os.environ)


def join() -> int:
    """Initialise the process group if that has not been done, and return the number of ranks.

    Raises:
        RunError: this process was not started as a rank.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RunError(
                "this process is alone: start it with torchrun --nproc-per-node N, or with "
                "ps.launch(fn, ranks=N)"
            )
        disable_memory_trimming()
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_leave)
    return dist.get_world_size()


def _leave() -> None:
    """Destroy the process group at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
