"""How near the search for schedules comes to the best there is, and how far it gets beyond the zoo,
over random costs.

Stages differ in every cost, up to three times from the cheapest to the dearest; a hop takes up to a
third of a mean forward.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.synthesis.synthesise import Settings, Synthesis, synthesise

#: Stages, micro-batches, placement, and what a rank may hold (micro-batches over all its stages;
#: None for no limit).
CASES = [
    (4, 6, "linear", 4), (4, 6, "linear", 2), (4, 6, "v", 4), (4, 6, "interleaved", 4), (4, 6, "bidirectional", 3),
    (8, 16, "linear", None), (8, 16, "linear", 8), (8, 16, "linear", 4), (8, 16, "v", 8), (8, 16, "v", 4),
    (8, 16, "interleaved", 8), (8, 16, "bidirectional", 8), (8, 16, "bidirectional", 4),
    (16, 64, "linear", 16), (16, 64, "linear", 8), (32, 64, "v", 32), (32, 64, "v", 16), (16, 64, "bidirectional", 16),
]  # fmt: skip
#: Ops up to which the optimum is computed too.
PROVED_OPS = 80


def costs_of(stages: int, seed: int) -> ps.Costs:
    """Random costs in seconds, to the millisecond."""
    luck = np.random.default_rng(seed)

    def row(low: float, high: float, count: int) -> list[float]:
        return [round(float(number), 3) for number in luck.uniform(low, high, count)]

    return ps.Costs(
        forward=row(0.5, 1.5, stages),
        input_grad=row(0.5, 1.5, stages),
        weight_grad=row(0.5, 1.5, stages),
        transfer=row(0, 0.33, stages - 1),
    )


def timed(costs: ps.Costs, micro_batches: int, settings: Settings) -> tuple[Synthesis, float]:
    """What was found, and the seconds it took."""
    start = time.perf_counter()
    synthesised = synthesise(costs, micro_batches, settings)
    return synthesised, time.perf_counter() - start


def measure(
    case: tuple[int, int, str, int | None], seeds: int, budget_s: float
) -> dict[str, object]:
    """One row: medians, and the worst, over the seeds."""
    stages, micro_batches, placement, limit = case
    rows, over_optimum = [], []
    for seed in range(seeds):
        costs = costs_of(stages, seed)
        synthesised, took = timed(
            costs,
            micro_batches,
            Settings(placement=placement, memory_limit=limit, budget_s=budget_s),
        )
        ps.verify(synthesised.schedule)
        rows.append(
            (
                synthesised.gap,
                1 - synthesised.makespan / synthesised.zoo_makespan
                if synthesised.zoo_makespan
                else math.nan,
                took,
                synthesised.zoo,
            )
        )
        if 3 * stages * micro_batches <= PROVED_OPS:
            best, _ = timed(
                costs,
                micro_batches,
                Settings(placement=placement, memory_limit=limit, budget_s=60, exact=True),
            )
            over_optimum.append(
                synthesised.makespan / best.makespan - 1 if best.proved else math.nan
            )
    gaps, gains, seconds, names = zip(*rows, strict=True)
    finite_gains = [gain for gain in gains if not math.isnan(gain)]
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "placement": placement,
        "limit": limit,
        "gap_median": round(statistics.median(gaps), 5),
        "gap_max": round(max(gaps), 5),
        "gain_over_zoo_median": round(statistics.median(finite_gains), 5) if finite_gains else None,
        "zoo": sorted({name for name in names if name}),
        "seconds_max": round(max(seconds), 2),
        "over_optimum_max": round(max(over_optimum), 6) if over_optimum else None,
    }


def main() -> None:
    """Print a table, write results.json."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seeds", type=int, default=5)
    words.add_argument("--budget", type=float, default=5.0)
    words.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = words.parse_args()
    synthesise(costs_of(4, 0), 4, Settings(max_rounds=3))  # compile
    print(
        f"{'S':>3} {'M':>3} {'placement':13} {'limit':>5} {'gap':>7} {'worst':>7} {'gain':>7} {'over optimum':>12} {'s':>5}  zoo's best"
    )
    results = []
    for case in CASES:
        row = measure(case, arguments.seeds, arguments.budget)
        results.append(row)
        gain = "" if row["gain_over_zoo_median"] is None else f"{row['gain_over_zoo_median']:.2%}"
        over = "" if row["over_optimum_max"] is None else f"{row['over_optimum_max']:.2%}"
        print(
            f"{case[0]:3} {case[1]:3} {case[2]:13} {case[3] or '-':>5} {row['gap_median']:7.2%} {row['gap_max']:7.2%} {gain:>7} "
            f"{over:>12} {row['seconds_max']:5.1f}  {', '.join(row['zoo']) or 'none fits'}",
            flush=True,
        )
    machine = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "budget_s": arguments.budget,
        "seeds": arguments.seeds,
    }
    arguments.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
