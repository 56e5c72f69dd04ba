"""Penstock beside torch, step by step in turn in one job.

`1f1b` compares the 1F1B of both with the same cut and micro-batches; `data-parallel` compares
DistributedDataParallel with a pipeline of one stage that has a copy on every host.

sudo python benchmarks/hosts/in_turn.py 1f1b sleep-wide --mbit 100 --mbit 300
sudo python benchmarks/hosts/in_turn.py data-parallel gpt --mbit 10000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from host_processes import HostProcesses
from namespaces import Hosts, ending_on_signals
from schedules import cluster_of, proposals
from workloads import WORKLOADS

import penstock as ps
from penstock.search.best_plan import plan_proposal
from penstock.search.request import PlanRequest

HERE = Path(__file__).parent


#: By name of a comparison: the system of torch, as the worker calls it.
TORCH_SYSTEMS = {"1f1b": "torch-1f1b", "data-parallel": "ddp"}


def plan_for(comparison: str, profile: ps.Profile, samples: int, count: int, mbit: int) -> ps.Plan:
    """Return the plan that Penstock runs in a comparison."""
    cluster = cluster_of(count, mbit, None)
    if comparison == "data-parallel":
        request = PlanRequest(profile, cluster, samples, optimizer="Adam", optimizer_states=2.0)
        return plan_proposal(request, proposals(len(profile), count, count)["data-parallel"])
    options: dict[str, Any] = {"stages": count, "schedules": ["1f1b"], "micro_batches": 2 * count}
    return ps.plan(profile, cluster, samples, optimizer=torch.optim.Adam, **options)


def measure(
    comparison: str, workload: str, plan: ps.Plan, count: int, mbit: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of the steps of both, in the order in which they took turns."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-hosts-") as folder,
        Hosts(count, mbit) as hosts,
        HostProcesses(hosts, HERE / "worker.py", Path(folder)) as processes,
    ):
        path = Path(folder) / "plan.json"
        plan.save(path)
        job = {
            "system": "in-turn",
            "torch": TORCH_SYSTEMS[comparison],
            "workload": workload,
            "plan": str(path),
            "lengths": list(plan.lengths),
            "micro_batches": plan.schedule.micro_batches,
            "rounds": rounds,
        }
        seconds: dict[str, list[float]] = processes.run(job, count)[0]["seconds"]
        return seconds


def main() -> None:
    """Measure, and print the seconds of a step and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", choices=TORCH_SYSTEMS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--mbit", action="append", type=int, required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    case, count = WORKLOADS[arguments.workload], arguments.hosts
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = case.batch()
    profile = ps.profile(
        case.model(),
        inputs,
        batch=case.samples,
        threads=1,
        repeats=1,
        device="cpu",
        loss=case.loss,
        targets=targets,
    )
    for mbit in arguments.mbit:
        plan = plan_for(arguments.comparison, profile, case.samples, count, mbit)
        seconds = measure(
            arguments.comparison, arguments.workload, plan, count, mbit, arguments.rounds
        )
        pairs = zip(seconds["torch"], seconds["penstock"], strict=True)
        ratios = sorted(ours / others for others, ours in pairs)
        print(
            f"{arguments.comparison}, {arguments.workload}, {repr(plan).splitlines()[0]}, "
            f"cut {list(plan.lengths)}, {mbit} Mbit/s: "
            f"torch {statistics.median(seconds['torch']):.2f} s a step, "
            f"Penstock {statistics.median(seconds['penstock']):.2f} s, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    with ending_on_signals():
        main()
