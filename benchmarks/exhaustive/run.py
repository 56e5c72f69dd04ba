"""Is the chosen plan really the best? Every cut into two stages and every number of micro-batches,
run for real, beside what `ps.plan` chose.

The plan is made first, from a profile alone. Then 1F1B and GPipe run in every cut and with every
number of micro-batches, in two processes with one thread each, over gloo. The best of that many noisy
medians is partly luck, so the fastest few and the chosen one run once more, in turn, and those
times count.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.measure.link import measure_link
from penstock.measure.profiler import machine_facts
from penstock.profile.profile import Profile
from penstock.ranks.process_world import join
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

RANKS = 2
SCHEDULES = ("1f1b", "gpipe")
MICRO_BATCHES = (1, 2, 4, 8, 16)
#: How many of the fastest run again beside the chosen one.
FINALISTS = 5

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Way(NamedTuple):
    """A cut, a schedule and a number of micro-batches."""

    lengths: tuple[int, ...]
    schedule: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.lengths[0]} + {self.lengths[1]} layers, {self.schedule}, {self.micro_batches} micro-batches"


def workload(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
    """Model, a batch and its loss; the same on every rank."""
    torch.manual_seed(0)
    if name == "gpt":
        network = zoo_model("gpt", layers=5, width=128, heads=4, tokens=64, vocabulary=256)
        return network, torch.randint(0, 256, (16, 64)), torch.randint(0, 256, (16, 64)), gpt_loss
    # Layers that differ, as the cut has to find the middle of the work and not of the list.
    widths = (256, 512, 1024, 1024, 512, 256, 128)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return (
        nn.Sequential(*layers),
        torch.randn(512, 256),
        torch.randn(512, 128),
        nn.functional.mse_loss,
    )


def measured_profile(name: str) -> Profile:
    """On every rank, the profile of a model."""
    network, x, y, loss = workload(name)
    return ps.profile(network, x, threads=1, loss=loss, targets=y, together=True, repeats=9)


def pipeline(name: str, way: Way) -> tuple[ps.Pipeline, torch.Tensor, torch.Tensor]:
    """It, warmed up, and a batch for it."""
    network, x, y, loss = workload(name)
    pipe = ps.Pipeline(
        network,
        loss=loss,
        balance=way.lengths,
        schedule=way.schedule,
        micro_batches=way.micro_batches,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    )
    for _ in range(3):
        pipe.train_batch(x, y)
    return pipe, x, y


def seconds(pipe: ps.Pipeline, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[float]:
    """Of some steps, as a training loop sees them."""
    times = []
    gc.collect()
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        pipe.train_batch(x, y)
        times.append(time.perf_counter() - start)
    return times


def measure(
    name: str, ways: list[Way], chosen: Way, steps: int
) -> tuple[dict[Way, float], dict[Way, float]]:
    """Medians of all ways, and of the finalists in their second run."""
    join()
    first: dict[Way, float] = {}
    for way in ways:
        pipe, x, y = pipeline(name, way)
        first[way] = statistics.median(seconds(pipe, x, y, steps))
        pipe.close()
    first_times = torch.tensor([first[way] for way in ways], dtype=torch.float64)
    dist.broadcast(first_times, 0)  # all ranks must agree on who is in the final
    first = dict(zip(ways, first_times.tolist(), strict=True))
    finalists = list(dict.fromkeys([*sorted(ways, key=first.__getitem__)[:FINALISTS], chosen]))
    pipes = {way: pipeline(name, way) for way in finalists}
    again: dict[Way, list[float]] = {way: [] for way in finalists}
    for _ in range(5):
        for way, network in pipes.items():
            again[way] += seconds(*network, steps)
    return first, {way: statistics.median(times) for way, times in again.items()}


def compare(name: str, on: Cluster, steps: int) -> dict[str, object]:
    """Plan, run everything, and say how far the plan is from the best."""
    profile = ps.launch(measured_profile, RANKS, name, threads=1)[0]
    plan = ps.plan(
        profile,
        on,
        profile.batch,
        schedules=SCHEDULES,
        stages=RANKS,
        recompute="never",
        max_replicas=1,
    )
    chosen = Way(plan.lengths, plan.schedule_name, plan.micro_batches)
    layers = len(profile)
    ways = [
        Way((cut, layers - cut), schedule, count)
        for cut in range(1, layers)
        for count in MICRO_BATCHES
        for schedule in SCHEDULES
        if count > 1 or schedule == "1f1b"
    ]
    if chosen not in ways:
        ways.append(chosen)
    first, final = ps.launch(measure, RANKS, name, ways, chosen, steps, threads=1)[0]
    best = min(final, key=final.__getitem__)
    result: dict[str, object] = {
        "ways": len(ways),
        "chosen": str(chosen),
        "chosen_predicted_ms": round(plan.predicted.step_s * 1e3, 2),
        "chosen_ms": round(final[chosen] * 1e3, 2),
        "best": str(best),
        "best_ms": round(final[best] * 1e3, 2),
        "chosen_to_best": round(final[chosen] / final[best], 4),
        "median_way_ms": round(statistics.median(first.values()) * 1e3, 2),
        "worst_way_ms": round(max(first.values()) * 1e3, 2),
    }
    for key, value in result.items():
        print(f"  {key:20} {value}", flush=True)
    result["final_ms"] = {
        str(way): round(seconds * 1e3, 2)
        for way, seconds in sorted(final.items(), key=lambda pair: pair[1])
    }
    result["all_ms"] = {str(way): round(seconds * 1e3, 2) for way, seconds in first.items()}
    return result


def main() -> None:
    """Print what was found, write results.json."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=7, help="timed steps of each way")
    words.add_argument("--models", default="mlp,gpt")
    words.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = words.parse_args()
    started = time.perf_counter()

    def link() -> Link:
        join()
        return measure_link()

    on = ps.cluster(f"local:{RANKS}").with_links(inside=ps.launch(link, RANKS, threads=1)[0])
    print(on)
    results = {}
    for name in arguments.models.split(","):
        print(name)
        results[name] = compare(name, on, arguments.steps)
    machine = {
        **machine_facts(torch.device("cpu")),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "link": str(on.inside),
    }
    minutes_taken = round(time.perf_counter() - started, 1)
    arguments.out.write_text(
        json.dumps({"machine": machine, "seconds": minutes_taken, "results": results}, indent=1)
        + "\n"
    )
    print(f"{minutes_taken} s")


if __name__ == "__main__":
    main()
