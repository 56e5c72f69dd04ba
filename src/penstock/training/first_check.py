"""Self-check of a new run: compare its first batch through the pipeline with plain training, before
anything is trained.

It takes a forward and backward of the batch on all ranks, two on rank 0 alone, and two copies of
the model: 3.9 times the CPU time of a step of plain training of VGG-11 in one process. Rank 0 holds
the whole model meanwhile. Weights, gradients, buffers, random numbers and the order of the data are
not changed.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import RunError
from penstock.runtime.comparison.one_device_comparison import Comparison
from penstock.runtime.pipeline import Pipeline
from penstock.training.config import TrainConfig
from penstock.training.task import Task

#: Largest relative differences from plain training on the same micro-batches, without mixed
#: precision and with it.
_TOLERANCE, _MIXED_TOLERANCE = 1e-3, 0.05


def check_first_batch(pipe: Pipeline, task: Task, config: TrainConfig) -> str:
    """Compare the pipeline with plain training on the first batch. All ranks call it.

    Returns:
        A line on the result.

    Raises:
        RunError: gradients, buffers, outputs or loss differ from those of plain training for no
            known reason.
    """
    x, y = next(task.epoch(config, 0))
    comparison = pipe.compare_with_one_device(x, y)
    if pipe.setting.schedule.copies > 1:
        # Batch norm's buffers are those of the first replica, as documented; other buffers are
        # refused.
        comparison = replace(comparison, buffers={})
    line, fault = pipe._world.broadcast(list(_evaluate(comparison, config)), 0)
    if fault:
        raise RunError(fault)
    return str(line)


def _evaluate(comparison: Comparison, config: TrainConfig) -> tuple[str, str]:
    """Return a line on a correct pipeline, and why the run must not start; one of them is empty.

    Rank 0's result is used.
    """
    tolerance = _TOLERANCE if config.autocast is None else _MIXED_TOLERANCE
    whole = comparison.whole
    advice = "--no-self-check trains without this check"
    # In this form, because NaN compares false.
    if not comparison.relative <= tolerance:
        return "", (
            "the self-check failed: on the first batch the pipeline differs from plain training on "
            f"the same micro-batches by {comparison.relative:.2g} relative to its values, and at "
            f"most {tolerance:g} is rounding. {advice}\n{comparison}"
        )
    line = f"self-check: as one device to {comparison.relative:.1g}"
    if whole is None:
        return line, ""
    line += " with the same micro-batches"
    if whole.agrees:
        return f"{line}, to {whole.relative:.1g} with the undivided batch", ""
    if not whole.causes:
        return "", (
            "the self-check failed: on the first batch the pipeline differs from plain training on "
            f"the undivided batch by {whole.relative:.2g} relative to its values, and this model "
            "has no known cause of that. --micro-batches 1 trains on undivided batches. "
            f"{advice}\n{comparison}"
        )
    return f"{line}; the undivided batch differs: {'; '.join(whole.causes)}", ""
