"""Pipelines written by hand: GPipe through gloo, and GPipe and 1F1B through shared memory of one
host. No checks, no names, no error handling: what remains is what a pipeline cannot leave out.

All know everything beforehand: shapes, order, places. A message lies where the receiver uses it;
there is one place per micro-batch and direction, free again because no rank starts a step before
its neighbours have taken what it sent in the last.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job, join
from penstock.transport.host_memory import disable_memory_trimming

_PAGE_BYTES = 4096
#: Polls before the processor is offered to other processes.
_SPINS = 400


class Line(Protocol):
    """Messages to and from one neighbour. `places[m]` is what arrives for micro-batch m."""

    places: list[Tensor]

    def begin(self) -> None:
        """Begin a step."""

    def wait(self, micro_batch: int) -> Tensor:
        """Wait for a message and return it."""

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        """Send a message."""

    def end(self) -> None:
        """End a step."""


#: A forward or backward, and its micro-batch.
_Op = tuple[Literal["forward", "backward"], int]


def gpipe_order(count: int) -> Iterator[_Op]:
    """Yield the ops of a rank under GPipe: all forwards, then all backwards.

    Args:
        count: number of micro-batches.
    """
    for m in range(count):
        yield "forward", m
    for m in range(count):
        yield "backward", m


def one_f_one_b_order(rank: int, ranks: int, count: int) -> Iterator[_Op]:
    """Yield the ops of a rank under 1F1B: warm-up forwards, then a forward and a backward in turn.

    Args:
        rank: the rank, and the stage that it runs.
        ranks: number of ranks.
        count: number of micro-batches.
    """
    warm_up = min(ranks - rank - 1, count)
    for m in range(warm_up):
        yield "forward", m
    for m in range(count):
        if warm_up + m < count:
            yield "forward", warm_up + m
        yield "backward", m


def pipeline(job: Job, before: Line | None, after: Line | None, order: Iterator[_Op]) -> Step:
    """Return a step: the ops in their order, and one update.

    Args:
        job: the rank's part of the run.
        before: messages to and from the stage before; None on the first.
        after: messages to and from the stage after; None on the last.
        order: the ops of the rank.
    """
    # A closure over local variables: attributes of an object would make every op a little slower,
    # and nothing faster than a floor may be easy to write.
    # What a floor is compared with keeps freed memory too.
    disable_memory_trimming()
    part = job.stage(job.spec.rank)
    optimizer = job.optimizer(part.parameters())
    count = job.setup.micro_batches
    share = 1 / count
    # Leaves of the graph in the memory where messages arrive, so that nothing is copied.
    received = [place.detach().requires_grad_() for place in before.places] if before else []
    lines = [line for line in (before, after) if line]
    loss = job.loss
    ops = tuple(order)
    outputs: list[Tensor | None] = [None] * count

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Train one batch."""
        x, y = inputs.chunk(count), targets.chunk(count)
        total = torch.zeros(())
        for line in lines:
            line.begin()
        for kind, m in ops:
            if kind == "forward":
                if before:
                    before.wait(m)
                output = part(received[m] if before else x[m])
                if after:
                    after.send(m, output.detach())
                else:
                    output = loss(output, y[m]) * share
                    total += output.detach()
                outputs[m] = output
                continue
            output = outputs[m]
            assert output is not None
            output.backward(after.wait(m) if after else None)  # type: ignore[no-untyped-call]
            # Frees the graph before the next op runs.
            outputs[m] = output = None
            if before:
                gradient = received[m].grad
                assert gradient is not None
                before.send(m, gradient)
                received[m].grad = None
        optimizer.step()
        optimizer.zero_grad()
        for line in lines:
            line.end()
        return None if after else total

    return step


class Gloo:
    """Messages through gloo: all receives are posted when a step begins, and sends are waited for
    when it ends.
    """

    def __init__(self, other: int, template: Tensor, count: int) -> None:
        import torch.distributed as dist

        self._dist, self._other = dist, other
        self.places = [torch.empty_like(template, device="cpu") for _ in range(count)]
        self._receives: list[torch.distributed.Work | None] = []
        self._sends: list[tuple[torch.distributed.Work | None, Tensor]] = []

    def begin(self) -> None:
        """See `Line`."""
        self._receives = []
        for tag, place in enumerate(self.places):
            self._receives.append(self._dist.irecv(place, self._other, tag=tag))

    def wait(self, micro_batch: int) -> Tensor:
        """See `Line`."""
        work = self._receives[micro_batch]
        assert work is not None
        work.wait()
        return self.places[micro_batch]

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        """See `Line`."""
        work = self._dist.isend(tensor, self._other, tag=micro_batch)
        # With the tensor, which must stay allocated until it has been sent.
        self._sends.append((work, tensor))

    def end(self) -> None:
        """See `Line`."""
        for work, _ in self._sends:
            assert work is not None
            work.wait()
        self._sends.clear()


class Shared:
    """Messages through a page of numbers and a place per micro-batch, mapped by both ranks. A
    number is the step that its place belongs to.

    The sender fills the place and then sets the number. Other cores see it in this order on x86,
    for which alone this is meant.
    """

    def __init__(self, folder: str, ranks: tuple[int, int], template: Tensor, count: int) -> None:
        local, other = ranks
        self._step = 0
        self._arrived, self.places = _map_places(Path(folder), (other, local), template, count)
        self._sent, self._out = _map_places(Path(folder), (local, other), template, count)

    def begin(self) -> None:
        """See `Line`."""
        self._step += 1

    def wait(self, micro_batch: int) -> Tensor:
        """See `Line`."""
        arrived, step = self._arrived, self._step
        while True:
            for _ in range(_SPINS):
                if arrived[micro_batch] == step:
                    return self.places[micro_batch]
            os.sched_yield()

    def send(self, micro_batch: int, tensor: Tensor) -> None:
        """See `Line`."""
        self._out[micro_batch].copy_(tensor)
        self._sent[micro_batch] = self._step

    def end(self) -> None:
        """See `Line`."""


def _map_places(
    folder: Path, direction: tuple[int, int], template: Tensor, count: int
) -> tuple[memoryview, list[Tensor]]:
    """Map the file of one direction: its numbers, and a tensor per micro-batch."""
    size = template.numel() * template.element_size()
    place_bytes = -(-size // _PAGE_BYTES) * _PAGE_BYTES
    path = folder / f"{direction[0]}-{direction[1]}"
    length = _PAGE_BYTES + count * place_bytes
    # Opened by both ranks: the first creates the file, and the second must not truncate it.
    with path.open("a+b") as file:
        os.ftruncate(file.fileno(), length)
        whole = mmap.mmap(file.fileno(), length)
    tensors = []
    for index in range(count):
        offset = _PAGE_BYTES + index * place_bytes
        flat = torch.frombuffer(whole, dtype=template.dtype, count=template.numel(), offset=offset)
        tensors.append(flat.view(template.shape))
    return memoryview(whole)[:_PAGE_BYTES].cast("q"), tensors


@register(
    "floor-gloo", about="GPipe by hand over gloo's isend and irecv", imports=("torch.distributed",)
)
def gloo(job: Job) -> Step:
    """Make a rank that sends through gloo."""
    import torch.distributed as dist

    join(job)
    dist.init_process_group("gloo")
    rank, count = job.spec.rank, job.setup.micro_batches
    before = Gloo(rank - 1, job.boundary(rank), count) if rank else None
    after = None
    if rank + 1 < job.spec.ranks:
        after = Gloo(rank + 1, job.boundary(rank + 1), count)
    return pipeline(job, before, after, gpipe_order(count))


@register("floor-memory", about="GPipe by hand through shared memory")
def shared_memory(job: Job) -> Step:
    """Make a rank that sends through memory."""
    before, after = _shared_lines(job)
    return pipeline(job, before, after, gpipe_order(job.setup.micro_batches))


@register("floor-memory-1f1b", about="1F1B by hand through shared memory")
def shared_memory_1f1b(job: Job) -> Step:
    """Make a rank that sends through memory, and runs a backward as soon as it can."""
    before, after = _shared_lines(job)
    order = one_f_one_b_order(job.spec.rank, job.spec.ranks, job.setup.micro_batches)
    return pipeline(job, before, after, order)


def _shared_lines(job: Job) -> tuple[Shared | None, Shared | None]:
    """Return the messages through memory to and from the stages before and after."""
    rank, count, folder = job.spec.rank, job.setup.micro_batches, job.spec.folder
    before = Shared(folder, (rank, rank - 1), job.boundary(rank), count) if rank else None
    after = None
    if rank + 1 < job.spec.ranks:
        after = Shared(folder, (rank, rank + 1), job.boundary(rank + 1), count)
    return before, after
