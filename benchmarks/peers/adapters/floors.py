"""GPipe by hand, twice: what gloo allows, and what shared memory on one host allows. No checks, no
names, no errors.

Both know everything beforehand: forms, order, places. A message lies where the other side uses it;
there is one place per micro-batch and direction, free again because no rank starts a step before its
neighbours have taken what it sent in the last.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

import torch
from job import Job, join
from torch import Tensor

from adapters.catalogue import Step, register


class Line(Protocol):
    """To and from one neighbour: `places[m]` is what comes for micro-batch m."""

    places: list[Tensor]

    def begin(self) -> None:
        """A step begins."""

    def wait(self, m: int) -> Tensor:
        """What came for m."""

    def send(self, m: int, tensor: Tensor) -> None:
        """Hand over for m."""

    def end(self) -> None:
        """A step ends."""


def gpipe(job: Job, before: Line | None, after: Line | None) -> Step:
    """All forwards, all backwards, one update."""
    part = job.stage(job.spec.rank)
    optimizer = job.optimizer(part.parameters())
    count = job.cell.micro_batches
    x, y = job.batch()
    xs, ys, share = x.chunk(count), y.chunk(count), 1 / count
    ins = [place.detach().requires_grad_() for place in before.places] if before else []
    lines = [line for line in (before, after) if line]
    numbers, loss = range(count), job.loss

    def step() -> None:
        for line in lines:
            line.begin()
        outs = []
        for m in numbers:
            if before:
                before.wait(m)
                out = part(ins[m])
            else:
                out = part(xs[m])
            if after:
                after.send(m, out.detach())
                outs.append(out)
            else:
                outs.append(loss(out, ys[m]) * share)
        for m in numbers:
            outs[m].backward(after.wait(m) if after else None)
            outs[m] = None
            if before:
                before.send(m, ins[m].grad)
                ins[m].grad = None
        optimizer.step()
        optimizer.zero_grad()
        for line in lines:
            line.end()

    return step


class Gloo:
    """Receives are all posted when a step begins; sends are waited for when it ends."""

    def __init__(self, other: int, form: Tensor, count: int) -> None:
        import torch.distributed as dist

        self.dist, self.other = dist, other
        self.places = [torch.empty_like(form, device="cpu") for _ in range(count)]
        self.coming: list[torch.distributed.Work] = []
        self.going: list[tuple[torch.distributed.Work, Tensor]] = []

    def begin(self) -> None:
        """See `Line`."""
        self.coming = [
            self.dist.irecv(place, self.other, tag=m) for m, place in enumerate(self.places)
        ]

    def wait(self, m: int) -> Tensor:
        """See `Line`."""
        self.coming[m].wait()
        return self.places[m]

    def send(self, m: int, tensor: Tensor) -> None:
        """See `Line`."""
        self.going.append((self.dist.isend(tensor, self.other, tag=m), tensor))

    def end(self) -> None:
        """See `Line`."""
        for work, _ in self.going:
            work.wait()
        self.going.clear()


SPINS = 400


class Shared:
    """A page of numbers and a place per micro-batch, mapped by both sides. The number says which
    step the place is of.

    A writer fills the place and then sets the number: in this order for others on x86, which is all
    that this is for.
    """

    def __init__(self, folder: str, mine: int, other: int, form: Tensor, count: int) -> None:
        size = form.numel() * form.element_size()
        room = -(-size // 4096) * 4096
        self.step = 0

        def mapped(source: int, target: int) -> tuple[memoryview, list[Tensor]]:
            path = Path(folder) / f"{source}-{target}"
            length = 4096 + count * room
            with path.open("a+b") as file:
                os.ftruncate(file.fileno(), length)
                whole = mmap.mmap(file.fileno(), length)
            return memoryview(whole)[:4096].cast("q"), [
                torch.frombuffer(
                    whole, dtype=form.dtype, count=form.numel(), offset=4096 + m * room
                ).view(form.shape)
                for m in range(count)
            ]

        self.came, self.places = mapped(other, mine)
        self.gone, self.out = mapped(mine, other)

    def begin(self) -> None:
        """See `Line`."""
        self.step += 1

    def wait(self, m: int) -> Tensor:
        """See `Line`."""
        arrived, step = self.came, self.step
        while True:
            for _ in range(SPINS):
                if arrived[m] == step:
                    return self.places[m]
            os.sched_yield()

    def send(self, m: int, tensor: Tensor) -> None:
        """See `Line`."""
        self.out[m].copy_(tensor)
        self.gone[m] = self.step

    def end(self) -> None:
        """See `Line`."""


@register("floor: gloo", peer="floors", imports=("torch", "torch.distributed"))
def gloo(job: Job) -> Step:
    """Over gloo's isend and irecv."""
    import torch.distributed as dist

    join(job)
    dist.init_process_group("gloo")
    rank, count = job.spec.rank, job.cell.micro_batches
    before = Gloo(rank - 1, job.boundary(rank), count) if rank else None
    after = Gloo(rank + 1, job.boundary(rank + 1), count) if rank + 1 < job.spec.ranks else None
    return gpipe(job, before, after)


@register("floor: shared memory", peer="floors", imports=("torch", "torch.distributed"))
def shared_memory(job: Job) -> Step:
    """Through memory that neighbours share."""
    rank, count, folder = job.spec.rank, job.cell.micro_batches, job.spec.folder
    before = Shared(folder, rank, rank - 1, job.boundary(rank), count) if rank else None
    after = (
        Shared(folder, rank, rank + 1, job.boundary(rank + 1), count)
        if rank + 1 < job.spec.ranks
        else None
    )
    return gpipe(job, before, after)
