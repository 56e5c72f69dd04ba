"""Published tables that no constant was fitted to, beside simulations of the same layouts.

python benchmarks/scale/others.py [--out benchmarks/scale/others.json]

All is simulated from the analytic profile of `penstock.profile.transformer`, whose one fitted
constant is that of Narayanan et al. 2021 (see run.py). So these rows test it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import penstock as ps
from penstock.cluster.machines import Cluster
from penstock.profile.profile import Profile
from penstock.profile.transformer import Transformer, transformer_profile
from penstock.search.schedules import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.plan_costs import schedule_costs, stage_costs
from penstock.simulate.simulate import simulate_schedule
from penstock.weights.catalogue import weight_rule

#: Korthikanti et al. 2022, arXiv 2205.05198, tables 3 and 5, from memory: billions, layers, hidden,
#: heads, stages, stages per rank, batch, samples of a micro-batch; seconds of an iteration with full
#: recomputation, and with selective recomputation and sequence parallelism. Tensor parallelism is 8
#: in all rows, and there is one replica.
KORTHIKANTI = (
    ("22", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    ("175", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    ("530", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    ("1000", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
)

#: Qi et al. 2024, arXiv 2401.10241, table 4 (docs/literature/zero-bubble.md): billions, layers,
#: heads, hidden, ranks, samples of a micro-batch, and per number of micro-batches the samples per GPU
#: and second of ZB-2p, ZB-1p, 1F1B and 1F1B-I.
ZERO_BUBBLE = (
    ("1.5", 22, 24, 2304, 8, 6, {24: (14.5, 12.9, 11.8, 13.1), 64: (14.9, 14.2, 13.6, 13.9)}),
    ("6.2", 30, 32, 4096, 8, 3, {24: (4.32, 3.88, 3.50, 4.01), 64: (4.39, 4.20, 4.03, 4.19)}),
    ("14.6", 46, 40, 5120, 16, 1, {48: (1.81, 1.61, 1.40, 1.54)}),
    ("28.3", 62, 48, 6144, 32, 1, {96: (0.99, 0.87, 0.76, 0.82)}),
)
SCHEDULES = ("zb-2p", "zb-1p", "1f1b", "interleaved")

#: DeepSeek-AI 2024, arXiv 2412.19437, table 2: bubble of p ranks, and micro-batches in flight. F = 1,
#: B = 2, W = 1, and an F and a B that run as one take 3.
DUAL_PIPE_RANKS, DUAL_PIPE_MICRO_BATCHES = (8, 16), 64


def korthikanti_row(row: tuple, selective: bool) -> dict[str, object]:
    """Return the published and the simulated seconds of an iteration."""
    billions, layers, hidden, heads, ranks, chunks, batch, size, full_s, present_s = row
    cluster = ps.cluster(f"{max(ranks, 2)}x8xA100-80-NVLink-IB200")
    model = Transformer(layers, hidden, heads, recompute_attention=selective)
    profile = transformer_profile(
        model, cluster.devices[0], cluster.inside, batch=batch, widths=(8,)
    )
    (width,) = (shared for shared in profile.widths if shared.sequence_parallel is selective)
    stages = ranks * chunks
    lengths = [layers // stages] * stages
    lengths[0] += 1
    lengths[-1] += 1
    name, options = ("interleaved", {"chunks": chunks}) if chunks > 1 else ("1f1b", {})
    pipeline = Cluster("pipeline", cluster.devices[:ranks], 1, cluster.inside, cluster.between)
    placed = ps.schedule(name, stages, batch // size, **options)
    costs = schedule_costs(placed, [width] * ranks, lengths, pipeline, batch, weight_rule("flush"))
    timeline = simulate_schedule(placed, costs, recompute="never" if selective else "always")
    return compared(
        f"{billions}B, {'selective, sequence parallel' if selective else 'full recomputation'}",
        present_s if selective else full_s,
        timeline.makespan,
    )


def zero_bubble_rows(row: tuple) -> list[dict[str, object]]:
    """Return published and simulated samples per GPU and second of the schedules of a model."""
    billions, layers, heads, hidden, ranks, size, published = row
    cluster = ps.cluster(
        f"{ranks // 8}x8xA100-80-NVLink-IB200" if ranks > 8 else "8xA100-80-NVLink"
    )
    model = Transformer(layers, hidden, heads, sequence=1024)
    profile = transformer_profile(model, cluster.devices[0], cluster.inside, batch=size, widths=())
    results = []
    for micro_batches, throughputs in published.items():
        for name, throughput in zip(SCHEDULES, throughputs, strict=True):
            step_s = pipeline_step_s(profile, cluster, name, micro_batches, size)
            simulated = micro_batches * size / step_s / ranks
            label = f"{billions}B, {name}, {micro_batches} micro-batches"
            results.append(compared(label, throughput, simulated))
    return results


def pipeline_step_s(
    profile: Profile, cluster: Cluster, name: str, micro_batches: int, size: int
) -> float:
    """Return the simulated seconds of a step on all ranks, with equal numbers of layers; interleaved
    stages have one layer, as in the paper.
    """
    ranks, batch = cluster.ranks, micro_batches * size
    chunks = len(profile) // ranks if name == "interleaved" else 1
    lengths = [len(profile) // (ranks * chunks)] * (ranks * chunks)
    if name.startswith("zb-"):
        costs = stage_costs(profile, lengths, size, cluster, micro_batches=micro_batches)
        placed = schedule(name, ranks, micro_batches, costs=costs)
    else:
        options = {"chunks": chunks} if chunks > 1 else {}
        placed = schedule(name, ranks * chunks, micro_batches, **options)
    profiles = [profile] * ranks
    costs = schedule_costs(placed, profiles, lengths, cluster, batch, weight_rule("flush"))
    timeline = simulate_schedule(placed, costs)
    if not name.startswith("zb-"):
        return timeline.makespan
    # Ranks update on their own: the paper counts the longest span of a rank.
    return sum(timeline.busy) / ranks / (1 - timeline.span_bubble_ratio)


def dual_pipe_rows(ranks: int) -> list[dict[str, object]]:
    """Return the bubble of table 2 and the simulated one, of 1F1B, ZB1P and DualPipe."""
    micro_batches = DUAL_PIPE_MICRO_BATCHES
    costs = Costs(forward=1, backward=2, input_grad=1, weight_grad=1, forward_backward=3)
    formulas = {
        "1f1b": (ranks - 1) * 3,
        "zb-h1": (ranks - 1) * (3 - 2),
        "dualpipe": (ranks // 2 - 1) * (3 + 2 - 3),
    }
    results = []
    for name, bubble in formulas.items():
        placed = ps.schedule(name, ranks, micro_batches)
        timeline = simulate_schedule(placed, costs)
        work = max(timeline.busy)
        results.append(compared(f"{ranks} ranks, {name}", bubble, timeline.makespan - work))
        results[-1]["in flight"] = max(timeline.peak_on_rank)
    return results


def compared(label: str, published: float, simulated: float) -> dict[str, object]:
    """Return a row with the relative difference of a simulation."""
    error = simulated / published - 1
    row = {"case": label, "published": published, "simulated": round(simulated, 4)}
    return {**row, "difference": round(error, 4)}


def main() -> None:
    """Simulate all rows, print them, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("others.json"))
    arguments = parser.parse_args()
    started = time.process_time()
    results: dict[str, list[dict[str, object]]] = {"korthikanti": [], "zero bubble": []}
    for row in KORTHIKANTI:
        for selective in (False, True):
            results["korthikanti"].append(korthikanti_row(row, selective))
    for row in ZERO_BUBBLE:
        results["zero bubble"] += zero_bubble_rows(row)
    results["dualpipe"] = [row for ranks in DUAL_PIPE_RANKS for row in dual_pipe_rows(ranks)]
    for table, rows in results.items():
        for row in rows:
            print(table, row)
        errors = [abs(float(str(row["difference"]))) for row in rows]
        print(f"{table}: median {median(errors):.1%}, largest {max(errors):.1%}")
    print(f"{time.process_time() - started:.1f} CPU seconds")
    arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
