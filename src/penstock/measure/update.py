"""Time gradient accumulation over the micro-batches of a batch, and the optimizer's step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.measure.stopwatch import stopwatch_for

_REPEATS = 5

#: Numbers written before a step is timed, to flush the caches: in training a step follows whole
#: micro-batches.
_FLUSH_NUMBERS = 2**24


@dataclass(frozen=True)
class UpdateSeconds:
    """Seconds of gradient accumulation and of a step of SGD with momentum.

    Attributes:
        fixed_s: of a step, whatever its size.
        s_per_byte: of a step, per byte of parameters.
        accumulate_s_per_byte: of adding one micro-batch's gradients to the previous ones.
        parameter_bytes: number of bytes that were measured.
    """

    fixed_s: float
    s_per_byte: float
    accumulate_s_per_byte: float
    parameter_bytes: int

    @classmethod
    def combine(cls, parts: Sequence[UpdateSeconds]) -> UpdateSeconds:
        """Combine measurements of several parts of a model, weighted by their size."""
        total = sum(part.parameter_bytes for part in parts)

        def mean(name: str) -> float:
            """Return the mean of a field, weighted by bytes."""
            if not total:
                return 0.0
            weighted = [getattr(part, name) * part.parameter_bytes for part in parts]
            return float(sum(weighted)) / total

        fixed = statistics.fmean(part.fixed_s for part in parts)
        return cls(fixed, mean("s_per_byte"), mean("accumulate_s_per_byte"), total)


def measure_update(modules: Sequence[nn.Module], device: torch.device) -> UpdateSeconds:
    """Time accumulation and step on all parameters of some layers together.

    Small tensors cost more per byte than large ones, and all together they are as far from the
    cache as in training. Their gradients are lost; the values stay.
    """
    trainable: dict[int, nn.Parameter] = {}
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                trainable[id(parameter)] = parameter
    parameters = list(trainable.values())
    total = sum(parameter.nbytes for parameter in parameters)
    tiny = nn.Parameter(torch.zeros(1, device=device))
    flush_buffer = torch.zeros(_FLUSH_NUMBERS, device=device)
    fixed_s = _step_seconds([tiny], flush_buffer)
    if not total:
        return UpdateSeconds(fixed_s, 0.0, 0.0, 0)
    step_s = _step_seconds(parameters, flush_buffer)
    accumulate_s = _accumulation_seconds(parameters, flush_buffer)
    return UpdateSeconds(fixed_s, max(step_s - fixed_s, 0.0) / total, accumulate_s / total, total)


def _step_seconds(parameters: list[nn.Parameter], flush_buffer: Tensor) -> float:
    """Return the seconds of one step, after a first one that creates the momenta.

    The learning rate is 0, so that the values stay.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)
    stopwatch, times = stopwatch_for(flush_buffer.device), []
    for _ in range(_REPEATS + 1):
        flush_buffer += 1
        start = stopwatch.mark()
        optimizer.step()
        times += stopwatch.seconds([(start, stopwatch.mark())])
    return statistics.median(times[1:])


def _accumulation_seconds(parameters: list[nn.Parameter], flush_buffer: Tensor) -> float:
    """Return the seconds of adding newly computed gradients to all, as a backward does."""
    stopwatch, times = stopwatch_for(flush_buffer.device), []
    for _ in range(_REPEATS + 1):
        spans = []
        flush_buffer += 1
        for parameter in parameters:
            assert parameter.grad is not None
            new_gradient = torch.zeros_like(parameter)
            start = stopwatch.mark()
            parameter.grad += new_gradient
            spans.append((start, stopwatch.mark()))
        times.append(sum(stopwatch.seconds(spans)))
    for parameter in parameters:
        parameter.grad = None
    return statistics.median(times[1:])
