"""The ops of every rank and nothing else: no messages, no waiting. What a step cannot be faster
than is reckoned from their times.

One rank after the other (`alone`), and all at once, as many as there are cores (`together`): cores
share memory, and in company each is slower.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from job import Job
from torch import Tensor, nn

from adapters.catalogue import register


@dataclass
class Ops:
    """One rank's step. `parts`: seconds of all forwards, all backwards, and the update, by step."""

    part: nn.Sequential
    ins: list[Tensor]
    gradients: list[Tensor]
    optimizer: torch.optim.Optimizer
    job: Job
    last: bool
    parts: list[tuple[float, float, float]] = field(default_factory=list)

    def __call__(self) -> None:
        now, forwards, backwards = time.perf_counter, 0.0, 0.0
        share = 1 / len(self.ins)
        for x, gradient in zip(self.ins, self.gradients, strict=True):
            start = now()
            out = self.part(x)
            if self.last:
                out = self.job.loss(out, gradient) * share
            middle = now()
            out.backward(None if self.last else gradient)
            x.grad = None
            forwards, backwards = forwards + middle - start, backwards + now() - middle
        start = now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.parts.append((forwards, backwards, now() - start))


@register("bound", peer="bound", imports=("torch",))
def make(job: Job) -> Ops:
    """Boundaries have the right forms and random numbers in them."""
    rank, count = job.spec.rank, job.cell.micro_batches
    last = rank + 1 == job.spec.ranks
    x, y = (value.chunk(count) for value in job.batch())
    ins = (
        list(x)
        if rank == 0
        else [_random(job.boundary(rank)).requires_grad_() for _ in range(count)]
    )
    # Small, so that weights stay what they are: their size does not change the time.
    gradients = list(y) if last else [_random(job.boundary(rank + 1)) * 1e-6 for _ in range(count)]
    part = job.stage(rank)
    return Ops(part, ins, gradients, job.optimizer(part.parameters()), job, last)


def _random(form: Tensor) -> Tensor:
    return torch.rand_like(form, device="cpu")
