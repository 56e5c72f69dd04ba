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
from penstock.checkpoint.save_job import _Background
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

VARIANTS = ("on_nonfinite", "checkpoint")


@dataclass(frozen=True)
class Cost:
    """The cost of one variant of one model.

    Attributes:
        model, variant: their names.
        step_s: median seconds of a step without the variant.
        extra_percent: median over blocks of the further time per step, in percent of it.
        lowest_percent, highest_percent: the quartiles of the blocks.
        cpu_percent: median over blocks of the further CPU seconds of all ranks per step, until the
            checkpoint is complete, in percent; other work on the machine hardly changes it.
        cpu_lowest_percent, cpu_highest_percent: its quartiles.
        blocks: number of pairs of blocks.
        saves: checkpoints that were written in the blocks of the variant.
        stop_ms: median over checkpoints of the milliseconds for which training stood still while
            the state was copied, on the rank where they were most.
        training_cpu_ms: median over blocks of the CPU milliseconds that the thread that trains
            spent in `Checkpoints`, per rank and checkpoint: the copy, and what the ranks agree on
            after steps. Neither these nor the next ones depend on other work on the machine as
            seconds do.
        writer_cpu_ms: likewise, of the threads that write.
    """

    model: str
    variant: str
    step_s: float
    extra_percent: float
    lowest_percent: float
    highest_percent: float
    cpu_percent: float
    cpu_lowest_percent: float
    cpu_highest_percent: float
    blocks: int
    saves: int = 0
    stop_ms: float = 0.0
    training_cpu_ms: float = 0.0
    writer_cpu_ms: float = 0.0

    def percent_every(self, seconds: float, *, idle_core: bool) -> float:
        """Return what checkpoints at an interval cost, in percent of the time of training.

        Args:
            seconds: between two checkpoints.
            idle_core: whether a core is free for the threads that write; else they take their time
                from the ranks.
        """
        cost_ms = self.training_cpu_ms + (0.0 if idle_core else self.writer_cpu_ms)
        return 0.1 * cost_ms / seconds


@dataclass(frozen=True)
class Block:
    """Steps with or without a variant, on a rank.

    Attributes:
        step_s: seconds per step.
        cpu_s: CPU seconds of this process per step, with those of the checkpoint's thread.
        saves: checkpoints that were written.
        stop_s: seconds in which the state was copied.
        training_cpu_s: CPU seconds of the thread that trains, in `Checkpoints`.
        writer_cpu_s: CPU seconds of the threads that write.
    """

    step_s: float
    cpu_s: float
    saves: int
    stop_s: float
    training_cpu_s: float
    writer_cpu_s: float


class WriterClock:
    """The CPU seconds of all threads of this process that write checkpoints, from now on."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        run = _Background._run

        def timed(background: _Background) -> None:
            """Run the jobs of a thread, and add up its CPU time."""
            run(background)
            self.cpu_s += time.thread_time()

        _Background._run = timed  # type: ignore[method-assign]


def set_checks(pipe: ps.Pipeline, checks: dict[int, object]) -> None:
    """Replace the checks of the ranks of this process."""
    for rank, interpreter in pipe._assembly.interpreters.items():
        interpreter.finite = checks.get(rank)  # type: ignore[assignment]


def steps(
    pipe: ps.Pipeline,
    batch: tuple[Tensor, Tensor],
    number: int,
    saver: ps.Checkpoints | None = None,
    writers: WriterClock | None = None,
) -> Block:
    """Train a number of steps; with a saver, a checkpoint begins after the first one."""
    x, y = batch
    saves, stop_s, training_s = 0, 0.0, 0.0
    written_s = 0.0 if writers is None else writers.cpu_s
    cpu_s, started = time.process_time(), time.perf_counter()
    for index in range(number):
        pipe.train_batch(x, y)
        if saver is not None:
            thread_s = time.thread_time()
            if index == 0:
                stopped = time.perf_counter()
                saver.save(pipe)
                stop_s += time.perf_counter() - stopped
                saves += 1
            saver.step(pipe)
            training_s += time.thread_time() - thread_s
    step_s = (time.perf_counter() - started) / number
    if saver is not None:
        saver._complete()  # `finish` would write another checkpoint, of the last step
    written_s = 0.0 if writers is None else writers.cpu_s - written_s
    cpu_s = time.process_time() - cpu_s
    return Block(step_s, cpu_s / number, saves, stop_s, training_s, written_s)


def steps_of(pipe: ps.Pipeline, batch: tuple[Tensor, Tensor], seconds: float) -> int:
    """Return how many steps take some seconds by rank 0's clock, the same on all ranks."""
    trained = steps(pipe, batch, 3)
    number = torch.tensor(max(2.0, math.ceil(seconds / trained.step_s)), dtype=torch.float64)
    return int(pipe._world.broadcast(number, 0))


def pairs_of(
    variant: str,
    pipe: ps.Pipeline,
    batch: tuple[Tensor, Tensor],
    blocks: int,
    folder: Path,
    writers: WriterClock,
) -> list[tuple[Block, Block]]:
    """Return pairs of neighbouring blocks, without and with a variant, that take turns in front."""
    checks = {rank: one.finite for rank, one in pipe._assembly.interpreters.items()}
    number = steps_of(pipe, batch, 2.0 if variant == "on_nonfinite" else SAVE_EVERY_S)
    pairs = []
    for block in range(blocks):
        pair: dict[bool, Block] = {}
        for present in (block % 2 == 1, block % 2 == 0):
            set_checks(pipe, dict(checks) if present or variant == "checkpoint" else {})
            saver = ps.Checkpoints(folder / str(block), keep=1) if variant == "checkpoint" else None
            pair[present] = steps(pipe, batch, number, saver if present else None, writers)
        pairs.append((pair[False], pair[True]))
    set_checks(pipe, dict(checks))
    return pairs


def measure(
    name: str, variants: list[str], blocks: int, folder: str
) -> dict[str, list[tuple[Block, Block]]]:
    """Measure variants of a model, on a rank. Returns the pairs of blocks by variant."""
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
    steps_of(pipe, batch, 1.0)  # the first steps warm up
    results, writers = {}, WriterClock()
    for variant in variants:
        results[variant] = pairs_of(variant, pipe, batch, blocks, Path(folder) / name, writers)
    pipe.close()
    return results


def cost_of(name: str, variant: str, ranks: list[list[tuple[Block, Block]]]) -> Cost:
    """Combine the pairs of blocks of all ranks."""
    extra = [100.0 * (present.step_s / plain.step_s - 1.0) for plain, present in ranks[0]]
    cpu = []
    for pairs in zip(*ranks, strict=True):
        plain_s = sum(plain.cpu_s for plain, _ in pairs)
        cpu.append(100.0 * (sum(present.cpu_s for _, present in pairs) / plain_s - 1.0))
    low, middle, high = statistics.quantiles(extra, n=4)
    cpu_low, cpu_middle, cpu_high = statistics.quantiles(cpu, n=4)
    blocks = [[present for _, present in pairs] for pairs in zip(*ranks, strict=True)]
    stops = [max(block.stop_s for block in of_ranks) for of_ranks in blocks]
    trained = [statistics.mean(block.training_cpu_s for block in of_ranks) for of_ranks in blocks]
    written = [statistics.mean(block.writer_cpu_s for block in of_ranks) for of_ranks in blocks]
    return Cost(
        *(name, variant, statistics.median(plain.step_s for plain, _ in ranks[0])),
        *(middle, low, high, cpu_middle, cpu_low, cpu_high),
        blocks=len(extra),
        saves=sum(present.saves for _, present in ranks[0]),
        stop_ms=1e3 * statistics.median(stops),
        training_cpu_ms=1e3 * statistics.median(trained),
        writer_cpu_ms=1e3 * statistics.median(written),
    )


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer whose state is twice the weights. The rate keeps the losses finite."""
    return torch.optim.AdamW(parameters, lr=1e-6)


def main() -> int:
    """Measure, print a line each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=5, help="pairs of blocks per variant")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    costs: list[Cost] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            words = (name, arguments.variants, arguments.blocks, folder)
            ranks = ps.launch(measure, RANKS, *words, threads=1)
        for variant in ranks[0]:
            cost = cost_of(name, variant, [results[variant] for results in ranks])
            costs.append(cost)
            print(
                f"{cost.model:10} {cost.variant:12} step {1e3 * cost.step_s:8.2f} ms  "
                f"{cost.extra_percent:+.2f} % ({cost.lowest_percent:+.2f} to "
                f"{cost.highest_percent:+.2f}), CPU seconds {cost.cpu_percent:+.2f} % "
                f"({cost.cpu_lowest_percent:+.2f} to {cost.cpu_highest_percent:+.2f})",
                flush=True,
            )
            if cost.saves:
                print(
                    f"{cost.model:10} a checkpoint stops training for {cost.stop_ms:.1f} ms; CPU "
                    f"time per rank: {cost.training_cpu_ms:.1f} ms of the thread that trains, "
                    f"{cost.writer_cpu_ms:.1f} ms of the threads that write, "
                    f"{cost.percent_every(SAVE_EVERY_S, idle_core=True):.2f} % of the time at one "
                    f"every {SAVE_EVERY_S:.0f} s if a core is idle, "
                    f"{cost.percent_every(SAVE_EVERY_S, idle_core=False):.2f} % if none is",
                    flush=True,
                )
    results = {
        "machine": {**machine_facts(torch.device("cpu")), "torch": torch.__version__},
        "save_every_s": SAVE_EVERY_S,
        "command": f"python benchmarks/overhead/run.py --blocks {arguments.blocks} --variants "
        f"{' '.join(arguments.variants)} --models {' '.join(arguments.models)}",
        "costs": [asdict(cost) for cost in costs],
    }
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
