"""torch.distributed.pipelining with its best settings: stages are made by hand and the shapes of
boundaries are passed, so that nothing runs to infer them, and outputs are not gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job, join
from penstock.peers.setup import Setup

#: torch's class, by the name here.
CLASSES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
#: Schedules with one stage per rank; the others have two.
ONE_STAGE = ("1f1b", "gpipe")
#: Rank r has the stages r and 2p - 1 - r.
V_SHAPED = ("zbv", "dualpipev")


def _refuse(setup: Setup) -> str | None:
    """Return why torch refuses a setup, or would raise an error in its first step."""
    stages, micro_batches = setup.stages, setup.micro_batches
    if setup.schedule != "gpipe" and micro_batches < stages:
        return f"refuses fewer micro-batches than stages ({micro_batches} < {stages})"
    if setup.schedule == "dualpipev" and micro_batches < 2 * stages:
        return f"refuses fewer micro-batches than virtual stages ({micro_batches} < {2 * stages})"
    if setup.schedule in ONE_STAGE:
        return None
    if setup.halves is None:
        return f"the model has too few layers for {2 * stages} stages"
    rounds = max(1, micro_batches // stages)
    if setup.schedule in ("interleaved", "interleaved-zb") and micro_batches % rounds:
        return f"takes multiples of {rounds} micro-batches"
    return None


@register(
    "torch",
    about="torch.distributed.pipelining, stages made by hand, return_outputs=False",
    imports=("torch.distributed.pipelining",),
    schedules=tuple(CLASSES),
    two_stages=tuple(name for name in CLASSES if name not in ONE_STAGE),
    refuses=_refuse,
)
def make(job: Job) -> Step:
    """Make one stage on every rank, or two."""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    join(job)
    dist.init_process_group("gloo")
    rank, ranks, schedule = job.spec.rank, job.spec.ranks, job.setup.schedule
    lengths = job.setup.lengths if schedule in ONE_STAGE else job.setup.halves
    assert lengths is not None
    local = stages_of_rank(schedule, rank, ranks, len(lengths))
    parts = {index: job.stage(index, lengths) for index in local}
    stages = [_stage(job, parts[index], index, lengths, pipelining) for index in local]
    schedule_class = getattr(schedules, CLASSES[schedule])
    target = stages[0] if schedule in ONE_STAGE else stages
    runner = schedule_class(target, job.setup.micro_batches, loss_fn=job.loss)
    parameters: list[nn.Parameter] = []
    for part in parts.values():
        parameters += part.parameters()
    optimizer = job.optimizer(parameters)
    has_loss = len(lengths) - 1 in local

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Train one batch."""
        losses: list[Tensor] = []
        arguments = (inputs,) if 0 in local else ()
        if has_loss:
            runner.step(*arguments, target=targets, losses=losses, return_outputs=False)
        else:
            runner.step(*arguments, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step


def stages_of_rank(schedule: str, rank: int, ranks: int, stages: int) -> list[int]:
    """Return the stages of a rank.

    >>> stages_of_rank("interleaved", 1, 2, 4), stages_of_rank("zbv", 1, 2, 4)
    ([1, 3], [1, 2])
    """
    if schedule in V_SHAPED:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


class _OwnStorage(nn.Module):
    """Copies a value that is a view of another, such as the output of Flatten.

    torch detaches the outputs of stages in place, and its split backward then fails for views:
    "Failed to run stage backward input".
    """

    def forward(self, value: Tensor) -> Tensor:
        """Return the value, copied if it is a view."""
        return value.clone() if value._is_view() else value


def _stage(
    job: Job, part: nn.Sequential, index: int, lengths: tuple[int, ...], pipelining: Any
) -> Any:
    """Return torch's stage of a part of the model."""

    def example(boundary: int) -> Tensor:
        """Return a tensor of the shape of a boundary."""
        tensor = torch.empty_like(job.boundary(boundary, lengths), device="cpu")
        return tensor.requires_grad_() if boundary > 0 else tensor

    return pipelining.PipelineStage(
        nn.Sequential(part, _OwnStorage()),
        index,
        len(lengths),
        torch.device("cpu"),
        input_args=(example(index),),
        output_args=(example(index + 1),),
    )
