"""Penstock, by its public interface."""

from __future__ import annotations

from functools import partial

from cells import Cell, Cuts
from job import Job, join
from torch import nn

from adapters.catalogue import Step, register

IMPORTS = ("torch", "torch.distributed", "penstock.runtime.pipeline")


def make(job: Job, schedule: str) -> Step:
    """A named schedule on everybody's cut."""
    import penstock as ps

    join(job)
    pipe = ps.Pipeline(
        nn.Sequential(*job.layers()),
        loss=job.loss,
        optimizer=job.optimizer,
        balance=job.spec.cuts.lengths,
        schedule=schedule,
        micro_batches=job.cell.micro_batches,
    )
    x, y = job.batch()
    return lambda: pipe.train_batch(x, y)


for _schedule in ("1f1b", "gpipe"):
    register(f"penstock {_schedule}", peer="penstock", imports=IMPORTS)(
        partial(make, schedule=_schedule)
    )


def _no_plan(cell: Cell, cuts: Cuts) -> str | None:
    del cell
    return None if cuts.plan else "no plan was made"


@register("penstock auto", peer="penstock", imports=IMPORTS, processes="plan", refuses=_no_plan)
def auto(job: Job) -> Step:
    """The plan that the planner found for this host: its own cut, schedule and number of
    micro-batches.
    """
    import penstock as ps

    if job.spec.ranks > 1:
        join(job)
    plan = ps.Plan.load(job.spec.cuts.plan)
    pipe = ps.Pipeline(nn.Sequential(*job.layers()), plan, loss=job.loss, optimizer=job.optimizer)
    x, y = job.batch()
    return lambda: pipe.train_batch(x, y)
