"""Tensors that several processes share, in one process: rank 1 of 2, which sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh() -> Iterator:
    """Return a mesh of two processes, of which this one is the second."""
    import torch.distributed.tensor  # noqa: F401 - takes a second, which is no part of a test
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def sharded(mesh, local, *, dim=0, replicated=False):
    """Return a tensor of which this process has `local`."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement = Replicate() if replicated else Shard(dim)
    return DTensor.from_local(local, mesh, [placement])
