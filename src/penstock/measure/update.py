"""Time gradient accumulation over the micro-batches of a batch, and the optimizer's step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from penstock.measure.stopwatch import stopwatch_for
from penstock.profile.profile import step_key

_REPEATS = 5

#: Optimizers whose steps are compared with that of SGD with momentum. Others are estimated, see
#: `Profile.step_ratio`.
_COMPARED: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    step_key("SGD", 0.0): partial(torch.optim.SGD, lr=0.0),
    step_key("Adam", 2.0): partial(torch.optim.Adam, lr=0.0),
    step_key("AdamW", 2.0): partial(torch.optim.AdamW, lr=0.0),
    step_key("RMSprop", 1.0): partial(torch.optim.RMSprop, lr=0.0),
    step_key("Adagrad", 1.0): partial(torch.optim.Adagrad, lr=0.0),
    step_key("Adam", 2.0, fused=True): partial(torch.optim.Adam, lr=0.0, fused=True),
    step_key("AdamW", 2.0, fused=True): partial(torch.optim.AdamW, lr=0.0, fused=True),
}

#: Bytes of parameters on which optimizers are compared: more than caches of one core hold, and few
#: enough that all of them together take less than a second on a CPU.
_COMPARED_BYTES = 2**24

#: The gradients that are not 0 while optimizers are compared.
_GRADIENT = 1e-3

#: Timed steps of every optimizer that is compared.
_COMPARED_REPEATS = 3

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
        step_ratios: see `Profile`.
    """

    fixed_s: float
    s_per_byte: float
    accumulate_s_per_byte: float
    parameter_bytes: int
    step_ratios: dict[str, float] = field(default_factory=dict)

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
        ratios: dict[str, list[float]] = {}
        for part in parts:
            for key, ratio in part.step_ratios.items():
                ratios.setdefault(key, []).append(ratio)
        step_ratios = {key: statistics.median(values) for key, values in ratios.items()}
        return cls(fixed, mean("s_per_byte"), mean("accumulate_s_per_byte"), total, step_ratios)


def measure_update(modules: Sequence[nn.Module], device: torch.device) -> UpdateSeconds:
    """Time accumulation and step on all parameters of some layers together.

    Small tensors cost more per byte than large ones, and all together they are as far from the
    cache as in training. Optimizers are compared with as many gradients of 0 as the parameters have
    now, from a backward. Their gradients are lost; the values stay.
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
    zero_share = _zero_share(parameters)
    fixed_s = _step_seconds([tiny], flush_buffer)
    if not total:
        return UpdateSeconds(fixed_s, 0.0, 0.0, 0)
    step_s = _step_seconds(parameters, flush_buffer)
    accumulate_s = _accumulation_seconds(parameters, flush_buffer)
    s_per_byte = max(step_s - fixed_s, 0.0) / total
    ratios = _step_ratios(parameters, zero_share)
    return UpdateSeconds(fixed_s, s_per_byte, accumulate_s / total, total, ratios)


def _zero_share(parameters: Sequence[nn.Parameter]) -> float:
    """Return which part of the gradients is exactly 0; 0 if there are none."""
    total = zeros = 0
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or grad.layout != torch.strided:
            continue
        total += grad.numel()
        zeros += grad.numel() - int(torch.count_nonzero(grad))
    return zeros / total if total else 0.0


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum, whose learning rate of 0 keeps the values."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def _step_seconds(parameters: list[nn.Parameter], flush_buffer: Tensor) -> float:
    """Return the seconds of one step of SGD with momentum."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    seconds = _optimizer_seconds(_momentum(parameters), _REPEATS, flush_buffer)
    return statistics.median(seconds)


def _optimizer_seconds(
    optimizer: torch.optim.Optimizer, repeats: int, flush_buffer: Tensor | None = None
) -> list[float]:
    """Return the seconds of steps, after a first one that creates the state."""
    device = optimizer.param_groups[0]["params"][0].device
    stopwatch, times = stopwatch_for(device), []
    for _ in range(repeats + 1):
        if flush_buffer is not None:
            flush_buffer += 1
        start = stopwatch.mark()
        optimizer.step()
        times += stopwatch.seconds([(start, stopwatch.mark())])
    return times[1:]


def _step_ratios(parameters: list[nn.Parameter], zero_share: float) -> dict[str, float]:
    """Return the seconds of steps of other optimizers over those of SGD with momentum, by
    `step_key`.

    All are timed on the same few parameters, since a large model may have no room for their state.
    Caches are not flushed: what that adds is in `fixed_s`, for any optimizer.

    The square root of 0 takes seven times as long as others on a CPU (torch 2.13, MKL), so that the
    step of Adam takes twice as long on second moments of 0: on rows of an embedding that no batch
    has used, and on weights of units that are never active. After three batches these were 42 % of
    a VGG-19 and 34 % of a GPT.

    Args:
        parameters: from which a sample is taken.
        zero_share: part of the gradients that is 0, and with them their averages.
    """
    sample = _sample(parameters)
    for parameter in sample:
        parameter.grad = torch.full_like(parameter, _GRADIENT)
        parameter.grad[: round(zero_share * parameter.numel())] = 0
    # The fastest of a few, since other programs lengthen single steps.
    reference_s = min(_optimizer_seconds(_momentum(sample), _COMPARED_REPEATS))
    ratios = {}
    for key, make in _COMPARED.items():
        try:
            seconds = min(_optimizer_seconds(make(sample), _COMPARED_REPEATS))
        except (RuntimeError, ValueError):
            continue  # fused steps do not exist for every device and dtype
        if reference_s > 0 and seconds > 0:
            ratios[key] = seconds / reference_s
    return ratios


def _sample(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return copies of every k-th parameter, of large ones the first part, within a limit."""
    total = sum(parameter.nbytes for parameter in parameters)
    step = -(-total // _COMPARED_BYTES)
    room, sample = _COMPARED_BYTES, []
    for parameter in parameters[::step]:
        numbers = min(parameter.numel(), room // parameter.element_size())
        if numbers:
            sample.append(nn.Parameter(parameter.detach().flatten()[:numbers].clone()))
            room -= numbers * parameter.element_size()
    return sample


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
