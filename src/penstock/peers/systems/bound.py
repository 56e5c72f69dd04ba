"""Ops of every rank and nothing else: no messages, no waiting. `measuring` derives from their times
what no step can be faster than.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.peers.catalogue import register
from penstock.peers.job import Job
from penstock.transport.host_memory import disable_memory_trimming

#: Gradients at boundaries are this small, so that weights hardly change; their size does not
#: change the time.
_GRADIENT_SCALE = 1e-6


@dataclass
class Ops:
    """One rank's step. `parts`: seconds of all forwards, of all backwards and of the update, by
    step.
    """

    part: nn.Sequential
    inputs: list[Tensor]
    gradients: list[Tensor]
    optimizer: torch.optim.Optimizer
    job: Job
    last: bool
    parts: list[tuple[float, float, float]] = field(default_factory=list)

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Run the ops of a step on the tensors of this object."""
        del inputs, targets
        now, forwards, backwards = time.perf_counter, 0.0, 0.0
        share = 1 / len(self.inputs)
        for value, gradient in zip(self.inputs, self.gradients, strict=True):
            start = now()
            output = self.part(value)
            if self.last:
                output = self.job.loss(output, gradient) * share
            middle = now()
            output.backward(None if self.last else gradient)
            value.grad = None
            forwards, backwards = forwards + middle - start, backwards + now() - middle
        start = now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.parts.append((forwards, backwards, now() - start))


@register("bound", about="the ops of every rank without messages")
def make(job: Job) -> Ops:
    """Make the ops of a rank, with random tensors of the right shapes at its boundaries."""
    # Without it the ops of VGG-19 take 1.4 times as long as in Penstock's ranks: no bound.
    disable_memory_trimming()
    rank, micro_batches = job.spec.rank, job.setup.micro_batches
    last = rank + 1 == job.spec.ranks
    x, y = (value.chunk(micro_batches) for value in job.workload.first_batch())
    inputs = list(x)
    if rank:
        boundary = job.boundary(rank)
        inputs = [_random(boundary).requires_grad_() for _ in range(micro_batches)]
    gradients = list(y)
    if not last:
        boundary = job.boundary(rank + 1)
        gradients = [_random(boundary) * _GRADIENT_SCALE for _ in range(micro_batches)]
    part = job.stage(rank)
    return Ops(part, inputs, gradients, job.optimizer(part.parameters()), job, last)


def _random(template: Tensor) -> Tensor:
    """Return random numbers on the CPU in the shape of a tensor."""
    return torch.rand_like(template, device="cpu")
