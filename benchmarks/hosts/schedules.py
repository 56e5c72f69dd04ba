"""Predicted and measured time per step of schedules on hosts with slow links.

    sudo python benchmarks/hosts/schedules.py --hosts 2 --mbit 100 --mbit 300
    python benchmarks/hosts/schedules.py --predict-only       # of the profiles in the results

The same programs are measured whatever the cost model says: cuts and micro-batches are fixed.
README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from host_processes import HostProcesses
from namespaces import Hosts, ending_on_signals
from workloads import WORKLOADS

import penstock as ps
from penstock.cluster.device import Device, Link
from penstock.profile.profile import Timing
from penstock.search.best_plan import plan_proposal
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest

HERE = Path(__file__).parent
SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", "zb-h1", "interleaved", "data-parallel")
#: Rate of a link's payload over TCP to its nominal rate, and seconds of a message's way.
PAYLOAD, LATENCY_S = 0.95, 100e-6


def even_lengths(layers: int, stages: int) -> tuple[int, ...]:
    """Return lengths of stages that differ by one layer at most."""
    return tuple((layers * (s + 1)) // stages - (layers * s) // stages for s in range(stages))


def proposals(layers: int, hosts: int, micro_batches: int) -> dict[str, Proposal]:
    """Return every schedule on one rank per host, cut evenly."""
    rows = {}
    for name in SCHEDULES:
        if name == "data-parallel":
            options = (("replicas", hosts),)
            rows[name] = Proposal((layers,), "1f1b", hosts, options, recompute="never")
            continue
        stages = 2 * hosts if name == "interleaved" else hosts
        lengths = even_lengths(layers, stages)
        rows[name] = Proposal(lengths, name, micro_batches, recompute="never")
    return rows


def cluster_of(hosts: int, mbit: int, link: Link | None) -> ps.Cluster:
    """Return hosts of one CPU rank each, joined by a measured or by the nominal link."""
    if link is None:
        link = Link(LATENCY_S, PAYLOAD * mbit * 1e6 / 8)
    devices = (Device("cpu", 2**34, "cpu"),) * hosts
    return ps.Cluster(f"{hosts} hosts, {mbit} Mbit/s", devices, 1, link, link)


def predict(
    profile: ps.Profile, samples: int, hosts: int, mbit: int, micro_batches: int, link: Link | None
) -> dict[str, ps.Plan]:
    """Return the plan of every schedule, with its predicted time."""
    cluster = cluster_of(hosts, mbit, link)
    request = PlanRequest(profile, cluster, samples, optimizer="SGD", optimizer_states=0.0)
    return {
        name: plan_proposal(request, proposal)
        for name, proposal in proposals(len(profile), hosts, micro_batches).items()
    }


def measure(
    workload: str, count: int, mbit: int, micro_batches: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure all schedules in turn on one link."""
    case = WORKLOADS[workload]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    profile = ps.profile(
        case.model(),
        case.batch()[0],
        batch=case.samples,
        sizes=sorted({2, case.samples // micro_batches, case.samples // count}),
        threads=1,
        repeats=5,
        device="cpu",
    )
    with tempfile.TemporaryDirectory(prefix="penstock-hosts-") as name, Hosts(count, mbit) as hosts:
        folder = Path(name)
        paths = {}
        for schedule, plan in predict(
            profile, case.samples, count, mbit, micro_batches, None
        ).items():
            paths[schedule] = str(folder / f"{schedule}.json")
            plan.save(paths[schedule])
        auto = ps.plan(
            profile, cluster_of(count, mbit, None), case.samples, optimizer=torch.optim.SGD
        )
        paths["auto"] = str(folder / "auto.json")
        auto.save(paths["auto"])
        job = {
            "workload": workload,
            "plans": paths,
            "rounds": arguments.rounds,
            "steps": arguments.steps,
        }
        with HostProcesses(hosts, HERE / "schedules_worker.py", folder) as processes:
            result = processes.run(job, count)[0]
    return {
        "workload": workload,
        "hosts": count,
        "mbit": mbit,
        "micro_batches": micro_batches,
        "profile": json.loads(json.dumps(profile_json(profile))),
        "auto": repr(auto),
        **result,
    }


def with_op_seconds(
    profile: ps.Profile, seconds: dict[str, float], proposal: Proposal, samples: int
) -> ps.Profile:
    """Return the profile with the mean seconds that the ops of a run have taken.

    Layers that sleep are all alike, and on a busy machine they sleep longer in some minutes than in
    others; what is predicted then is the network's part.
    """
    stage_samples = len(profile) / proposal.stages * samples / proposal.micro_batches
    per_sample = {kind: second / stage_samples for kind, second in seconds.items()}
    # The I of the first stage does nothing, and its W is a whole backward: halves of B are as good.
    backward = per_sample.get("B", per_sample.get("I", 0.0) + per_sample.get("W", 0.0))
    second_of = {
        "forward": per_sample["F"],
        "backward": backward,
        "input_grad": backward / 2,
        "weight_grad": backward / 2,
    }
    layers = []
    for layer in profile.layers:
        sizes = layer.forward.sizes
        times = {
            phase: Timing(sizes, tuple(second * size for size in sizes))
            for phase, second in second_of.items()
        }
        layers.append(replace(layer, **times))
    return replace(profile, layers=tuple(layers))


def profile_json(profile: ps.Profile) -> Any:
    """Return a profile as plain values."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json"
        profile.save(path)
        return json.loads(path.read_text())


def print_cell(cell: dict[str, Any]) -> None:
    """Print predicted over measured for every schedule of a cell."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json"
        path.write_text(json.dumps(cell["profile"]))
        profile = ps.Profile.load(path)
    link = Link(**cell["link"]) if cell.get("link") else None
    workload = WORKLOADS[cell["workload"]]
    cluster = cluster_of(cell["hosts"], cell["mbit"], link)
    print(f"{cell['workload']}, {cell['hosts']} hosts, {cell['mbit']} Mbit/s, link {link}")
    rows = proposals(len(profile), cell["hosts"], cell["micro_batches"])
    for name, proposal in rows.items():
        known = profile
        if cell["workload"].startswith("sleep"):
            known = with_op_seconds(profile, cell["op_s"][name], proposal, workload.samples)
        request = PlanRequest(known, cluster, workload.samples, optimizer_states=0.0)
        predicted_s = plan_proposal(request, proposal).predicted.step_s
        measured_s = statistics.median(cell["seconds"][name])
        print(
            f"  {name:14} predicted {predicted_s * 1e3:8.1f} ms, measured "
            f"{measured_s * 1e3:8.1f} ms, ratio {predicted_s / measured_s:5.2f}",
            flush=True,
        )
    medians = {name: statistics.median(row) for name, row in cell["seconds"].items()}
    best = min(rows, key=lambda name: medians[name])
    if "auto" not in medians:
        return
    print(
        f"  auto           measured {medians['auto'] * 1e3:8.1f} ms, "
        f"{medians['auto'] / medians[best]:.2f} times the best of the above, {best}: {cell['auto']}",
        flush=True,
    )


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--hosts", action="append", type=int)
    parser.add_argument("--mbit", action="append", type=int)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "schedules.json")
    arguments = parser.parse_args()
    cells: list[dict[str, Any]] = []
    if arguments.out.exists():
        cells = json.loads(arguments.out.read_text())
    if arguments.predict_only:
        for cell in cells:
            print_cell(cell)
        return
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: sudo python benchmarks/hosts/schedules.py")
    for workload in arguments.workload or ("sleep",):
        for hosts in arguments.hosts or (2,):
            for mbit in arguments.mbit or (100, 300, 1000, 10000):
                cell = measure(workload, hosts, mbit, arguments.micro_batches, arguments)
                cells = [row for row in cells if key_of(row) != key_of(cell)]
                cells.append(cell)
                print_cell(cell)
                arguments.out.write_text(json.dumps(cells) + "\n")


def key_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a cell is of."""
    return tuple(cell[name] for name in ("workload", "hosts", "mbit", "micro_batches"))


if __name__ == "__main__":
    with ending_on_signals():
        main()
