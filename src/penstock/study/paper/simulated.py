"""Tables 2 and 3 by simulation: VGG-19 on 1 to 8 A100, one Python process or one per device.

The device hardly matters at this size: launching operations from Python does. Constants of the host
are fitted to a few cells, the others are predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, final

import torch

from penstock.cluster.presets import Presets
from penstock.measure.work.work_counter import count
from penstock.partition.catalogue import partition
from penstock.profile.counts import LayerCounts, ModelCounts
from penstock.profile.profile import PHASES, Profile
from penstock.profile.roofline import roofline
from penstock.schedule.op import Kind, Op, Schedule
from penstock.search.schedules import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.entry import simulate
from penstock.study.paper.one_process import Work, makespan
from penstock.study.paper.published import (
    BATCH,
    CLASSES,
    IMAGE,
    STEPS,
    PublishedCell,
    published_cells,
)
from penstock.zoo.catalogue import model

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


@cache
def counts() -> ModelCounts:
    """Return the work of VGG-19 at 32 pixels and 100 classes in 19 layers, each with the ReLU, pool
    and dropout after it, as the study cut it.
    """
    whole = count(
        model("vgg19", device="meta", image=IMAGE, classes=CLASSES, head="torchvision"),
        torch.empty(1, 3, IMAGE, IMAGE, device="meta"),
        BATCH,
    )
    groups: list[list[LayerCounts]] = []
    for layer in whole:
        if layer.parameters:
            groups.append([layer])
        else:
            groups[-1].append(layer)
    return replace(whole, layers=tuple(map(_merged, groups)))


def _merged(parts: Sequence[LayerCounts]) -> LayerCounts:
    """Return the work of consecutive layers as that of one."""
    works: dict[str, Any] = {}
    for phase in PHASES:
        works[phase] = tuple(work for part in parts for work in part.work(phase))
    return replace(
        parts[0],
        parameters=sum(part.parameters for part in parts),
        parameter_bytes=sum(part.parameter_bytes for part in parts),
        activation_bytes_per_sample=sum(part.activation_bytes_per_sample for part in parts),
        output_bytes_per_sample=parts[-1].output_bytes_per_sample,
        **works,
    )


@cache
def profile(launch_s: float = 0.0) -> Profile:
    """Return the profile of an A100 whose launches take `launch_s` each: convolutions and products
    in tf32, PyTorch's default then.
    """
    device = replace(Presets.load().device("A100"), launch_s=launch_s)
    return roofline(counts(), device, dtype="tf32")


@cache
def lengths(gpus: int, micro_batches: int, by: str = "time") -> tuple[int, ...]:
    """Return the layers per stage. By time, layers count by what they launch, as torchgpipe's
    balance by time measures a model that the host limits.
    """
    options: dict[str, dict[str, float]] = {
        "size": {"batch": BATCH, "micro_batches": micro_batches},
        "time": {"micro_batch": BATCH / micro_batches},
    }
    return tuple(partition(profile(1e-4 if by == "time" else 0.0), gpus, by, **options.get(by, {})))


def launches(cut: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return per stage the number of ops that a forward, a backward and an update launch."""
    launches_of_stage, start = [], 0
    for length in cut:
        layers = counts().layers[start : start + length]
        start += length
        launches_of_stage.append(
            (
                sum(layer.launches("forward") for layer in layers),
                sum(layer.launches("backward") for layer in layers),
                TENSORS * length,
            )
        )
    return launches_of_stage


def device_seconds(cut: Sequence[int], samples: float) -> list[tuple[float, float]]:
    """Return per stage the device's seconds of a forward and of a backward."""
    forward, backward = (profile().seconds(phase, samples) for phase in ("forward", "backward"))
    ends = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return [
        (sum(forward[end - n : end]), sum(backward[end - n : end]))
        for n, end in zip(cut, ends, strict=True)
    ]


@cache
def one_process_schedule(gpus: int, micro_batches: int) -> Schedule:
    """Return the schedule of torchgpipe: all forwards, then backwards in reverse."""
    return schedule("gpipe", stages=gpus, micro_batches=micro_batches, backward_order="reverse")


def one_process_step(cell: PublishedCell, host: Host) -> float:
    """Return the seconds of a step of torchgpipe or FairScale, which recompute all micro-batches
    but the last.
    """
    m = cell.micro_batches
    cut = lengths(cell.gpus, m)
    launched, devices = launches(cut), device_seconds(cut, BATCH / m)

    def work(op: Op) -> Work:
        """Return the seconds of an op."""
        forward, backward, update = launched[op.stage]
        f, b = devices[op.stage]
        if op.kind is Kind.U:
            # One thread updates all: two launches for every tensor, zeroing and the step.
            return Work(2 * update * host.launch_s, 0.0)
        if op.kind is Kind.F:
            ops, seconds = forward, f
        else:
            # With several micro-batches every tensor's gradient is added to by a launch.
            ops, seconds = backward + (update if m > 1 else 0), b
            if op.micro_batch < m - 1:
                ops, seconds = ops + forward, seconds + f
        return Work(
            ops * host.launch_s * host.locked + host.task_s,
            ops * host.launch_s * (1 - host.locked),
            seconds,
        )

    return makespan(one_process_schedule(cell.gpus, m), work)


@final
@dataclass(frozen=True)
class Engine:
    """DeepSpeed's host, in seconds: for every op that it launches; and for every instruction, a
    forward or a backward of a stage.
    """

    launch_s: float
    task_s: float


def process_each_step(cell: PublishedCell, engine: Engine) -> float:
    """Return the seconds of a step of DeepSpeed: 1F1B, a process for each device, every layer
    recomputed by itself.
    """
    m = cell.micro_batches
    cut = lengths(cell.gpus, m)
    launched, devices = launches(cut), device_seconds(cut, BATCH / m)
    forward = [
        # The host launches ahead of the device, so the slower of the two sets the pace.
        max(n * engine.launch_s, f) + engine.task_s
        for (n, _, _), (f, _) in zip(launched, devices, strict=True)
    ]
    backward = [
        max((recomputed + n + tensors) * engine.launch_s, b + f) + engine.task_s
        for (recomputed, n, tensors), (f, b) in zip(launched, devices, strict=True)
    ]
    update = [2 * tensors * engine.launch_s for *_, tensors in launched]
    costs = Costs(forward=forward, backward=backward, update=update)
    return simulate(schedule("1f1b", stages=cell.gpus, micro_batches=m), costs).makespan


def fit(residual: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Return the positive numbers with the least residual: one after the other is moved by ever
    smaller factors, so that every run gives the same.
    """
    best, least, factor = list(start), residual(start), 1.5
    while factor > 1.002:
        moved = False
        for index in range(len(best)):
            for by in (factor, 1 / factor):
                tried = [value * by if i == index else value for i, value in enumerate(best)]
                residuals = residual(tried)
                if residuals < least:
                    best, least, moved = tried, residuals, True
        if not moved:
            factor = math.sqrt(factor)
    return best


def host_residual(fitted_to: Sequence[PublishedCell]) -> Callable[[Sequence[float]], float]:
    """Return the residual of a host's three numbers: the sum of the squared logarithms of simulated
    over published seconds.
    """

    def residual(values: Sequence[float]) -> float:
        """Return the residual of some numbers."""
        # `Host.locked` is a share.
        if values[1] > 1:
            return math.inf
        return sum(
            math.log(STEPS * one_process_step(cell, Host(*values)) / cell.seconds) ** 2
            for cell in fitted_to
        )

    return residual


def engine_residual(fitted_to: Sequence[PublishedCell]) -> Callable[[Sequence[float]], float]:
    """Return the residual of DeepSpeed's two numbers likewise."""

    def residual(values: Sequence[float]) -> float:
        """Return the residual of some numbers."""
        return sum(
            math.log(STEPS * process_each_step(cell, Engine(*values)) / cell.seconds) ** 2
            for cell in fitted_to
        )

    return residual


def is_fitted(cell: PublishedCell) -> bool:
    """Whether a constant is fitted to a cell: torchgpipe by time at 16 micro-batches, and DeepSpeed
    by uniform on 2 and 8 devices.
    """
    if cell.library == "deepspeed":
        return cell.balance == "uniform" and cell.gpus in (2, 8)
    return (cell.library, cell.balance, cell.micro_batches) == ("torchgpipe", "time", 16)


@cache
def fit_host() -> tuple[Host, tuple[PublishedCell, ...]]:
    """Return the constants of a process that drives all devices, and the cells they are fitted
    to.
    """
    cells = tuple(
        cell for cell in published_cells() if cell.library != "deepspeed" and is_fitted(cell)
    )
    return Host(*fit(host_residual(cells), (1e-4, 0.1, 1e-3))), cells


@cache
def fit_engine() -> tuple[Engine, tuple[PublishedCell, ...]]:
    """Return the constants of DeepSpeed, and the cells they are fitted to."""
    cells = tuple(
        cell for cell in published_cells() if cell.library == "deepspeed" and is_fitted(cell)
    )
    return Engine(*fit(engine_residual(cells), (1e-4, 1e-3))), cells


def simulated_seconds(cell: PublishedCell) -> float:
    """Return the simulated seconds of 25 epochs of a published cell."""
    if cell.library == "deepspeed":
        return STEPS * process_each_step(cell, fit_engine()[0])
    return STEPS * one_process_step(cell, fit_host()[0])
