"""Steps of Penstock beside those of pipelines that are written by hand, where overhead is most of
the step: 8 linear layers of width 64 on 2 ranks.

    OMP_NUM_THREADS=1 python benchmarks/floors/run.py

All systems take turns in the same two processes. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.measure.profiler import machine_facts
from penstock.peers.job import Job
from penstock.peers.setup import RankSpec, Setup
from penstock.peers.systems import floors
from penstock.runtime.pipeline import Pipeline

HERE = Path(__file__).parent
RANKS, LAYERS, WIDTH, BATCH, MICRO_BATCHES = 2, 8, 64, 64, 16

#: By schedule, the pipeline that is written by hand.
FLOORS = {"1f1b": floors.shared_memory_1f1b, "gpipe": floors.shared_memory}

#: Steps of a system in a row: about 0.2 s, long beside what the change of systems disturbs.
STEPS = 40


def job_of(schedule: str, rank: int, folder: str) -> Job:
    """Return the part of the workload that one rank has.

    Args:
        schedule: the schedule.
        rank: the rank.
        folder: a folder that all ranks share.
    """
    sizes = {"layers": LAYERS, "features": WIDTH, "hidden": WIDTH, "classes": WIDTH}
    setup = Setup(
        model="mlp",
        model_options=sizes,
        data="random",
        batch=BATCH,
        stages=RANKS,
        micro_batches=MICRO_BATCHES,
        lengths=(LAYERS // 2, LAYERS // 2),
        schedule=schedule,
        momentum=0.0,
    )
    # The port belongs to systems that start their own group of processes.
    return Job(RankSpec("", setup, rank, RANKS, threads=1, port=0, folder=folder))


def pipeline(job: Job, *, checks: bool) -> Pipeline:
    """Return a pipeline with the weights and the cut of a job.

    Args:
        job: the job.
        checks: whether losses and gradients are checked. Users cannot turn the checks off: this
            shows what they cost.
    """
    setup = job.setup
    pipe = ps.Pipeline(
        torch.nn.Sequential(*job.layers()),
        loss=job.loss,
        optimizer=job.optimizer,
        balance=setup.lengths,
        schedule=setup.schedule,
        micro_batches=setup.micro_batches,
    )
    if not checks:
        for interpreter in pipe._assembly.interpreters.values():
            interpreter.finite = None
    return pipe


@contextmanager
def systems_of_rank(folder: str) -> Iterator[dict[str, Any]]:
    """Make all systems on this rank; close them afterwards."""
    rank = int(os.environ["RANK"])
    pipelines = []
    systems: dict[str, Any] = {}
    for schedule, make_floor in FLOORS.items():
        subfolder = Path(folder) / schedule
        subfolder.mkdir(exist_ok=True)
        systems[f"floor {schedule}"] = make_floor(job_of(schedule, rank, str(subfolder)))
        for name, checks in (("", True), (" without checks", False)):
            pipe = pipeline(job_of(schedule, rank, folder), checks=checks)
            pipelines.append(pipe)
            systems[f"penstock {schedule}{name}"] = pipe.train_batch
    try:
        yield systems
    finally:
        for pipe in pipelines:
            pipe.close()


def measure(rounds: int, folder: str) -> dict[str, list[float]]:
    """Return, by system, seconds per step in every round, on one rank."""
    torch.manual_seed(0)
    seconds: dict[str, list[float]] = {}
    with systems_of_rank(folder) as systems:
        x, y = job_of("1f1b", 0, folder).workload.first_batch()
        # Penstock observes its layers in steps 1, 2, 4, 8, ...: past 64, none falls into a block
        # of the first rounds but one.
        for step in systems.values():
            for _ in range(70):
                step(x, y)
        for number in range(rounds):
            # The order changes, so that no system always follows the same one.
            names = list(systems)
            start = number % len(names)
            for name in names[start:] + names[:start]:
                step = systems[name]
                step(x, y)
                times = []
                for _ in range(STEPS):
                    started = time.perf_counter()
                    step(x, y)
                    times.append(time.perf_counter() - started)
                seconds.setdefault(name, []).append(statistics.median(times))
    return seconds


def ratio_row(times: list[float], floor: list[float]) -> dict[str, float]:
    """Return the median step, and the quartiles of the ratios to the floor of the same round."""
    ratios = [step_s / floor_s for step_s, floor_s in zip(times, floor, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"step_s": statistics.median(times), "ratio": middle, "low": low, "high": high}


def main() -> int:
    """Measure, print a line for each system, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of all systems")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = ps.launch(measure, RANKS, arguments.rounds, folder, threads=1)[0]
    rows = {}
    for name, times in seconds.items():
        row = rows[name] = ratio_row(times, seconds[f"floor {name.split()[1]}"])
        print(
            f"{name:32} {1e3 * row['step_s']:7.3f} ms  {row['ratio']:.3f} of the floor "
            f"({row['low']:.3f} to {row['high']:.3f})"
        )
    results = {
        "machine": {**machine_facts(torch.device("cpu")), "torch": torch.__version__},
        "rounds": arguments.rounds,
        "systems": rows,
    }
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
