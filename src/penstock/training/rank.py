"""Training and profiling as one rank of a run."""

from __future__ import annotations

import os
import resource
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from penstock.checkpoint.weight_files import save_weights
from penstock.measure.profiler import profile
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.runtime.pipeline import Pipeline
from penstock.training.beginning import begin, resume
from penstock.training.callbacks import load_callbacks
from penstock.training.config import TrainConfig
from penstock.training.data.batches import count_batches
from penstock.training.devices import Devices
from penstock.training.loop.rank_result import RankResult
from penstock.training.loop.run_log import RunLog
from penstock.training.loop.training_loop import TrainingLoop
from penstock.training.metrics import Metrics
from penstock.training.optimizer import pipeline_options
from penstock.training.progress import Progress
from penstock.training.recovery.live_state import LiveState
from penstock.training.resume import last_step
from penstock.training.run_checkpoints import run_checkpoints
from penstock.training.task import make_task

_CPU = torch.device("cpu")


def profile_rank(
    config: TrainConfig,
    threads: int,
    concurrent: bool | dist.ProcessGroup = False,
    device: torch.device = _CPU,
) -> Profile:
    """Measure the model of a run, alone or concurrently with all other ranks, or those of a group."""
    task = make_task(config)
    return profile(
        task.chain,
        task.example(),
        config.batch,
        repeats=config.profile_repeats,
        threads=threads,
        device=device,
        loss=task.loss,
        targets=task.data.train_targets[: len(task.example())],
        together=concurrent,
    )


def take_device(devices: Devices) -> torch.device:
    """Return the device of this process; a card becomes the current device, which torch uses by
    default.
    """
    device = devices.of_process(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def train_rank(
    config: TrainConfig, plan: Plan, folder: Path, quiet: bool, devices: Devices
) -> RankResult:
    """Train as one rank of the plan, or as all of them if they share a card. See `train_on`."""
    executor = devices.executor(plan.ranks)
    return train_on(config, plan, folder, quiet, take_device(devices), executor)


def train_on(
    config: TrainConfig,
    plan: Plan,
    folder: Path,
    quiet: bool,
    device: torch.device,
    executor: Literal["processes", "threads"],
) -> RankResult:
    """Train on a device, as one rank of the plan, or as all ranks in threads.

    Args:
        config: of the run.
        plan: to execute.
        folder: into which rank 0 writes metrics and weights.
        quiet: show no progress bar.
        device: of this process.
        executor: how the ranks run.

    Raises:
        RunError: a rank failed, or the loss is no longer a number.
    """
    task = make_task(config)
    pipe = Pipeline(
        task.chain,
        plan,
        loss=task.loss,
        device=device,
        executor=executor,
        **pipeline_options(config),
    )
    is_rank_0 = executor == "threads" or dist.get_rank() == 0
    callbacks = load_callbacks(config.callbacks if is_rank_0 else None)
    live = LiveState(pipe)
    checkpoints = run_checkpoints(config, folder, callbacks.on_checkpoint, live.source)
    if config.resume:
        resume(pipe, checkpoints, config, folder, is_rank_0=is_rank_0)
    else:
        begin(pipe, task, config, quiet=quiet or not is_rank_0)
    written_checkpoints = checkpoints if config.writes_checkpoints else None
    result = RankResult(steps=pipe.step)
    end = last_step(config, count_batches(len(task.data.train_inputs), config.batch))
    _reset_peak_allocated_bytes(device)
    start = time.monotonic()
    with (
        _open_metrics(config, folder, plan, pipe) if is_rank_0 else nullcontext() as metrics,
        Progress(end, silent=quiet or not is_rank_0) as progress,
        written_checkpoints or nullcontext(),
        live.offering(),
    ):
        log = RunLog(metrics, progress, callbacks, live, config.lr)
        TrainingLoop(config, task, pipe, written_checkpoints, log, live, result).run()
    result.seconds = time.monotonic() - start
    result.peak_allocated_bytes = _peak_allocated_bytes(device)
    if not result.stopped:
        _write_weights(pipe, folder)
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB
    pipe.close()
    return result


def _open_metrics(config: TrainConfig, folder: Path, plan: Plan, pipe: Pipeline) -> Metrics:
    """Open the log of a run, from the step at which it continues."""
    return Metrics(folder, plan.predicted.step_s, pipe.step, config.wandb)


def _reset_peak_allocated_bytes(device: torch.device) -> None:
    """Count the peak of a card anew: the self-check allocates more than training does."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_allocated_bytes(device: torch.device) -> int | None:
    """Return the most bytes that torch's allocator has had on a card; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _write_weights(pipe: Pipeline, folder: Path) -> None:
    """Write the trained model into the run's folder, on rank 0."""
    weights = pipe.state_dict()
    if weights:
        save_weights(weights, folder / "weights.safetensors")
