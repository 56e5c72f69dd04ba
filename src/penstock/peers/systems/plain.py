"""Plain training of the whole batch in one process."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job


@register(
    "plain-threads", about="plain training, a thread per stage", processes="threads", pipeline=False
)
@register("plain", about="plain training with one thread", processes="alone", pipeline=False)
def make(job: Job) -> Step:
    """Return a training step without any pipeline."""
    network = nn.Sequential(*job.layers())
    optimizer = job.optimizer(network.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Train one batch."""
        loss = job.loss(network(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
