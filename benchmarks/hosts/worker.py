"""One host's process: train some steps with one system; see `host_processes`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from host_processes import serve
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from workloads import WORKLOADS

import penstock as ps
from penstock.measure.host_links import measure_host_links
from penstock.peers.memory import Peak
from penstock.peers.workload import flat_layers

#: Steps that do not count. DDP assigns its buckets anew after the first, Penstock tests in the first,
#: second and fourth whether the losses of micro-batches add up, and memory is allocated in all.
WARM_UP = 4


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the seconds and losses of steps and the peak memory.

    Args:
        job: system and workload; further what the system takes.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS[job["workload"]]
    peak = Peak()
    dist.init_process_group("gloo")
    if job["system"] == "profile":
        return measure(job, workload)
    inputs, targets = workload.batch()
    if job["system"] == "in-turn":
        return in_turn(job, workload, inputs, targets)
    systems = {"fsdp2": fsdp2, "torch-1f1b": torch_1f1b}
    make = penstock if "plan" in job else systems.get(job["system"], ddp)
    step = make(job, workload)
    for _ in range(WARM_UP):
        step(inputs, targets)
    peak.reset()
    seconds, losses = [], []
    for _ in range(job["steps"]):
        step_s, loss = timed(step, inputs, targets)
        seconds.append(step_s)
        losses.append(loss)
    result = {"seconds": seconds, "losses": losses, "peak_bytes": peak.read()}
    dist.barrier()
    return result


def timed(step: Any, inputs: Any, targets: Any) -> tuple[float, float]:
    """Take a step; return its seconds until all hosts are done, and its loss."""
    dist.barrier()
    start = time.perf_counter()
    loss = float(step(inputs, targets))
    dist.barrier()
    return time.perf_counter() - start, loss


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return Adam, whose state takes twice the memory of the weights."""
    return torch.optim.Adam(parameters, lr=1e-4)


def ddp(job: dict[str, Any], workload: Any) -> Any:
    """Return a step of DistributedDataParallel, each host with its share of the batch."""
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True)
    if job["system"] == "ddp-fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    return data_parallel_step(model, workload)


def fsdp2(job: dict[str, Any], workload: Any) -> Any:
    """Return a step of torch's fully_shard on every layer with parameters."""
    del job
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = workload.model()
    for layer in flat_layers(model):
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return data_parallel_step(model, workload)


def data_parallel_step(model: torch.nn.Module, workload: Any) -> Any:
    """Return a step of a model, each host with its share of the batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = _optimizer(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Train one batch."""
        optimizer.zero_grad()
        loss = workload.loss(model(inputs.chunk(ranks)[rank]), targets.chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        return total

    return step


def torch_1f1b(job: dict[str, Any], workload: Any) -> Any:
    """Return a step of torch's Schedule1F1B on the stages of a cut."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first = sum(job["lengths"][:rank])
    layers = flat_layers(workload.model())  # a cut counts the layers inside of Sequentials
    part = torch.nn.Sequential(*layers[first : first + job["lengths"][rank]])
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    runner = Schedule1F1B(stage, job["micro_batches"], loss_fn=workload.loss)
    optimizer = _optimizer(part.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Train one batch."""
        losses: list[Tensor] = []
        if rank == ranks - 1:
            runner.step(target=targets, losses=losses, return_outputs=False)
        elif rank == 0:
            runner.step(inputs, return_outputs=False)
        else:
            runner.step(return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        total = (
            torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        )
        dist.broadcast(total, ranks - 1)
        return total

    return step


def measure(job: dict[str, Any], workload: Any) -> dict[str, Any]:
    """Profile the model on all hosts at once, as they are busy in training, and measure the link.

    The profile of the first one counts. All are equal, but a machine under load seems to have unlike
    hosts, which a common profile of all ranks would refuse.
    """
    inputs, targets = workload.batch()
    dist.barrier()
    profile = ps.profile(
        workload.model(),
        inputs,
        batch=workload.samples,
        threads=1,
        repeats=3,
        device="cpu",
        loss=workload.loss,
        targets=targets,
    )
    _, link = measure_host_links([str(rank) for rank in range(dist.get_world_size())])
    assert link is not None
    if dist.get_rank() == 0:
        profile.save(job["profile"])
    dist.barrier()
    return asdict(link)


def in_turn(job: dict[str, Any], workload: Any, inputs: Any, targets: Any) -> dict[str, Any]:
    """Train with a system of torch and with Penstock in turn, step by step, in one job."""
    torch_systems = {"torch-1f1b": torch_1f1b, "ddp": ddp}
    steps = {}
    for name, make in (("torch", torch_systems[job["torch"]]), ("penstock", penstock)):
        torch.manual_seed(0)
        steps[name] = make(job, workload)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + job["rounds"]):
        for name, step in steps.items():
            step_s, _ = timed(step, inputs, targets)
            if number >= WARM_UP:
                seconds[name].append(step_s)
    return {"seconds": seconds}


def penstock(job: dict[str, Any], workload: Any) -> Any:
    """Return a step of the plan."""
    pipe = ps.Pipeline(
        workload.model(),
        ps.Plan.load(job["plan"]),
        loss=workload.loss,
        optimizer=_optimizer,
    )
    return pipe.train_batch


if __name__ == "__main__":
    serve(run_job)
