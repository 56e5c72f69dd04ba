"""One host's process: train some steps with each of several plans in turn, and write their times.

python schedules_worker.py '{"workload": "sleep", "plans": {…}, …}' OUT.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from workloads import WORKLOADS

import penstock as ps
from penstock.measure.host_links import measure_host_links


def main() -> None:
    """Train, and write the result on the first rank."""
    job = json.loads(sys.argv[1])
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
    if dist.get_rank() == 0:
        assert link is not None
        result = {
            "link": asdict(link),
            "seconds": seconds,
            "cpu": cpu,
            "op_s": {
                name: {kind: statistics.mean(row) for kind, row in rows.items()}
                for name, rows in op_seconds.items()
            },
        }
        Path(sys.argv[2]).write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    main()
