"""Tables 2 and 3 of the study: VGG-19 on 1 to 8 A100, torchgpipe, FairScale and DeepSpeed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import final

import torch
from one_process import Work, makespan
from side_by_side import Row, Section

import penstock as ps
from penstock.cluster.presets import Presets
from penstock.measure.counts import count
from penstock.profile.counts import LayerCounts, ModelCounts
from penstock.profile.roofline import roofline
from penstock.schedule.op import Kind, Op, Schedule
from penstock.zoo.catalogue import model

PUBLISHED = json.loads((Path(__file__).parent / "data" / "study_tables.json").read_text(encoding="utf-8"))
BATCH, EPOCHS, IMAGES = 128, 25, 50_000
STEPS = EPOCHS * IMAGES / BATCH
GPUS = (2, 4, 6, 8)
#: Weight and bias of a layer: each is zeroed, added to and updated by a launch of its own.
TENSORS = 2


@final
@dataclass(frozen=True)
class Host:
    """What the host needs, in seconds.

    Attributes:
        launch_s: for every op that it launches.
        locked: the part of that with the interpreter's lock.
        task_s: with the lock, for every forward and backward of a partition besides.
    """

    launch_s: float
    locked: float
    task_s: float


@final
@dataclass(frozen=True)
class Cell:
    """One number of the tables."""

    library: str
    balance: str
    gpus: int
    micro_batches: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.library} by {self.balance}, M={self.micro_batches}, {self.gpus} GPUs"


def cells() -> list[Cell]:
    """All of tables 2 and 3."""
    found = []
    for row in PUBLISHED["table3"]["rows"]:
        for library in ("torchgpipe", "fairscale"):
            for balance, by_count in row[library].items():
                found += [Cell(library, balance, row["gpus"], int(m), pair[1]) for m, pair in by_count.items()]
    for row in PUBLISHED["table2"]["rows"]:
        for library in ("torchgpipe", "fairscale", "deepspeed"):
            found += [Cell(library, balance, row["gpus"], 16, pair[1]) for balance, pair in row[library].items()]
    return sorted(found, key=lambda each: (each.micro_batches, each.library, each.balance, each.gpus))


@cache
def counts() -> ModelCounts:
    """VGG-19 for 32 pixels and 100 classes in 19 layers, each with the ReLU, pool and dropout behind it, as the study cut it."""
    whole = count(model("vgg19", device="meta", image=32, classes=100), torch.empty(1, 3, 32, 32, device="meta"), BATCH)
    groups: list[list[LayerCounts]] = []
    for layer in whole:
        if layer.parameters:
            groups.append([layer])
        else:
            groups[-1].append(layer)
    return replace(whole, layers=tuple(map(_merged, groups)))


def _merged(parts: Sequence[LayerCounts]) -> LayerCounts:
    first = parts[0]
    return LayerCounts(
        first.name, first.kind, *(tuple(work for part in parts for work in getattr(part, phase))
                                  for phase in ("forward", "backward", "input_grad", "weight_grad")),
        sum(part.parameters for part in parts), sum(part.parameter_bytes for part in parts), 0,
        sum(part.activation_bytes_per_sample for part in parts), parts[-1].output_bytes_per_sample,
    )  # fmt: skip


@cache
def profile(launch_s: float = 0.0) -> ps.Profile:
    """What an A100 takes, launches at a cost of their own: convolutions and products in tf32, PyTorch's default then."""
    device = replace(Presets.load().device("A100"), launch_s=launch_s)
    return roofline(counts(), device, batch=BATCH, dtype="tf32")


@cache
def lengths(gpus: int, micro_batches: int, by: str = "time") -> tuple[int, ...]:
    """The cut. By time, layers count by what they launch, as torchgpipe's balance by time finds on a host-bound model."""
    options = {"size": {"batch": BATCH, "micro_batches": micro_batches}, "time": {"micro_batch": BATCH / micro_batches}}
    return tuple(ps.partition(profile(1e-4 if by == "time" else 0.0), gpus, by, **options.get(by, {})))


def launches(cut: Sequence[int]) -> list[tuple[int, int, int]]:
    """Per stage, ops that a forward, a backward and an update launch."""
    found, start = [], 0
    for length in cut:
        layers = counts().layers[start : start + length]
        start += length
        found.append((sum(each.launches("forward") for each in layers), sum(each.launches("backward") for each in layers), TENSORS * length))
    return found


def device_seconds(cut: Sequence[int], samples: float) -> list[tuple[float, float]]:
    """Per stage, what a forward and a backward take of the device."""
    forward, backward = (profile().seconds(phase, samples) for phase in ("forward", "backward"))
    ends = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return [(sum(forward[end - n : end]), sum(backward[end - n : end])) for n, end in zip(cut, ends, strict=True)]


@cache
def one_process_schedule(gpus: int, micro_batches: int) -> Schedule:
    """torchgpipe's: all forwards, then backwards in reverse."""
    return ps.schedule("gpipe", stages=gpus, micro_batches=micro_batches, backward_order="reverse")


def one_process_step(cell: Cell, host: Host) -> float:
    """Seconds of a step of torchgpipe or FairScale."""
    m = cell.micro_batches
    cut = lengths(cell.gpus, m)
    launched, devices = launches(cut), device_seconds(cut, BATCH / m)

    def work(op: Op) -> Work:
        forward, backward, update = launched[op.stage]
        f, b = devices[op.stage]
        if op.kind is Kind.U:
            # One thread updates all: two launches for every tensor, zeroing and the step.
            return Work(2 * update * host.launch_s, 0.0)
        again = op.kind is Kind.B and op.micro_batch < m - 1  # checkpoint="except_last", the libraries' default
        if op.kind is Kind.F:
            ops, seconds = forward, f
        else:
            ops, seconds = backward + (update if m > 1 else 0) + forward * again, b + f * again
        return Work(ops * host.launch_s * host.locked + host.task_s, ops * host.launch_s * (1 - host.locked), seconds)

    return makespan(one_process_schedule(cell.gpus, m), work)


@final
@dataclass(frozen=True)
class Engine:
    """DeepSpeed's host, in seconds: for every op that it launches; and for every instruction, a forward or a backward of a stage."""

    launch_s: float
    task_s: float


def process_each_step(cell: Cell, engine: Engine) -> float:
    """Seconds of a step of DeepSpeed: 1F1B, a process for each device, every layer recomputed by itself."""
    m = cell.micro_batches
    cut = lengths(cell.gpus, m)
    launched, devices = launches(cut), device_seconds(cut, BATCH / m)
    forward = [max(n * engine.launch_s, f) + engine.task_s for (n, _, _), (f, _) in zip(launched, devices, strict=True)]
    backward = [
        max((n + again + tensors) * engine.launch_s, b + f) + engine.task_s
        for (again, n, tensors), (f, b) in zip(launched, devices, strict=True)
    ]
    update = [2 * tensors * engine.launch_s for *_, tensors in launched]
    costs = ps.Costs(forward=forward, backward=backward, update=update)
    return ps.simulate(ps.schedule("1f1b", stages=cell.gpus, micro_batches=m), costs).makespan


def fit(residual: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """The positive numbers with the least residual, one after the other by ever smaller factors: no search by chance."""
    best, least, factor = list(start), residual(start), 1.5
    while factor > 1.002:
        moved = False
        for index in range(len(best)):
            for by in (factor, 1 / factor):
                tried = [value * by if i == index else value for i, value in enumerate(best)]
                found = residual(tried)
                if found < least:
                    best, least, moved = tried, found, True
        if not moved:
            factor = math.sqrt(factor)
    return best
