"""Every planner on the same profiles and clusters, scored by one simulator; and how long `auto`
takes, and how much memory.

Profiles are analytic (`ps.analytic`): no GPU is needed, and none is claimed. Each case runs in a
process of its own, so that its seconds and its peak memory are its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.search.compare import compare
from penstock.zoo.catalogue import model

MIXED = """
name: 512 V100 and 512 A100 in 128 nodes
devices_per_node: 8
devices: [{name: V100, count: 512}, {name: A100, count: 512}]
inside: PCIe3
between: 25GbE
"""


@dataclass(frozen=True)
class Case:
    """A model with an example of one sample, a cluster, and the samples of a batch."""

    model: str
    options: dict[str, Any]
    example: tuple[str, int]
    cluster: str
    batch: int
    ask_all: bool = True


def example(case: Case) -> Any:
    """One picture, one sequence, or a sequence with its translation."""
    kind, size = case.example
    if kind == "image":
        return torch.zeros(1, 3, size, size)
    one = torch.zeros(1, size, dtype=torch.long)
    return one if kind == "tokens" else torch.stack([one, one], dim=1)


GPT_100 = {
    "layers": 97,
    "width": 1024,
    "heads": 16,
    "tokens": 512,
    "vocabulary": 32000,
}  # with embedding, norm and head 100 layers
GPT_24 = {"layers": 24, "width": 1024, "heads": 16, "tokens": 512, "vocabulary": 32000}
CASES = [
    Case("gpt", GPT_100, ("tokens", 512), "8xA100-NVLink", 64),
    Case("gpt", GPT_100, ("tokens", 512), "8xV100-10GbE", 64),
    Case("gpt", GPT_24, ("tokens", 512), "HetPipe", 128),
    Case("vgg16", {"classes": 1000}, ("image", 224), "PipeDream-A", 1024),
    Case("resnet50", {"classes": 1000}, ("image", 224), "PipeDream-B", 1024),
    Case("gnmt", {}, ("pair", 32), "PipeDream-A", 512),
    Case("gpt", GPT_100, ("tokens", 512), "mixed", 4096, ask_all=False),
]


def weigh(case: Case, path: str) -> None:
    """Plan one case and write what came of it; in a process of its own."""
    with torch.device("meta"):
        network = model(case.model, **case.options)
    where = case.cluster
    if where == "mixed":
        file = Path(tempfile.mkdtemp()) / "mixed.yaml"
        file.write_text(MIXED)
        where = str(file)
    target = ps.cluster(where)
    kinds = dict.fromkeys(device.name for device in target.devices)
    profiles = {kind: ps.analytic(network, example(case), kind, batch=case.batch) for kind in kinds}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, spent = time.perf_counter(), time.process_time()
    plan = ps.plan(profiles, target, batch=case.batch)
    seconds, cpu = time.perf_counter() - start, time.process_time() - spent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    others = compare(profiles, target, case.batch) if case.ask_all else ()
    row = {
        "model": case.model,
        "options": case.options,
        "cluster": target.name,
        "ranks": target.ranks,
        "batch": case.batch,
        "layers": plan.layers,
        "plan": str(plan).splitlines()[0],
        "step_s": plan.predicted.step_s,
        "data_parallel_s": plan.predicted.data_parallel_s,
        "one_device_s": plan.predicted.one_device_s,
        "lower_bound_s": plan.predicted.lower_bound_s,
        "seconds": seconds,
        "cpu_s": cpu,
        "peak_rss_mib": peak / 1024,
        "rss_before_mib": before / 1024,
        "planners": [
            {
                "planner": planner.planner,
                "step_s": planner.step_s if planner.plan else None,
                "seconds": planner.seconds,
                "plan": str(planner.plan).splitlines()[0]
                if planner.plan
                else planner.refusal.splitlines()[0],
                "objective": str(planner.plan.objective)
                if planner.plan and planner.plan.objective
                else None,
            }
            for planner in others
        ],
    }
    Path(path).write_text(json.dumps(row))


def main() -> int:
    """Run all cases, print them, and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="cases whose model and cluster contain this")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    words = parser.parse_args()
    rows = []
    for case in CASES:
        if words.only and words.only not in f"{case.model} {case.cluster}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "row.json")
            process = multiprocessing.get_context("spawn").Process(target=weigh, args=(case, path))
            process.start()
            process.join()
            if process.exitcode:
                return 1
            rows.append(json.loads(Path(path).read_text()))
        show(rows[-1])
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if not words.only:
        words.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
        print(f"wrote {words.out}")
    return 0


def show(row: dict[str, Any]) -> None:
    """One case as a table."""
    parallel = row["data_parallel_s"]
    against = f", {parallel / row['step_s']:.2f} times data parallelism" if parallel else ""
    print(
        f"\n{row['model']} ({row['layers']} layers) on {row['cluster']} ({row['ranks']} ranks), batch {row['batch']}"
    )
    print(f"  auto: {row['plan']}")
    print(
        f"  {row['step_s'] * 1e3:.1f} ms a step{against}, {row['one_device_s'] / row['step_s']:.2f} times one device; lower bound "
        f"{row['lower_bound_s'] * 1e3:.1f} ms; planned in {row['seconds']:.1f} s ({row['cpu_s']:.1f} s of CPU), peak "
        f"{row['peak_rss_mib']:.0f} MiB"
    )
    for planner in row["planners"]:
        ratio = f"{planner['step_s'] / row['step_s']:7.3f}" if planner["step_s"] else "   none"
        print(
            f"  {planner['planner']:18} {ratio}  {planner['seconds']:6.2f} s  {planner['plan'][:120]}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
