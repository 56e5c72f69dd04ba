"""torchgpipe: one process, which gets as many threads of torch as others have ranks (one on the
MLP, which is faster).

On CPUs it has one thread of its own for all stages, and autograd has one: stages do not overlap,
whatever the number of devices.
"""

from __future__ import annotations

from functools import partial

from job import Job
from torch import nn

from adapters.catalogue import Step, register


def make(job: Job, checkpoint: str) -> Step:
    """As its documentation has it."""
    from torchgpipe import GPipe

    lengths = job.spec.cuts.lengths
    pipe = GPipe(
        nn.Sequential(*job.layers()),
        list(lengths),
        devices=["cpu"] * len(lengths),
        chunks=job.cell.micro_batches,
        checkpoint=checkpoint,
    )
    optimizer = job.optimizer(pipe.parameters())
    x, y = job.batch()

    def step() -> None:
        job.loss(pipe(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


for _checkpoint in ("never", "always"):
    register(
        f"torchgpipe {_checkpoint}",
        peer="torchgpipe",
        imports=("torch", "torchgpipe"),
        packages=("torchgpipe==0.0.7",),
        processes="one",
    )(partial(make, checkpoint=_checkpoint))
