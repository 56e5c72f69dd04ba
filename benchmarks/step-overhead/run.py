"""Milliseconds per training step beside torch.distributed.pipelining, at the same work, in the same processes, in turn.

The workloads of the project's comparisons: an MLP that is almost nothing but overhead, and a small GPT. Every rank has one
thread; both systems run over gloo, on the same cut, with the same optimizer.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import penstock as ps
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

Step = Callable[[], None]


def workload(name: str) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor, Callable[..., torch.Tensor]]:
    """Model, inputs, targets and loss; the same on every rank."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(*layers), torch.randn(64, 64), torch.randn(64, 64), nn.functional.mse_loss
    made = zoo_model("gpt", layers=4, width=128, heads=4, tokens=64, vocabulary=256)
    return made, torch.randint(0, 256, (16, 64)), torch.randint(0, 256, (16, 64)), gpt_loss


def penstock_step(name: str, schedule: str, lengths: list[int], micro_batches: int) -> Step:
    """A training step of ours."""
    model, x, y, loss = workload(name)
    pipe = ps.Pipeline(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), balance=lengths,
                       schedule=schedule, micro_batches=micro_batches)  # fmt: skip
    return lambda: pipe.train_batch(x, y) and None


def torch_step(name: str, schedule: str, lengths: list[int], micro_batches: int) -> Step:
    """A training step of torch.distributed.pipelining, as its documentation writes it."""
    model, x, y, loss = workload(name)
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = list(ps.chain(model).modules)
    start = sum(lengths[:rank])
    part = nn.Sequential(*flat[start : start + lengths[rank]])
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    runner = kind(stage, n_microbatches=micro_batches, loss_fn=loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)

    def step() -> None:
        if rank == 0:
            runner.step(x)
        elif rank == world - 1:
            runner.step(target=y, losses=[])
        else:
            runner.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, stages: int, micro_batches: int, rounds: int, steps: int, ahead: list[int]) -> dict[str, list[float]]:
    """Milliseconds per step of each system, by round; on every rank. `ahead` has more ways to post receives to compare."""
    import gc

    from penstock.runtime import player
    from penstock.runtime.processes import join

    join()
    layers = len(ps.chain(workload(name)[0]))
    lengths = [layers // stages + (s < layers % stages) for s in range(stages)]
    makers = {"penstock": penstock_step, "torch": torch_step}
    systems = {f"{who} {schedule}": make(name, schedule, lengths, micro_batches)
               for schedule in ("1f1b", "gpipe") for who, make in makers.items()}  # fmt: skip
    for ops in ahead:
        player.AHEAD = ops
        systems[f"penstock 1f1b, ahead {ops}"] = penstock_step(name, "1f1b", lengths, micro_batches)
        systems[f"penstock 1f1b, ahead {ops}"]()  # programs are lowered at the first step
    times: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system, step in systems.items():
            for _ in range(2):
                step()
            dist.barrier()
            gc.collect()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            dist.barrier()
            times[system].append((time.perf_counter() - start) / steps * 1e3)
    return times


def main() -> None:
    """Print a table, write results.json."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=9)
    words.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    words.add_argument("--ahead", default="", help="compare receives posted so many ops early too, such as 0,1,2,4")
    given = words.parse_args()
    ahead = [int(ops) for ops in given.ahead.split(",") if ops]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, stages, micro_batches, steps in (("mlp", 2, 16, 20), ("mlp", 4, 16, 10), ("gpt", 2, 4, 3), ("gpt", 2, 8, 3)):
        by_system = ps.launch(measure, stages, name, stages, micro_batches, given.rounds, steps, ahead, threads=1)[0]
        case = f"{name} S={stages} M={micro_batches}"
        results[case] = {system: {"median_ms": round(statistics.median(times), 3), "min_ms": round(min(times), 3),
                                  "max_ms": round(max(times), 3)} for system, times in by_system.items()}  # fmt: skip
        for schedule in ("1f1b", "gpipe"):
            pairs = zip(by_system[f"penstock {schedule}"], by_system[f"torch {schedule}"], strict=True)
            results[case][f"penstock / torch {schedule}"] = {
                "median_ratio": round(statistics.median(a / b for a, b in pairs), 3)
            }
        print(case)
        for system, row in results[case].items():
            print(f"  {system:24} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    machine = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    given.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
