"""torchgpipe and FairScale's Pipe: all stages in one process.

FairScale's Pipe is a fork of torchgpipe and is called alike. On CPUs each has one worker thread for
all stages, and autograd has one: stages do not overlap, however many devices there are. Their
process gets as many threads of torch as other systems have ranks, at most one per core.
"""

from __future__ import annotations

import importlib
from functools import partial

from torch import nn

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job


def make(job: Job, module: str, name: str) -> Step:
    """Make the library's module as its documentation does."""
    library = importlib.import_module(module)
    lengths = list(job.setup.lengths)
    pipe = getattr(library, name)(
        nn.Sequential(*job.layers()),
        lengths,
        devices=["cpu"] * len(lengths),
        chunks=job.setup.micro_batches,
        checkpoint=job.option("checkpoint", "except_last"),
    )
    return job.training_step(pipe)


for _library, _module, _name, _packages in (
    ("torchgpipe", "torchgpipe", "GPipe", ("torchgpipe==0.0.7",)),
    ("fairscale", "fairscale.nn", "Pipe", ("fairscale==0.4.13",)),
):
    register(
        _library,
        about=f"{_name} of {_packages[0]}: all stages in one process",
        imports=(_library, _module),
        packages=_packages,
        schedules=("gpipe",),
        options={"checkpoint": ("except_last", "never", "always")},
        processes="one",
    )(partial(make, module=_module, name=_name))
