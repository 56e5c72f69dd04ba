"""Published throughputs of GPT models on up to 3,072 GPUs beside simulations and plans.

python benchmarks/scale/run.py [--out benchmarks/scale/results.json]
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

#: Narayanan et al. 2021, table 1, from memory: billions, layers, hidden, heads, stages of the pipeline,
#: GPUs, batch, TFLOP/s of a GPU. Tensor parallelism is 8 in all rows. The last row is not published.
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
#: Rows that are planned as well.
PLANNED = (0, 2, 3, 5, 6, 7)


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
    """Return simulated and planned throughput of a row."""
    row = ROWS[index]
    name, layers, hidden, heads, _, gpus, batch, published = row
    cluster = ps.cluster(f"{gpus // 8}x8xA100-80-NVLink-IB200")
    model = Transformer(layers, hidden, heads)
    profile = transformer_profile(model, cluster.devices[0], cluster.inside, batch=batch)
    flops = model.step_flops(batch) / gpus / 1e12
    result: dict[str, object] = {"billions": name, "gpus": gpus, "published": published}
    result["simulated"] = round(flops / published_step_s(row, profile, cluster), 1)
    if index in PLANNED:
        started = time.process_time()
        plan = ps.plan(profile, cluster, batch, recompute="always")
        result["plan_cpu_s"] = round(time.process_time() - started, 1)
        result["planned"] = round(flops / plan.predicted.step_s, 1)
        replicas = len(plan.schedule.ranks_of_stage[0])
        result["layout"] = (
            f"{plan.schedule_name}, {plan.stages} stages, {plan.sharding.words}, "
            f"{replicas} replicas, {plan.micro_batches} micro-batches"
        )
        result["note"] = plan.search_note
    return result


def main() -> None:
    """Measure all rows, print and write them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    results = []
    target = parser.parse_args().out
    for index in range(len(ROWS)):
        results.append(measure(index))
        print(results[-1], flush=True)
        target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
