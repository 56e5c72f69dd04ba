"""Commands of a rank of a system: make it, compare its gradients, take steps, train."""

from __future__ import annotations

import gc
import os
import resource
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

from penstock.peers.commands import command
from penstock.peers.memory import Peak, limit_memory
from penstock.peers.plain import Plain


@dataclass
class _Rank:
    """State of a rank between commands."""

    job: Any
    step: Any
    peak: Peak
    used_s: float = 0.0
    idle_s: float = 0.0


@command("make")
def make(state: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Plain]:
    """Build the system's part of this rank, and return the adapter's notes."""
    import torch

    from penstock.peers.catalogue import system
    from penstock.peers.job import Job
    from penstock.peers.setup import spec_of

    peak = Peak()
    spec = spec_of(arguments["spec"])
    if spec.setup.memory_limit:
        limit_memory(spec.setup.memory_limit)
    torch.set_num_threads(spec.threads)
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    # After the initial weights, random numbers such as dropout's differ between ranks.
    job = Job(spec)
    step = system(spec.system).make(job)
    torch.manual_seed(spec.setup.seed * spec.ranks + spec.rank)
    state["rank"] = _Rank(job, step, peak)
    return job.notes


@command("compare")
def compare(state: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the first step, whose gradients are compared with those of plain training.

    With the argument `realtime` nothing else on the host interrupts this process, now and later.
    """
    rank = cast("_Rank", state["rank"])
    for thread in Path("/proc/self/task").iterdir() if arguments.get("realtime") else ():
        # Threads to come inherit it.
        os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
    batch = rank.job.workload.first_batch()
    start = time.perf_counter()
    rank.step(*batch)
    seconds = time.perf_counter() - start
    rank.job.forget_names()
    gc.collect()
    answer = {
        "errors": rank.job.errors,
        "largest": rank.job.largest_gradient,
        "seconds": seconds,
        "host_bytes": rank.peak.read_whole(),
    }
    rank.peak.reset()
    rank.used_s, rank.idle_s = _cpu_s(), 0.0
    return answer


@command("steps")
def steps(state: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Take steps on the first batch: `warm` that do not count, and `steps` that do.

    Returns:
        When the first began and when each ended, on the host's clock; the peak memory; seconds of
        CPU time used between commands.
    """
    rank = cast("_Rank", state["rank"])
    # What it has used since its last turn, while other systems took their steps.
    rank.idle_s += _cpu_s() - rank.used_s
    gc.collect()
    step, now = rank.step, time.perf_counter
    inputs, targets = rank.job.workload.first_batch()
    for _ in range(arguments["warm"]):
        step(inputs, targets)
    times = [now()]
    for _ in range(arguments["steps"]):
        step(inputs, targets)
        times.append(now())
    rank.used_s = _cpu_s()
    return {
        "times": times,
        "peak": rank.peak.read(),
        "whole": rank.peak.whole,
        "idle_s": rank.idle_s,
        "parts": getattr(step, "parts", [])[-arguments["steps"] :],
    }


@command("train")
def train(state: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Train for some steps or epochs.

    Args:
        state: of the process.
        arguments: `warm` steps that do not count, then `epochs`, or if that is 0 `steps`.

    Returns:
        `times`: when the first began and when each step, or epoch, ended, on the host's clock;
        `losses`: of each, empty on ranks that do not know them; `peak` memory; `steps`: number of
        steps in each.
    """
    rank = cast("_Rank", state["rank"])
    epochs, step_count = arguments["epochs"], arguments["steps"]
    inputs, targets = rank.job.workload.first_batch()
    for _ in range(arguments["warm"]):
        rank.step(inputs, targets)
    rank.peak.reset()
    if epochs:
        times, losses = _train_epochs(rank, epochs)
    else:
        times, losses = _train_steps(rank, step_count)
    return {
        "times": times,
        "losses": losses,
        "peak": rank.peak.read(),
        "whole": rank.peak.whole,
        "steps": sum(1 for _ in rank.job.workload.epoch(0)) if epochs else 1,
    }


def _train_steps(rank: _Rank, steps: int) -> tuple[list[float], list[float]]:
    """Take steps on the batches of the data, epoch after epoch."""
    losses: list[float] = []
    times = [time.perf_counter()]
    for epoch in count():
        for inputs, targets in rank.job.workload.epoch(epoch):
            loss = rank.step(inputs, targets)
            times.append(time.perf_counter())
            if loss is not None:
                losses.append(float(loss))
            if len(times) > steps:
                return times, losses
    raise AssertionError


def _train_epochs(rank: _Rank, epochs: int) -> tuple[list[float], list[float]]:
    """Train for epochs; a loss is the mean over the batches of an epoch."""
    losses: list[float] = []
    times = [time.perf_counter()]
    for epoch in range(epochs):
        epoch_losses = []
        for inputs, targets in rank.job.workload.epoch(epoch):
            loss = rank.step(inputs, targets)
            if loss is not None:
                epoch_losses.append(float(loss))
        times.append(time.perf_counter())
        if epoch_losses:
            losses.append(sum(epoch_losses) / len(epoch_losses))
    return times, losses


def _cpu_s() -> float:
    """Return the CPU time of this process in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
