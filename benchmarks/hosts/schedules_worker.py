"""One host's process: train some steps with each of several plans in turn; see `host_processes`."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from host_processes import serve
from workloads import WORKLOADS

import penstock as ps
from penstock.measure.host_links import measure_host_links


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and return times by plan, and the measured link.

    Args:
        job: workload, files of plans by name, rounds, and steps of a round.
    """
    torch.set_num_threads(1)
    workload = WORKLOADS[job["workload"]]
    dist.init_process_group("gloo")
    _, link = measure_host_links([str(rank) for rank in range(dist.get_world_size())])
    pipes = {}
    for name, path in job["plans"].items():
        torch.manual_seed(0)
        pipes[name] = ps.Pipeline(
            workload.model(),
            ps.Plan.load(path),
            loss=workload.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        )
    inputs, targets = workload.batch()
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    cpu: dict[str, list[float]] = {name: [] for name in pipes}
    op_seconds: dict[str, dict[str, list[float]]] = {name: {} for name in pipes}
    for pipe in pipes.values():
        pipe.train_batch(inputs, targets)
        pipe.train_batch(inputs, targets)
    for _ in range(job["rounds"]):
        for name, pipe in pipes.items():
            for _ in range(job["steps"]):
                dist.barrier()
                start, cpu_start = time.perf_counter(), time.process_time()
                float(pipe.train_batch(inputs, targets))
                cpu[name].append(time.process_time() - cpu_start)
                dist.barrier()
                seconds[name].append(time.perf_counter() - start)
                for event in pipe.timeline().compute:
                    op_seconds[name].setdefault(event.op.kind.value, []).append(
                        event.end - event.start
                    )
    assert link is not None
    dist.barrier()
    return {
        "link": asdict(link),
        "seconds": seconds,
        "cpu": cpu,
        "op_s": {
            name: {kind: statistics.mean(row) for kind, row in rows.items()}
            for name, rows in op_seconds.items()
        },
    }


if __name__ == "__main__":
    serve(run_job)
