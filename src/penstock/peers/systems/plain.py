"""Plain training of the whole batch in one process."""

from __future__ import annotations

from torch import nn

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job


@register(
    "plain-threads", about="plain training, a thread per stage", processes="threads", pipeline=False
)
@register("plain", about="plain training with one thread", processes="alone", pipeline=False)
def make(job: Job) -> Step:
    """Return a training step without any pipeline."""
    return job.training_step(nn.Sequential(*job.layers()))
