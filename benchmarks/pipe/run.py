"""Milliseconds per training step of `ps.Pipe` beside torchgpipe and FairScale, whose call it has,
in turn, two partitions on two cores.

Every contestant is a process of its own, made once per workload; one works at a time. A step is
`zero_grad`, forward, loss, backward. Nothing is installed: `--peers` is a folder with torchgpipe
and fairscale in it (`pip install --target FOLDER torchgpipe fairscale`); who is not there is left
out.
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
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

MODES = ("never", "except_last", "always")
#: Layers of each partition, so that the longer one takes as little as it can (measured, one
#: thread), and micro-batches.
CELLS = {"mlp": ([4, 4], 16), "gpt": ([7, 8], 4), "vgg": ([19, 26], 4)}
WARM_UP = {"mlp": 5, "gpt": 2, "vgg": 2}


def workload(name: str) -> tuple[nn.Sequential, Tensor, Tensor, Callable[..., Tensor]]:
    """Model, inputs, targets and loss, the same in every process."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
        return (
            nn.Sequential(*layers),
            torch.randn(64, 64),
            torch.randn(64, 64),
            nn.functional.mse_loss,
        )
    if name == "gpt":
        network = zoo_model("gpt", layers=12, width=256, heads=4, tokens=128, vocabulary=512)
        x, y = torch.randint(0, 512, (2, 32, 128))
        return nn.Sequential(*ps.chain(network).modules), x, y, gpt_loss
    network = zoo_model("vgg19", classes=100, image=32, dropout=0.0)
    return (
        nn.Sequential(*ps.chain(network).modules),
        torch.randn(128, 3, 32, 32),
        torch.randint(0, 100, (128,)),
        nn.functional.cross_entropy,
    )


def contestant(name: str) -> Callable[..., nn.Module]:
    """Its class; `penstock:1f1b` is ours with that schedule and `loss=`."""
    if name == "torchgpipe":
        from torchgpipe import GPipe

        return GPipe
    if name == "fairscale":
        from fairscale.nn import Pipe as FairScalePipe

        return FairScalePipe
    from penstock.pipe.pipe import Pipe

    return Pipe


def serve(name: str, cell: str, mode: str) -> None:
    """What a contestant's process does: answers every line of input by the milliseconds of that many
    steps.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, x, y, loss = workload(cell)
    balance, chunks = CELLS[cell]
    kind = None if name == "plain" else contestant(name)
    expected: list[Tensor] = list(torch.autograd.grad(loss(model(x), y), list(model.parameters())))
    start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    schedule = name.partition(":")[2] or None
    options = {} if schedule is None else {"schedule": schedule, "loss": loss}
    pipe: Any = (
        model
        if kind is None
        else kind(model, balance, devices=["cpu", "cpu"], chunks=chunks, checkpoint=mode, **options)
    )

    def step() -> None:
        pipe.zero_grad()
        (loss(pipe(x), y) if schedule is None else pipe(x, y)).backward()

    for _ in range(WARM_UP[cell]):
        step()
    error = max(
        float((p.grad - grad).abs().max() / grad.abs().max().clamp(min=1e-12))
        for p, grad in zip(model.parameters(), expected, strict=True)
    )
    del expected
    peak_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kib) / 1024
    print(json.dumps({"gradient_error": error, "more_memory_mib": peak_mib}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1000)
        print(json.dumps(times), flush=True)


class Contestant:
    """A process that trains when it is told to."""

    def __init__(self, name: str, cell: str, mode: str, peers: str | None) -> None:
        self.name = name
        path = [
            part
            for part in (
                peers if name in ("torchgpipe", "fairscale") else None,
                os.environ.get("PYTHONPATH"),
            )
            if part
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--serve", name, cell, mode]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.times: list[float] = []
        self.rounds: list[float] = []
        self.facts: dict[str, float] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.name} has ended, code {self._process.wait()}: its own words are above"
            )
        return json.loads(line)

    def train(self, steps: int) -> None:
        """Take the times of some steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._read()
        self.times += answer
        self.rounds.append(statistics.median(answer))

    def end(self) -> None:
        """Let it go."""
        self._process.communicate()


def measure(cell: str, mode: str, names: list[str], settings: argparse.Namespace) -> dict[str, Any]:
    """All contestants in turn, for some rounds."""
    steps = settings.steps or {"mlp": 30, "gpt": 2, "vgg": 2}[cell]
    contestants = [Contestant(name, cell, mode, settings.peers) for name in names]
    for _ in range(settings.rounds):
        for contestant in contestants:
            contestant.train(steps)
    ours = next(contestant for contestant in contestants if contestant.name == "penstock")
    rows = {}
    for contestant in contestants:
        contestant.end()
        ratios = sorted(
            theirs / our_time
            for theirs, our_time in zip(contestant.rounds, ours.rounds, strict=True)
        )
        rows[contestant.name] = {
            "median_ms": round(statistics.median(contestant.times), 3),
            "least_ms": round(min(contestant.times), 3),
            "to_ours": round(statistics.median(ratios), 3),
            "to_ours_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
            **{name: float(f"{value:.3g}") for name, value in contestant.facts.items()},
        }
    return {
        "cell": cell,
        "checkpoint": mode,
        "balance": CELLS[cell][0],
        "chunks": CELLS[cell][1],
        "rows": rows,
    }


def there(peers: str | None) -> list[str]:
    """Who can be measured."""
    names = ["penstock", "penstock:1f1b", "plain"]
    for name in ("torchgpipe", "fairscale"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (peers, os.environ.get("PYTHONPATH")))),
        }
        if (
            subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode
            == 0
        ):
            names.append(name)
        else:
            print(
                f"{name} is not there: left out (pip install --target FOLDER {name}; --peers FOLDER)"
            )
    return names


def main() -> None:
    """Print the table, write results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="folder with torchgpipe and fairscale in it")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, help="per round; by default as many as take about a second"
    )
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results.json")
    settings = parser.parse_args()
    if settings.serve:
        serve(*settings.serve)
        return
    names = there(settings.peers)
    print(
        f"{'':<6}{'checkpoint':<13}{'':<14}{'median':>10}{'least':>10}{'to ours':>9}   {'spread':<16}{'gradient error':>15}{'more memory':>13}"
    )
    cells = []
    for cell in settings.cells.split(","):
        for mode in settings.modes.split(","):
            cells.append(measure(cell, mode, names, settings))
            for name, row in cells[-1]["rows"].items():
                spread = "{:.2f} to {:.2f}".format(*row["to_ours_spread"])
                print(
                    f"{cell:<6}{mode:<13}{name:<14}{row['median_ms']:>7.1f} ms{row['least_ms']:>7.1f} ms{row['to_ours']:>9.2f}   {spread:<16}"
                    f"{row['gradient_error']:>15.1e}{row['more_memory_mib']:>9.0f} MiB",
                    flush=True,
                )
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }
    settings.out.write_text(
        json.dumps({"machine": machine, "cells": cells}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
