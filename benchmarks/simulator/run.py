"""How fast the simulator is: ops per second of one schedule, first and again; of many cost vectors
at once; the largest; a cold start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.compiled import compiled
from penstock.schedule.catalogue import schedule
from penstock.schedule.kernels import order_ops, time_ops, time_ops_contended, time_vectors
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.entry import simulate
from penstock.simulate.sweep import simulate_many

SIZES = [
    ("1f1b", 16, 64),
    ("1f1b", 64, 512),
    ("zb-h1", 64, 512),
    ("interleaved", 64, 256),
    ("1f1b", 256, 1024),
    ("1f1b", 512, 2048),
]
BATCHES = [
    ("1f1b", 8, 32, 5000),
    ("1f1b", 16, 64, 2000),
    ("zb-h1", 16, 64, 2000),
    ("1f1b", 64, 256, 200),
]
LARGEST = (1024, 4096)

Row = dict[str, float | int | str]


def seconds_of(action: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def ops_of(program: Schedule) -> int:
    """Number of ops."""
    return sum(map(len, program.programs))


def anew(program: Schedule) -> Schedule:
    """The same schedule with nothing kept of earlier simulations."""
    return Schedule(program.programs, program.name)


def one_schedule(name: str, stages: int, micro_batches: int, rounds: int) -> Row:
    """First call on a new Schedule (conversion and structure), further calls, and calls that read
    every figure.
    """
    program = schedule(name, stages, micro_batches)
    rng = np.random.default_rng(0)
    costs = Costs(
        forward=rng.random(program.stages), backward=rng.random(program.stages), transfer=0.1
    )
    ops = ops_of(program)
    simulate(program, costs)
    first = [
        seconds_of(lambda: simulate(anew(program), costs).makespan)
        for _ in range(max(rounds // 3, 1))
    ]
    again = [seconds_of(lambda: simulate(program, costs).makespan) for _ in range(rounds)]

    def figures() -> None:
        line = simulate(program, costs)
        _ = line.makespan, line.bubble_ratio, line.span_bubble_ratio, line.peak_in_flight

    reading = [seconds_of(figures) for _ in range(rounds)]
    return {
        "schedule": f"{name} {stages} x {micro_batches}",
        "ops": ops,
        "first_ms": 1e3 * statistics.median(first),
        "again_ms": 1e3 * statistics.median(again),
        "first_mops_per_s": ops / statistics.median(first) / 1e6,
        "mops_per_s": ops / statistics.median(again) / 1e6,
        "with_all_figures_mops_per_s": ops / statistics.median(reading) / 1e6,
    }


def many_vectors(name: str, stages: int, micro_batches: int, vectors: int, rounds: int) -> Row:
    """Vectors per second: one by one, as a list of Costs, as arrays."""
    program = schedule(name, stages, micro_batches)
    rng = np.random.default_rng(0)
    arrays = {
        "forward": rng.random((vectors, program.stages)),
        "backward": rng.random((vectors, program.stages)),
        "transfer": rng.random((vectors, program.stages - 1)),
    }
    costs = []
    for i in range(vectors):
        costs.append(Costs(**{field: array[i] for field, array in arrays.items()}))
    simulate_many(program, arrays)

    def simulate_one_by_one() -> list[float]:
        """Simulate every vector by a call of its own."""
        return [simulate(program, vector).makespan for vector in costs]

    alone = [seconds_of(simulate_one_by_one) for _ in range(max(rounds // 3, 1))]
    listed = [seconds_of(lambda: simulate_many(program, costs)) for _ in range(rounds)]
    stacked = [seconds_of(lambda: simulate_many(program, arrays)) for _ in range(rounds)]
    medians = [statistics.median(times) for times in (alone, listed, stacked)]
    return {
        "schedule": f"{name} {stages} x {micro_batches}",
        "ops": ops_of(program),
        "vectors": vectors,
        "one_by_one_per_s": vectors / medians[0],
        "list_per_s": vectors / medians[1],
        "arrays_per_s": vectors / medians[2],
        "arrays_mops_per_s": ops_of(program) * vectors / medians[2] / 1e6,
        "speed_up": medians[0] / medians[2],
    }


def largest(stages: int, micro_batches: int) -> Row:
    """In this process: time and memory of 1F1B at full size; Numba's loops are on disk already."""
    begin = time.perf_counter()
    program = schedule("1f1b", stages, micro_batches)
    built = time.perf_counter() - begin
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    costs = Costs(forward=1, transfer=0.1)
    first = seconds_of(lambda: simulate(program, costs).makespan)
    again = statistics.median(
        seconds_of(lambda: simulate(program, costs).makespan) for _ in range(5)
    )
    ops = ops_of(program)
    return {
        "schedule": f"1f1b {stages} x {micro_batches}",
        "ops": ops,
        "schedule_s": built,
        "schedule_gib": held / 2**30,
        "first_s": first,
        "again_s": again,
        "first_mops_per_s": ops / first / 1e6,
        "mops_per_s": ops / again / 1e6,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30,
    }


def cold_start() -> dict[str, float]:
    """Seconds of `penstock simulate` in a fresh process, with an empty cache of Numba's."""
    medians = {}
    for stages, micro_batches in ((4, 8), (16, 64), (64, 256)):
        words = [
            sys.executable,
            "-m",
            "penstock",
            "simulate",
            "--schedule",
            "1f1b",
            "--stages",
            str(stages),
            "--micro-batches",
            str(micro_batches),
            "--json",
        ]
        times = []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as empty:
                environment = {**os.environ, "NUMBA_CACHE_DIR": empty}
                times.append(
                    seconds_of(
                        lambda: subprocess.run(
                            words,  # noqa: B023
                            check=True,
                            capture_output=True,
                            env=environment,  # noqa: B023
                        )
                    )
                )
        medians[f"{stages} x {micro_batches}"] = statistics.median(times)
    return medians


def table(rows: list[Row]) -> None:
    """Print rows under their names."""
    names = list(rows[0])
    cells = [names]
    for row in rows:
        values = [row[name] for name in names]
        cells.append(
            [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def main() -> None:
    """Print all medians and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--largest-only",
        action="store_true",
        help="only the largest, as JSON: run so by this script itself",
    )
    chosen = parser.parse_args()
    if chosen.largest_only:
        print(json.dumps(largest(*LARGEST)))
        return
    for kernel in (order_ops, time_ops, time_ops_contended, time_vectors):
        compiled(kernel)
    singles = [one_schedule(*size, chosen.rounds) for size in SIZES]
    table(singles)
    batches = [many_vectors(*batch, chosen.rounds) for batch in BATCHES]
    table(batches)
    ran = subprocess.run(
        [sys.executable, __file__, "--largest-only"], check=True, capture_output=True, text=True
    )
    most = json.loads(ran.stdout)
    table([most])
    start = cold_start()
    print(
        "cold start of `penstock simulate`, seconds:",
        ", ".join(f"{size} {seconds:.2f}" for size, seconds in start.items()),
    )
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    results = {
        "machine": machine,
        "one_schedule": singles,
        "many_vectors": batches,
        "largest": most,
        "cold_start_s": start,
    }
    Path(__file__).with_name("results.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
