"""A rank of a pipeline, played alone: its neighbours are not there, what they would send is random.

What it takes in seconds and memory is what it takes among the others, which is how a plan for
several GPUs can be tried on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from kit.one_rank import rank_alone
from kit.workloads import STAGES, Cell, equal_cut


class Arrival(nn.Module):
    """Stands in front of a rank that receives: what arrives gets a gradient."""

    def forward(self, value: Tensor) -> Tensor:
        """The value as a leaf that wants a gradient."""
        return value.detach().requires_grad_()


class RandomGradient(torch.autograd.Function):
    """A number without a value, whose gradient by the output is a given one. It saves no tensor, as
    sending an output saves none.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        """Return 0."""
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient."""
        return ctx.gradient * grads[0], None


class Departure:
    """The loss of a rank that is not the last: the gradient that comes back is random."""

    def __init__(self, gradient: Tensor) -> None:
        """Keep the gradient of a micro-batch's output."""
        self.gradient = gradient

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """A number whose gradient by the output is the random one."""
        del target
        loss: Tensor = RandomGradient.apply(output, self.gradient)
        return loss


@dataclass(frozen=True)
class RankAlone:
    """What a rank took.

    Attributes:
        busy_s: seconds of all its ops.
        own_peak_bytes: by Penstock's own account.
        allocated_bytes: by the allocator, at most; None without a GPU.
    """

    busy_s: float
    own_peak_bytes: int
    allocated_bytes: int | None


def rehearse(cell: Cell, rank: int, device: torch.device, steps: int) -> RankAlone:
    """Play one of `STAGES` ranks under 1F1B, cut equally.

    Args:
        cell: model, batch and how they are trained.
        rank: the rank.
        device: where it is played.
        steps: steps before the one that is measured, at least 1.
    """
    layers = list(cell.first_model())
    lengths = equal_cut(len(layers))
    first = sum(lengths[:rank])
    own = nn.Sequential(*layers[first : first + lengths[rank]])
    x, y = cell.first_batch(device)
    count = cell.micro_batches
    with torch.no_grad(), cell.mixed(device):
        before = nn.Sequential(*layers[:first]).to(device)
        arrivals = torch.cat([before(part) for part in x.chunk(count)]) if rank else x
        output = own.to(device)(arrivals.chunk(count)[0])
    del before, layers, x
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    is_last = rank == STAGES - 1
    loss = cell.loss if is_last else Departure(torch.randn_like(output))
    parts = [Arrival(), *own] if rank else [*own]
    schedule = ps.schedule("1f1b", stages=STAGES, micro_batches=count)
    pipe = ps.Pipeline(
        nn.Sequential(*parts),
        loss=loss,
        # A random gradient says nothing of how much a micro-batch counts.
        loss_weight=None if is_last else len,
        optimizer=cell.make_optimizer,
        balance=[len(parts)],
        schedule=rank_alone(schedule, rank),
        autocast=cell.autocast,
        executor="threads",
        device=device,
    )
    for _ in range(steps + 1):
        pipe.train_batch(arrivals, y)
    timeline = pipe.timeline()
    pipe.close()
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    assert timeline.peak_memory is not None
    return RankAlone(sum(timeline.busy), sum(timeline.peak_memory), allocated)
