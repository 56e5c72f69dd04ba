"""One host's process: train some steps with one system, and write times and peak memory.

python worker.py '{"system": "ddp", ...}' OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from workloads import WORKLOADS

from penstock.peers.memory import Peak


def main() -> None:
    """Train, and write the result."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = WORKLOADS[job["workload"]]
    dist.init_process_group("gloo")
    peak = Peak()
    inputs, targets = workload.batch()
    step = (penstock if "plan" in job else ddp)(job, workload)
    step(inputs, targets)
    peak.reset()
    seconds, losses = [], []
    for _ in range(job["steps"]):
        dist.barrier()
        start = time.perf_counter()
        losses.append(float(step(inputs, targets)))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    result = {"seconds": seconds, "losses": losses, "peak_bytes": peak.read()}
    Path(sys.argv[2]).write_text(json.dumps(result))
    dist.barrier()


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return Adam, whose state takes twice the memory of the weights."""
    return torch.optim.Adam(parameters, lr=1e-4)


def ddp(job: dict[str, Any], workload: Any) -> Any:
    """Return a step of DistributedDataParallel, each host with its share of the batch."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True)
    if job["system"] == "ddp-fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = _optimizer(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        """Train one batch."""
        x, y = inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        return total

    return step


def penstock(job: dict[str, Any], workload: Any) -> Any:
    """Return a step of the plan."""
    import penstock as ps

    pipe = ps.Pipeline(
        workload.model(),
        ps.Plan.load(job["plan"]),
        loss=nn.functional.cross_entropy,
        optimizer=_optimizer,
    )
    return pipe.train_batch


if __name__ == "__main__":
    main()
