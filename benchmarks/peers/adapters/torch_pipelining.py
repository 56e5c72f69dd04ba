"""torch.distributed.pipelining, with its best settings: stages made by hand, forms of boundaries
said beforehand.

So nothing is run to infer them, outputs are not gathered, and losses are not kept.
"""

from __future__ import annotations

from functools import partial

import torch
from cells import Cell, Cuts
from job import Job, join
from torch import nn

from adapters.catalogue import Step, register

IMPORTS = ("torch", "torch.distributed.pipelining")


def _too_few(cell: Cell, cuts: Cuts) -> str | None:
    del cuts
    return (
        f"refuses fewer micro-batches than stages ({cell.micro_batches} < {cell.stages})"
        if cell.micro_batches < cell.stages
        else None
    )


def _interleaved(cell: Cell, cuts: Cuts) -> str | None:
    rounds = max(1, cell.micro_batches // cell.stages)
    if cell.micro_batches % rounds:
        return f"takes multiples of {rounds} micro-batches"
    if cell.micro_batches < cell.stages:
        return _too_few(cell, cuts)
    return None if cuts.halves else f"the model has too few layers for {2 * cell.stages} stages"


def make(job: Job, schedule: str) -> Step:
    """One stage on every rank, or two."""
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    join(job)
    dist.init_process_group("gloo")
    rank, ranks = job.spec.rank, job.spec.ranks
    lengths = job.spec.cuts.halves if schedule == "interleaved" else job.spec.cuts.lengths
    assert lengths
    mine = list(range(rank, len(lengths), ranks))
    parts = {index: job.stage(index, lengths) for index in mine}
    stages = [_stage(job, parts[index], index, lengths) for index in mine]
    if schedule == "interleaved":
        runner = ScheduleInterleaved1F1B(stages, job.cell.micro_batches, loss_fn=job.loss)
    else:
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        runner = kind(stages[0], job.cell.micro_batches, loss_fn=job.loss)
    optimizer = job.optimizer(
        parameter for part in parts.values() for parameter in part.parameters()
    )
    x, y = job.batch()
    inputs = (x,) if rank == 0 else ()
    targets = {"target": y} if rank == ranks - 1 else {}

    def step() -> None:
        runner.step(*inputs, return_outputs=False, **targets)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _stage(job: Job, part: nn.Sequential, index: int, lengths: tuple[int, ...]) -> object:
    from torch.distributed.pipelining import PipelineStage

    def example(at: int) -> torch.Tensor:
        template = torch.empty_like(job.boundary(at, lengths), device="cpu")
        return template.requires_grad_() if at > 0 else template

    return PipelineStage(
        part,
        index,
        len(lengths),
        torch.device("cpu"),
        input_args=(example(index),),
        output_args=(example(index + 1),),
    )


register("torch 1f1b", peer="torch", imports=IMPORTS, refuses=_too_few)(
    partial(make, schedule="1f1b")
)
register("torch gpipe", peer="torch", imports=IMPORTS)(partial(make, schedule="gpipe"))
register("torch interleaved", peer="torch", imports=IMPORTS, refuses=_interleaved)(
    partial(make, schedule="interleaved")
)
