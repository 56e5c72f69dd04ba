"""Plain training of the whole batch in one process: with one thread, and with as many as there are
ranks, or cores.
"""

from __future__ import annotations

from job import Job
from torch import nn

from adapters.catalogue import Step, register


@register("plain, n threads", peer="plain", processes="threads")
@register("plain, 1 thread", peer="plain", processes="alone")
def make(job: Job) -> Step:
    """A training loop."""
    net = nn.Sequential(*job.layers())
    optimizer = job.optimizer(net.parameters())
    x, y = job.batch()

    def step() -> None:
        job.loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
