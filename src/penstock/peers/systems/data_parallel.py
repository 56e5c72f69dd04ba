"""torch's data parallelism: every rank has its share of the batch; DDP with the whole model on
every rank, FSDP2 with a shard of every layer.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job, join
from penstock.peers.setup import Setup


def _refuse(setup: Setup) -> str | None:
    """Return why the batch cannot be divided."""
    if setup.batch % setup.stages:
        return f"a batch of {setup.batch} cannot be divided among {setup.stages} ranks"
    if setup.options.get("accumulate") and setup.micro_batches < 2 * setup.stages:
        return "at most one micro-batch per rank: nothing to accumulate"
    return None


@register(
    "ddp",
    about="DistributedDataParallel; accumulate: in micro-batches of the pipelines' size",
    imports=("torch.nn.parallel", "torch.distributed"),
    options={"accumulate": (False, True)},
    refuses=_refuse,
    pipeline=False,
)
def make(job: Job) -> Step:
    """Copy the model to every rank."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    join(job)
    dist.init_process_group("gloo")
    network = DistributedDataParallel(nn.Sequential(*job.layers()), gradient_as_bucket_view=True)
    optimizer = job.optimizer(network.parameters())
    rank, ranks = job.spec.rank, job.spec.ranks
    accumulate = bool(job.option("accumulate", False))
    count = job.setup.micro_batches // ranks if accumulate else 1

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Train this rank's share of a batch."""
        x, y = inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank]
        total = torch.zeros(())
        for index, (part, target) in enumerate(zip(x.chunk(count), y.chunk(count), strict=True)):
            last = index == count - 1
            # The sums of the gradients over the ranks are made once, in the last backward.
            with contextlib.nullcontext() if last else network.no_sync():
                loss = job.loss(network(part), target) / count
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


@register(
    "fsdp2",
    about="fully_shard on every layer with parameters, and on the model",
    imports=("torch.distributed.fsdp",),
    refuses=_refuse,
    pipeline=False,
)
def make_sharded(job: Job) -> Step:
    """Divide the parameters of every layer among the ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(job)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (job.spec.ranks,))
    network = nn.Sequential(*job.layers())
    for layer in network:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    job.rename(network.named_parameters())
    train = job.training_step(network)
    rank, ranks = job.spec.rank, job.spec.ranks

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Train this rank's share of a batch."""
        return train(inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank])

    return step
