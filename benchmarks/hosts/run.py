"""Time per step of DistributedDataParallel and of Penstock's plan on hosts with slow links.

    sudo python benchmarks/hosts/run.py                    # as root: it makes network namespaces
    sudo python benchmarks/hosts/run.py --workload mlp --hosts 2 --mbit 100

Systems take turns, round by round. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from namespaces import Hosts
from workloads import WORKLOADS

import penstock as ps
from penstock.cluster.device import Link

HERE = Path(__file__).parent
SYSTEMS = ("ddp", "ddp-fp16", "pipeline", "auto")
#: Share of a link's rate that data gets, and seconds of a message's way: TCP over tbf, measured once
#: with a 64 MiB and a 64 byte message between two namespaces.
PAYLOAD, LATENCY_S = 0.95, 300e-6
LIMIT_S = 300


def plans_for(
    workload: str, hosts: int, mbit: int, folder: Path
) -> dict[str, tuple[Path, ps.Plan]]:
    """Profile the model here, plan it for the hosts, and write the plans.

    Returns:
        "pipeline": the best plan with a stage on every host. "auto": the best of all plans, which
        may be one host alone.
    """
    torch.set_num_threads(1)
    case = WORKLOADS[workload]
    torch.manual_seed(0)
    profile = ps.profile(
        case.model(), case.batch()[0], batch=case.samples, threads=1, repeats=3, device="cpu"
    )
    local = ps.cluster(f"local:{hosts}")
    link = Link(LATENCY_S, PAYLOAD * mbit * 1e6 / 8)
    cluster = ps.Cluster(f"{hosts} hosts, {mbit} Mbit/s", local.devices, 1, link, link)
    plans = {}
    for name, stages in (("pipeline", hosts), ("auto", None)):
        plan = ps.plan(profile, cluster, case.samples, stages=stages, optimizer=torch.optim.Adam)
        path = folder / f"{workload}-{hosts}-{mbit}-{name}.json"
        plan.save(path)
        plans[name] = path, plan
    return plans


def free_port() -> int:
    """Return a port that is free here, and so most likely in a fresh namespace."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_system(hosts: Hosts, job: dict[str, Any], count: int, folder: Path) -> list[dict[str, Any]]:
    """Run one system on the first `count` hosts, and return each host's result.

    Raises:
        RuntimeError: a process failed or took too long; the message has the end of its output.
    """
    port = free_port()
    processes, results, logs = [], [], []
    for rank in range(count):
        result, log = folder / f"{rank}.json", folder / f"{rank}.log"
        result.unlink(missing_ok=True)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            # Namespaces share the machine's memory, which hosts do not.
            "PENSTOCK_SHARED_MEMORY": "0",
        }
        words = [sys.executable, str(HERE / "worker.py"), json.dumps(job), str(result)]
        with log.open("wb") as output:
            processes.append(hosts.start(rank, words, variables, output.fileno()))
        results.append(result)
        logs.append(log)
    try:
        for process in processes:
            process.wait(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not all(result.exists() for result in results):
        ends = "\n".join(log.read_text(errors="replace")[-600:] for log in logs)
        raise RuntimeError(f"{job['system']} failed:\n{ends}")
    return [json.loads(result.read_text()) for result in results]


def compare(workload: str, count: int, mbit: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure all systems in turn, and return their times, memory and losses."""
    plans = plans_for(workload, count, mbit, folder)
    rows: dict[str, dict[str, Any]] = {name: {"seconds": [], "peak_bytes": []} for name in SYSTEMS}
    with Hosts(count, mbit) as hosts:
        for _ in range(rounds):
            for name in SYSTEMS:
                job = {"system": name, "workload": workload, "steps": 3}
                ranks = count
                if name in plans:
                    path, plan = plans[name]
                    job["plan"], ranks = str(path), plan.ranks
                results = run_system(hosts, job, ranks, folder)
                rows[name]["seconds"].append(statistics.median(results[0]["seconds"]))
                rows[name]["peak_bytes"].append(max(row["peak_bytes"] for row in results))
                rows[name]["losses"] = results[0]["losses"]
                print(f"  {name}: {rows[name]['seconds'][-1]:.2f} s a step", flush=True)
    ddp_s = statistics.median(rows["ddp"]["seconds"])
    ddp_bytes = max(rows["ddp"]["peak_bytes"])
    for row in rows.values():
        row["times_ddp"] = ddp_s / statistics.median(row["seconds"])
        row["memory_of_ddp"] = max(row["peak_bytes"]) / ddp_bytes
    return {
        "workload": workload,
        "hosts": count,
        "mbit": mbit,
        "plans": {name: repr(plan) for name, (_, plan) in plans.items()},
        "predicted_s": {name: plan.predicted.step_s for name, (_, plan) in plans.items()},
        "systems": rows,
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--hosts", action="append", type=int)
    parser.add_argument("--mbit", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: sudo python benchmarks/hosts/run.py")
    cells = []
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as folder:
        for workload in arguments.workload or ("vgg16", "mlp"):
            for hosts in arguments.hosts or (2,):
                for mbit in arguments.mbit or (100, 1000):
                    print(f"{workload}, {hosts} hosts, {mbit} Mbit/s", flush=True)
                    cells.append(compare(workload, hosts, mbit, arguments.rounds, Path(folder)))
                    print_cell(cells[-1])
                    facts = {"cores": os.cpu_count(), "torch": torch.__version__}
                    facts["python"] = platform.python_version()
                    content = {"machine": facts, "command": sys.argv[1:], "cells": cells}
                    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


def print_cell(cell: dict[str, Any]) -> None:
    """Print the table of a cell."""
    for name, text in cell["plans"].items():
        print(f"  {name}: {text}")
    for name, row in cell["systems"].items():
        seconds = statistics.median(row["seconds"])
        print(
            f"  {name:10} {seconds:8.2f} s a step, {row['times_ddp']:5.2f} times as fast as DDP, "
            f"{max(row['peak_bytes']) / 2**20:6.0f} MiB ({row['memory_of_ddp']:.2f} of DDP)"
        )


if __name__ == "__main__":
    main()
