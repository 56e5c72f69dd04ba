"""The self-check of a new run: its first batch through the pipeline and through plain training,
before anything is trained.

It takes a forward and backward of the batch on all ranks, two on rank 0 alone, and two copies of
the model: 3.9 times the CPU time of a step of plain training of VGG-11 in one process. Rank 0 holds
the whole model meanwhile. Weights, gradients, buffers, random numbers and the order of the data
stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import RunError
from penstock.runtime.compare import Comparison
from penstock.runtime.pipeline import Pipeline
from penstock.schedule.op import Schedule
from penstock.training.config import TrainConfig
from penstock.training.task import Task

#: Largest differences from the same micro-batches, in proportion, without mixed precision and with
#: it.
_TOLERANCE, _MIXED_TOLERANCE = 1e-3, 0.05


def check_first_batch(pipe: Pipeline, task: Task, config: TrainConfig) -> str:
    """Hold the pipeline against plain training on the first batch. Every rank calls it.

    Returns:
        One line on what was found.

    Raises:
        RunError: gradients, buffers, outputs or loss differ from those of plain training, and
        nothing is known that makes them.
    """
    x, y = next(task.epoch(config, 0))
    comparison = pipe.compare_with_one_device(x, y)
    if _has_copies(pipe.setting.schedule):
        # Batch norm's buffers are those of the first copy, as documented; others are refused.
        comparison = replace(comparison, buffers={})
    line, fault = pipe._world.broadcast(list(_verdict(comparison, config)), 0)
    if fault:
        raise RunError(fault)
    return str(line)


def _has_copies(schedule: Schedule) -> bool:
    return any(len(ranks) > 1 for ranks in schedule.ranks_of_stage)


def _verdict(comparison: Comparison, config: TrainConfig) -> tuple[str, str]:
    """A line on a sound pipeline; or why the run must not begin. It counts on rank 0."""
    tolerance = _TOLERANCE if config.autocast is None else _MIXED_TOLERANCE
    whole = comparison.whole
    advice = "--no-self-check trains all the same"
    if not comparison.relative <= tolerance:
        return "", (
            f"the self-check failed: on the first batch the pipeline differs from plain training on the same micro-batches by "
            f"{comparison.relative:.2g} of what it is of, and at most {tolerance:g} is rounding. {advice}\n{comparison}"
        )
    line = f"self-check: as one device to {comparison.relative:.1g}"
    if whole is None:
        return line, ""
    if whole.agrees:
        return (
            f"{line} with the same micro-batches, to {whole.relative:.1g} with the undivided batch",
            "",
        )
    if not whole.causes:
        return "", (
            "the self-check failed: on the first batch the pipeline differs from plain training on the undivided batch by "
            f"{whole.relative:.2g} of what it is of, and nothing is known in this model that makes it. --micro-batches 1 divides "
            f"nothing. {advice}\n{comparison}"
        )
    return (
        f"{line} with the same micro-batches; the undivided batch differs: {'; '.join(whole.causes)}",
        "",
    )
