"""Published throughputs of GPT models on up to 3,072 GPUs beside simulations and plans.

python benchmarks/scale/run.py [--rows 0,5] [--out benchmarks/scale/results.json]

Rows that are run replace those of the file; the others stay as they are. Seconds are those of one
core (`time.process_time`), so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import penstock as ps
from penstock.cluster.machines import Cluster
from penstock.profile.profile import Profile
from penstock.profile.transformer import Transformer, transformer_profile
from penstock.simulate.gradient_sync import all_reduce_seconds
from penstock.simulate.plan_costs import schedule_costs
from penstock.simulate.simulate import simulate_schedule
from penstock.weights.catalogue import weight_rule

#: Narayanan et al., SC 2021, arXiv 2104.04473, table 1, from memory: billions, layers, hidden, heads,
#: stages of the pipeline, GPUs, batch, TFLOP/s of a GPU. Tensor parallelism is 8 in all rows. The
#: last row is not published.
ROWS = (
    ("18.4", 40, 6144, 48, 1, 256, 1024, 135),
    ("39.1", 48, 8192, 64, 2, 512, 1536, 138),
    ("76.1", 60, 10240, 80, 4, 1024, 1792, 140),
    ("145.6", 80, 12288, 96, 8, 1536, 2304, 148),
    ("310.1", 96, 16384, 128, 16, 1920, 2160, 155),
    ("529.6", 105, 20480, 128, 35, 2520, 2520, 163),
    ("1008.0", 128, 25600, 160, 64, 3072, 3072, 163),
    ("1008.0", 128, 25600, 160, 64, 10240, 10240, None),
)


def published_step_s(row: tuple, profile: Profile, cluster: Cluster) -> float:
    """Return the simulated seconds of a step at the published layout, with full recomputation."""
    _, layers, _, _, ranks, gpus, batch, _ = row
    (width,) = (p for p in profile.widths if p.tensor_parallel == 8 and not p.sequence_parallel)
    replicas = gpus // 8 // ranks
    chunks = 1 if ranks == 1 else 3 if layers // ranks == 3 else 2
    length = layers // (ranks * chunks)
    lengths = [length] * (ranks * chunks)
    for stage in range(layers - sum(lengths)):
        lengths[1 + stage] += 1
    lengths[0] += 1
    lengths[-1] += 1
    options = {"chunks": chunks} if chunks > 1 else {}
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = ps.schedule(name, len(lengths), batch // replicas, **options)
    pipeline = Cluster("pipeline", cluster.devices[:ranks], 1, cluster.inside, cluster.between)
    micro = schedule_costs(
        schedule, [width] * ranks, lengths, pipeline, batch / replicas, weight_rule("flush")
    )
    timeline = simulate_schedule(schedule, micro, recompute="always")
    gradients = max(micro.spread("gradient_bytes", len(lengths)) or (0.0,)) * chunks
    return timeline.makespan + all_reduce_seconds(range(0, replicas * 8, 8), gradients, cluster)


def measure(index: int) -> dict[str, object]:
    """Return simulated and planned throughput of a row, in TFLOP/s of a GPU."""
    row = ROWS[index]
    name, layers, hidden, heads, _, gpus, batch, published = row
    cluster = ps.cluster(f"{gpus // 8}x8xA100-80-NVLink-IB200")
    model = Transformer(layers, hidden, heads)
    profile = transformer_profile(model, cluster.devices[0], cluster.inside, batch=batch)
    flops = model.step_flops(batch) / gpus / 1e12
    started = time.process_time()
    simulated_s = published_step_s(row, profile, cluster)
    simulated = time.process_time()
    plan = ps.plan(profile, cluster, batch, recompute="always")
    planned = time.process_time()
    replicas = len(plan.schedule.ranks_of_stage[0])
    return {
        "row": index,
        "billions": name,
        "gpus": gpus,
        "published": published,
        "simulated": round(flops / simulated_s, 1),
        "simulation_cpu_s": round(simulated - started, 1),
        "planned": round(flops / plan.predicted.step_s, 1),
        "plan_cpu_s": round(planned - simulated, 1),
        "layout": (
            f"{plan.schedule_name}, {plan.stages} stages, {plan.sharding.words}, "
            f"{replicas} replicas, {plan.micro_batches} micro-batches"
        ),
        "note": plan.search_note,
    }


def write_row(target: Path, result: dict[str, object]) -> None:
    """Write a result into the file in place of an earlier one of the same row."""
    results = json.loads(target.read_text(encoding="utf-8")) if target.exists() else []
    rows = {earlier["row"]: earlier for earlier in results}
    rows[result["row"]] = result
    ordered = [rows[index] for index in sorted(rows)]
    target.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure rows, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    everything = ",".join(map(str, range(len(ROWS))))
    parser.add_argument("--rows", default=everything, help="numbers of rows, default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = parser.parse_args()
    for index in map(int, arguments.rows.split(",")):
        result = measure(index)
        print(result, flush=True)
        write_row(arguments.out, result)


if __name__ == "__main__":
    main()
