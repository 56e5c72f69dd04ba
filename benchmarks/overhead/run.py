"""What safety costs per step: checks of losses and gradients, and asynchronous checkpoints.

    OMP_NUM_THREADS=1 python benchmarks/overhead/run.py

Variants take turns in one process per rank, block by block. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.measure.profiler import machine_facts
from penstock.training.config import TrainConfig
from penstock.training.task import make_task

HERE = Path(__file__).parent
RANKS, MICRO_BATCHES = 2, 4

#: A step of some hundred milliseconds, and one of some milliseconds, where fixed costs show.
MODELS = {
    "vgg11_bn": TrainConfig(model="vgg11_bn", batch=64),
    "gpt": TrainConfig(
        model="gpt",
        model_options={"layers": 4, "width": 128, "heads": 4},
        data="text",
        tokens=64,
        batch=32,
    ),
    "mlp": TrainConfig(model="mlp", image=8, channels=1, batch=64),
}

#: Seconds between two checkpoints: far more often than a run would, which makes the cost visible.
SAVE_EVERY_S = 10.0


@dataclass(frozen=True)
class Cost:
    """The cost of one variant of one model.

    Attributes:
        model, variant: their names.
        step_s: median seconds of a step without the variant.
        extra_percent: median over blocks of the further time per step, in percent of it.
        lowest_percent, highest_percent: the quartiles of the blocks.
        blocks: number of pairs of blocks.
        saves: checkpoints that were written in the blocks of the variant.
    """

    model: str
    variant: str
    step_s: float
    extra_percent: float
    lowest_percent: float
    highest_percent: float
    blocks: int
    saves: int = 0


def set_checks(pipe: ps.Pipeline, checks: dict[int, object]) -> None:
    """Replace the checks of the ranks of this process."""
    for rank, interpreter in pipe._assembly.interpreters.items():
        interpreter.finite = checks.get(rank)  # type: ignore[assignment]


def steps(
    pipe: ps.Pipeline, batch: tuple[Tensor, Tensor], seconds: float, saver: ps.Checkpoints | None
) -> tuple[float, int]:
    """Train for some time.

    Returns:
        Seconds per step, and the number of checkpoints that were begun.
    """
    x, y = batch
    count, saves, started = 0, 0, time.perf_counter()
    # All ranks have to make the same number of steps: rank 0's clock counts.
    number = max(1, math.ceil(seconds / _probe(pipe, batch)))
    started = time.perf_counter()
    for index in range(number):
        pipe.train_batch(x, y)
        count += 1
        if saver is not None:
            if index == 0:
                saver.save(pipe)
                saves += 1
            saver.step(pipe)
    return (time.perf_counter() - started) / count, saves


def _probe(pipe: ps.Pipeline, batch: tuple[Tensor, Tensor]) -> float:
    """Return the seconds of a step on rank 0, on all ranks."""
    x, y = batch
    started = time.perf_counter()
    pipe.train_batch(x, y)
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    return float(pipe._world.broadcast(seconds, 0))


def measure(name: str, blocks: int, folder: str) -> list[Cost]:
    """Measure both variants of a model, on a rank."""
    config = MODELS[name]
    task = make_task(config)
    batch = next(iter(task.epoch(config, 0)))
    profile = ps.analytic(task.model, task.example(), device="V100", batch=config.batch)
    pipe = ps.Pipeline(
        task.model,
        loss=task.loss,
        balance=ps.partition(profile, stages=RANKS),
        schedule="1f1b",
        micro_batches=MICRO_BATCHES,
        optimizer=_adamw,
    )
    checks = {rank: one.finite for rank, one in pipe._assembly.interpreters.items()}
    steps(pipe, batch, 2.0, None)
    costs = []
    for variant in ("on_nonfinite", "checkpoint"):
        plain, ratios, saves = [], [], 0
        for block in range(blocks):
            with ps.Checkpoints(Path(folder) / name / str(block), keep=1) as checkpoints:
                set_checks(pipe, {} if variant == "on_nonfinite" else dict(checks))
                seconds = 2.0 if variant == "on_nonfinite" else SAVE_EVERY_S
                without_s, _ = steps(pipe, batch, seconds, None)
                set_checks(pipe, dict(checks))
                saver = checkpoints if variant == "checkpoint" else None
                with_s, count = steps(pipe, batch, seconds, saver)
                saves += count
                if saver is not None:
                    saver.finish(pipe)
            plain.append(without_s)
            ratios.append(100.0 * (with_s / without_s - 1.0))
        low, middle, high = statistics.quantiles(ratios, n=4)
        costs.append(
            Cost(name, variant, statistics.median(plain), middle, low, high, blocks, saves)
        )
    pipe.close()
    return costs


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer whose state is twice the weights. The rate keeps the losses finite."""
    return torch.optim.AdamW(parameters, lr=1e-6)


def main() -> int:
    """Measure, print a line each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=5, help="pairs of blocks per variant")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    costs: list[Cost] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            costs += ps.launch(measure, RANKS, name, arguments.blocks, folder, threads=1)[0]
        for cost in costs[-2:]:
            print(
                f"{cost.model:10} {cost.variant:12} step {1e3 * cost.step_s:8.2f} ms  "
                f"{cost.extra_percent:+.2f} % ({cost.lowest_percent:+.2f} to "
                f"{cost.highest_percent:+.2f})",
                flush=True,
            )
    results = {
        "machine": {**machine_facts(torch.device("cpu")), "torch": torch.__version__},
        "save_every_s": SAVE_EVERY_S,
        "costs": [asdict(cost) for cost in costs],
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
