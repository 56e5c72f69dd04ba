"""Is the bubble really gone? Seconds per batch of asynchronous schedules beside 1F1B with its
flush, on real ranks and simulated.

Two processes with one thread each, over gloo, on the same model, cut and optimizer; all systems in
the same processes, in turn. The simulator is given the seconds that the ops of the 1F1B run really
took on each rank, the fastest of many, and nothing of what the asynchronous runs took.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from penstock.simulate.steady_state import steady
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

#: Schedule and micro-batches per batch; the first of each number is what the others are held
#: against.
SYSTEMS = {
    1: ("1f1b", "pipedream"),
    2: ("1f1b", "pipedream", "2bw"),
    4: ("1f1b", "pipedream", "2bw"),
}

Batches = list[tuple[Tensor, Tensor]]


def workload(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor], object, list[int]]:
    """Model, a batch, loss and cut; the same on every rank. The cut gives both ranks the same work."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [layer for _ in range(8) for layer in (nn.Linear(768, 768), nn.ReLU())]
        return (
            nn.Sequential(*layers),
            (torch.randn(256, 768), torch.randn(256, 768)),
            nn.functional.mse_loss,
            [8, 8],
        )
    network = zoo_model("gpt", layers=8, width=192, heads=6, tokens=64, vocabulary=256)
    count = len(ps.chain(network))
    batch = torch.randint(0, 256, (16, 64)), torch.randint(0, 256, (16, 64))
    return network, batch, gpt_loss, [count // 2, count - count // 2]


class Stream:
    """One system, driven as a user would: a loop over `Pipeline.train`."""

    def __init__(self, name: str, schedule: str, micro_batches: int) -> None:
        model, self.batch, loss, lengths = workload(name)
        self.pipe = ps.Pipeline(
            model,
            loss=loss,
            balance=lengths,
            schedule=schedule,
            micro_batches=micro_batches,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        )

    def _batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self.batch] * count)

    def seconds_per_batch(self, count: int) -> float:
        """Of `count` batches in the steady state: those in which a stream fills are run before,
        those in which it drains after.
        """
        fill = 4
        losses = self.pipe.train(self._batches(count + 2 * fill))
        for _ in range(fill):
            next(losses)
        start = time.perf_counter()
        for _ in range(count):
            next(losses)
        seconds = time.perf_counter() - start
        for _ in losses:
            pass
        return seconds / count


def measure(
    name: str, micro_batches: int, rounds: int, count: int
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Seconds per batch of each system, by round; and of the first, the fastest F, B and U on each
    rank.
    """
    import gc

    from penstock.ranks.process_world import join

    join()
    systems = {
        schedule: Stream(name, schedule, micro_batches) for schedule in SYSTEMS[micro_batches]
    }
    times: dict[str, list[float]] = {schedule: [] for schedule in systems}
    fastest: dict[tuple[str, int], float] = {}
    for _ in range(rounds):
        for schedule, stream in systems.items():
            dist.barrier()
            gc.collect()
            times[schedule].append(stream.seconds_per_batch(count))
        for event in systems[SYSTEMS[micro_batches][0]].pipe.timeline().compute:
            key = event.op.kind.value, event.op.stage
            fastest[key] = min(fastest.get(key, float("inf")), event.end - event.start)
    fastest_of_kind = []
    for kind in "FBU":
        fastest_of_kind.append([fastest[kind, stage] for stage in range(2)])
    return times, fastest_of_kind


def simulated(micro_batches: int, ops: list[list[float]]) -> dict[str, float]:
    """Seconds per batch of every system by the simulator."""
    costs = ps.Costs(forward=ops[0], backward=ops[1], update=ops[2])
    return {
        schedule: steady(
            ps.schedule(schedule, stages=2, micro_batches=micro_batches), costs
        ).seconds_per_batch
        for schedule in SYSTEMS[micro_batches]
    }


def main() -> None:
    """Print a table, write results.json."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=9)
    words.add_argument("--batches", type=int, default=20)
    words.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = words.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in ("mlp", "gpt"):
        for micro_batches in SYSTEMS:
            rows = ps.launch(
                measure, 2, name, micro_batches, arguments.rounds, arguments.batches, threads=1
            )
            times = rows[0][0]
            expected = simulated(micro_batches, rows[0][1])
            first = SYSTEMS[micro_batches][0]
            case = f"{name} S=2 M={micro_batches}"
            results[case] = {
                schedule: {
                    "ms_per_batch": round(statistics.median(times[schedule]) * 1e3, 2),
                    "to_1f1b": round(
                        statistics.median(
                            a / b for a, b in zip(times[schedule], times[first], strict=True)
                        ),
                        3,
                    ),
                    "to_1f1b_simulated": round(expected[schedule] / expected[first], 3),
                }
                for schedule in times
            }
            print(case)
            for schedule, row in results[case].items():
                print(
                    f"  {schedule:10} " + "  ".join(f"{key} {value}" for key, value in row.items()),
                    flush=True,
                )
    machine = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    arguments.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
