"""Time per step of torch's systems and of Penstock's plans on hosts with slow links.

    sudo python benchmarks/hosts/run.py                    # as root: it makes network namespaces
    sudo python benchmarks/hosts/run.py --workload gpt --hosts 2 --mbit 100 --system torch-1f1b

Systems take turns, round by round. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from host_processes import HostProcesses
from namespaces import Hosts, ending_on_signals
from workloads import WORKLOADS

import penstock as ps
from penstock.cluster.device import Link
from penstock.simulate.plan_costs import simulate_plan

HERE = Path(__file__).parent
TORCH_SYSTEMS = ("ddp", "ddp-fp16", "fsdp2", "torch-1f1b")
PLANS = ("penstock-1f1b", "auto", "hybrid")


def measure(
    processes: HostProcesses, workload: str, count: int, mbit: int, folder: Path
) -> tuple[ps.Profile, ps.Cluster]:
    """Profile the model on all hosts at once, and measure the link."""
    path = folder / "profile.json"
    job = {"system": "profile", "workload": workload, "profile": str(path)}
    link = Link(**processes.run(job, count)[0])
    devices = ps.cluster(f"local:{count}").devices
    return ps.Profile.load(path), ps.Cluster(
        f"{count} hosts, {mbit} Mbit/s", devices, 1, link, link
    )


def plans_for(
    profile: ps.Profile, cluster: ps.Cluster, samples: int, folder: Path
) -> dict[str, tuple[Path, ps.Plan]]:
    """Write the plans.

    Args:
        profile: of the model.
        cluster: the hosts.
        samples: of a batch.
        folder: for the files.

    Returns:
        "penstock-1f1b": 1F1B with a stage on every host, whose cut torch's 1F1B gets too. "auto":
        the best of all plans, which may be one host alone. "hybrid": of four hosts and more, the
        best plan with half as many stages as hosts.
    """
    count = cluster.ranks
    options: dict[str, dict[str, Any]] = {
        "penstock-1f1b": {"stages": count, "schedules": ["1f1b"], "micro_batches": 2 * count},
        "auto": {},
    }
    if count >= 4:
        options["hybrid"] = {"stages": count // 2}
    plans = {}
    for name, choice in options.items():
        plan = ps.plan(profile, cluster, samples, optimizer=torch.optim.Adam, **choice)
        path = folder / f"{name}.json"
        plan.save(path)
        print(f"  {name}: {summary(plan)}", flush=True)
        plans[name] = path, plan
    return plans


def summary(plan: ps.Plan) -> str:
    """Return what a plan runs, and its predicted time."""
    return f"{repr(plan).partition(chr(10))[0]}; cut {list(plan.lengths)}"


def jobs_for(
    workload: str, plans: dict[str, tuple[Path, ps.Plan]], systems: list[str] | None
) -> dict[str, dict[str, Any]]:
    """Return the jobs of the systems to be measured, by name. DDP is always among them."""
    equal_cut = plans["penstock-1f1b"][1]
    jobs: dict[str, dict[str, Any]] = {}
    for name in (*TORCH_SYSTEMS, *plans):
        if systems is not None and name not in ("ddp", *systems):
            continue
        if name == "torch-1f1b" and workload == "gnmt":
            continue  # its stages exchange dicts, which torch's stages do not take
        jobs[name] = {"system": name, "workload": workload}
        if name == "torch-1f1b":
            jobs[name]["lengths"] = list(equal_cut.lengths)
            jobs[name]["micro_batches"] = equal_cut.schedule.micro_batches
        if name in plans:
            jobs[name]["plan"] = str(plans[name][0])
    return jobs


def compare(
    workload: str, count: int, mbit: int, arguments: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Measure systems in turn, and return their times, memory and losses.

    The profile and the link are measured before and after every round, and the mean of what both
    predict is compared with it: the speed of a virtual machine changes from minute to minute.

    Args:
        workload: name of a workload.
        count: number of hosts.
        mbit: rate of their links, in Mbit/s.
        arguments: of the command.
        folder: for plans and results of processes.
    """
    rows: dict[str, dict[str, Any]] = {}
    with (
        Hosts(count, mbit) as hosts,
        HostProcesses(hosts, HERE / "worker.py", folder) as processes,
    ):
        place = processes, workload, count, mbit, folder
        profile, cluster = measure(*place)
        plans = plans_for(profile, cluster, WORKLOADS[workload].samples, folder)
        jobs = jobs_for(workload, plans, arguments.system)
        for _ in range(arguments.rounds):
            for name, job in jobs.items():
                ranks = plans[name][1].ranks if name in plans else count
                results = processes.run({**job, "steps": arguments.steps}, ranks)
                row = rows.setdefault(name, {"seconds": [], "peak_bytes": []})
                row["seconds"].append(statistics.median(results[0]["seconds"]))
                row["peak_bytes"].append(max(result["peak_bytes"] for result in results))
                row["losses"] = results[0]["losses"]
                print(f"  {name}: {row['seconds'][-1]:.2f} s a step", flush=True)
            after = measure(*place)
            for name in jobs.keys() & plans.keys():
                plan = plans[name][1]
                predicted_s = statistics.mean(
                    simulate_plan(plan, *conditions).makespan
                    for conditions in ((profile, cluster), after)
                )
                rows[name].setdefault("predicted_s", []).append(predicted_s)
                print(f"  {name}: {predicted_s:.2f} s predicted", flush=True)
            profile, cluster = after
    ddp_bytes = max(rows["ddp"]["peak_bytes"])
    for row in rows.values():
        pairs = zip(rows["ddp"]["seconds"], row["seconds"], strict=True)
        row["times_ddp"] = statistics.median(ddp_s / seconds for ddp_s, seconds in pairs)
        row["memory_of_ddp"] = max(row["peak_bytes"]) / ddp_bytes
        if "predicted_s" in row:
            pairs = zip(row["seconds"], row["predicted_s"], strict=True)
            row["times_predicted"] = statistics.median(s / predicted_s for s, predicted_s in pairs)
    return {
        "workload": workload,
        "hosts": count,
        "mbit": mbit,
        "command": sys.argv[1:],
        "note": arguments.note,
        "machine": {
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "plans": {name: summary(plan) for name, (_, plan) in plans.items()},
        "systems": rows,
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--hosts", action="append", type=int)
    parser.add_argument("--mbit", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--system",
        action="append",
        choices=(*TORCH_SYSTEMS[1:], *PLANS),
        help="measure only this one and DDP (repeatable)",
    )
    parser.add_argument("--note", default="", help="about the machine, such as other work on it")
    parser.add_argument("--missing", action="store_true", help="skip the cells of the results")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: sudo python benchmarks/hosts/run.py")
    cells: list[dict[str, Any]] = []
    if arguments.out.exists():
        cells = json.loads(arguments.out.read_text())["cells"]
    for key in keys_of(arguments):
        if arguments.missing and any(key_of(cell) == key for cell in cells):
            continue
        print(f"{key[0]}, {key[1]} hosts, {key[2]} Mbit/s", flush=True)
        with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as folder:
            cell = compare(*key, arguments, Path(folder))
        print_cell(cell)
        cells = [row for row in cells if key_of(row) != key]
        cells.append(cell)
        cells.sort(key=key_of)
        arguments.out.write_text(json.dumps({"cells": cells}, indent=1) + "\n")


def keys_of(arguments: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return workload, hosts and rate of all cells that a command asks for."""
    return [
        (workload, hosts, mbit)
        for workload in arguments.workload or ("vgg19", "gpt", "gnmt")
        for hosts in arguments.hosts or (2, 4)
        for mbit in arguments.mbit or (100, 300, 1000, 10000)
    ]


def key_of(cell: dict[str, Any]) -> tuple[str, int, int]:
    """Return workload, hosts and rate of a cell."""
    return cell["workload"], cell["hosts"], cell["mbit"]


def print_cell(cell: dict[str, Any]) -> None:
    """Print the table of a cell."""
    for name, row in cell["systems"].items():
        seconds = statistics.median(row["seconds"])
        print(
            f"  {name:13} {seconds:8.2f} s a step, {row['times_ddp']:5.2f} times as fast as DDP, "
            f"{max(row['peak_bytes']) / 2**20:6.0f} MiB ({row['memory_of_ddp']:.2f} of DDP)"
            + (f", {row['times_predicted']:.2f} of predicted" if "times_predicted" in row else "")
        )


if __name__ == "__main__":
    with ending_on_signals():
        main()
