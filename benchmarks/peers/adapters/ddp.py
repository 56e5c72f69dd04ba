"""torch's DistributedDataParallel on as many ranks: every rank has the whole model and its share of
the batch.
"""

from __future__ import annotations

import contextlib
from functools import partial

from cells import Cell, Cuts
from job import Job, join
from torch import nn

from adapters.catalogue import Step, register

IMPORTS = ("torch", "torch.nn.parallel", "torch.distributed")


def make(job: Job, accumulate: bool) -> Step:
    """The whole share at once; or, with accumulation, in micro-batches of the pipelines' size, and
    gradients exchanged after the last.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    join(job)
    dist.init_process_group("gloo")
    net = DistributedDataParallel(nn.Sequential(*job.layers()), gradient_as_bucket_view=True)
    optimizer = job.optimizer(net.parameters())
    x, y = (value.chunk(job.spec.ranks)[job.spec.rank] for value in job.batch())
    count = job.cell.micro_batches // job.spec.ranks if accumulate else 1
    parts = list(zip(x.chunk(count), y.chunk(count), strict=True))

    def step() -> None:
        for index, (inputs, targets) in enumerate(parts):
            with contextlib.nullcontext() if index == count - 1 else net.no_sync():
                (job.loss(net(inputs), targets) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _needs_two(cell: Cell, cuts: Cuts) -> str | None:
    del cuts
    return (
        None
        if cell.micro_batches >= 2 * cell.stages
        else "no more than one micro-batch for each rank: nothing to accumulate"
    )


register("ddp", peer="ddp", imports=IMPORTS)(partial(make, accumulate=False))
register("ddp accumulated", peer="ddp", imports=IMPORTS, refuses=_needs_two)(
    partial(make, accumulate=True)
)
