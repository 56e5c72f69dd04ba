"""FairScale's Pipe: torchgpipe's successor, and like it in one process, with as many threads of
torch as others have ranks (one on the MLP).
"""

from __future__ import annotations

from functools import partial

from job import Job
from torch import nn

from adapters.catalogue import Step, register


def make(job: Job, checkpoint: str) -> Step:
    """As its documentation has it."""
    from fairscale.nn import Pipe

    lengths = job.spec.cuts.lengths
    pipe = Pipe(
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
        f"fairscale {_checkpoint}",
        peer="fairscale",
        imports=("torch", "fairscale.nn"),
        packages=("fairscale==0.4.13",),
        processes="one",
    )(partial(make, checkpoint=_checkpoint))
