"""What happens to gradients: adding them up over the micro-batches of a batch, and the optimizer's
step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.measure.stopwatch import stopwatch_for

_REPEATS = 5

#: Numbers that are touched before a step is timed: more than caches hold, since a step comes after
#: whole micro-batches.
_FLUSHED = 2**24


@dataclass(frozen=True)
class UpdateSeconds:
    """Seconds of a step of SGD with momentum: whatever its size, and per byte of parameters; and of
    adding one micro-batch's gradients to those before it, per byte of them; `parameter_bytes` is
    how many were measured.
    """

    fixed_s: float
    s_per_byte: float
    accumulate_s_per_byte: float
    parameter_bytes: int

    @classmethod
    def together(cls, parts: Sequence[UpdateSeconds]) -> UpdateSeconds:
        """That of several parts of a model, which are large and small."""
        total = sum(part.parameter_bytes for part in parts)

        def mean(name: str) -> float:
            return (
                sum(getattr(part, name) * part.parameter_bytes for part in parts) / total
                if total
                else 0.0
            )

        fixed = statistics.fmean(part.fixed_s for part in parts)
        return cls(fixed, mean("s_per_byte"), mean("accumulate_s_per_byte"), total)


def measure_update(modules: Sequence[nn.Module], device: torch.device) -> UpdateSeconds:
    """Time it on all parameters of some layers together.

    Small tensors cost more per byte than large ones, and all at once they are as far from the cache
    as in training. Their gradients are lost; the values stay.
    """
    parameters = list(
        {
            id(each): each
            for module in modules
            for each in module.parameters()
            if each.requires_grad
        }.values()
    )
    total = sum(parameter.nbytes for parameter in parameters)
    trifle = nn.Parameter(torch.zeros(1, device=device))
    flushing = torch.zeros(_FLUSHED, device=device)
    fixed = _step_seconds([trifle], flushing)
    if not total:
        return UpdateSeconds(fixed, 0.0, 0.0, 0)
    whole = _step_seconds(parameters, flushing)
    return UpdateSeconds(
        fixed,
        max(whole - fixed, 0.0) / total,
        _accumulating_seconds(parameters, flushing) / total,
        total,
    )


def _step_seconds(parameters: list[nn.Parameter], flushing: Tensor) -> float:
    """One step, after one that has made the momenta; it has a rate of 0, so that the values stay."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    stopwatch, times = stopwatch_for(flushing.device), []
    for _ in range(_REPEATS + 1):
        flushing += 1
        start = stopwatch.mark()
        optimizer.step()
        times += stopwatch.seconds([(start, stopwatch.mark())])
    return statistics.median(times[1:])


def _accumulating_seconds(parameters: list[nn.Parameter], flushing: Tensor) -> float:
    """Adding to every gradient what has just been made beside it, as a backward does."""
    stopwatch, times = stopwatch_for(flushing.device), []
    for _ in range(_REPEATS + 1):
        spans = []
        flushing += 1
        for parameter in parameters:
            assert parameter.grad is not None
            made = torch.zeros_like(parameter)
            start = stopwatch.mark()
            parameter.grad += made
            spans.append((start, stopwatch.mark()))
        times.append(sum(stopwatch.seconds(spans)))
    for parameter in parameters:
        parameter.grad = None
    return statistics.median(times[1:])
