"""Error messages for losses that cannot be divided into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.losses.probe import Reading, Weighting

WAYS_OUT = (
    "Ways out: Pipeline(loss_weight=lambda target: ...) says how much the targets of a micro-batch "
    "count, such as (target != -100).sum(); the loss may return (sum, count); "
    "Pipeline(loss_on='batch') computes it once on the outputs of the whole batch; micro_batches=1 "
    "divides nothing"
)


def not_additive(
    reading: Reading,
    sizes: tuple[int, int],
    weights: Mapping[Weighting, tuple[float, float]],
    along_tokens: bool,
    *,
    repeated: bool = False,
) -> str:
    """Return the message for a loss that does not add up in any known way.

    Args:
        reading: the losses of two parts of a batch and of both joined.
        sizes: samples of both parts, or tokens.
        weights: of both parts, by how the loss may add up.
        along_tokens: whether the parts are slices of the same sequences.
        repeated: whether targets of the first part occur in the second too.
    """
    unit = "tokens" if along_tokens else "samples"
    mean, total = weights["shares"], weights["sums"]
    values = reading.first, reading.second
    as_mean = sum(weight * value for weight, value in zip(mean, values, strict=True))
    as_sum = sum(weight * value for weight, value in zip(total, values, strict=True))
    parts = "two parts in which the same targets occur" if repeated else "two of them"
    begin = (
        f"the loss of a batch is not made of the losses of its micro-batches: {parts}, of "
        f"{sizes[0]} and {sizes[1]} {unit}, have losses {reading.first:.6g} and "
        f"{reading.second:.6g}, both joined have {reading.joined:.6g}."
    )
    if not repeated and (reading.values_fit(mean) or reading.values_fit(total)):
        return (
            f"{begin} These values add up, their gradients do not. Either the loss is a nonlinear "
            f"function of a mean over {unit}, or it is scaled by something that is detached from "
            "its graph and differs from micro-batch to micro-batch, such as loss / loss.detach(). "
            f"{WAYS_OUT}"
        )
    example = "a contrastive one"
    if repeated:
        example += ", or where the weight of a class depends on how often it occurs in the batch"
    return (
        f"{begin} A mean over {unit} would be {as_mean:.6g}, a sum {as_sum:.6g}. Either {unit} see "
        f"each other in the loss (as in {example}), or it is a mean over something else. "
        f"{WAYS_OUT}"
    )


def nonlinear_in_samples(function: str, along_tokens: bool) -> str:
    """Return the message for a nonlinear function of a value that was reduced over samples."""
    unit = "tokens" if along_tokens else "samples"
    return (
        f"the loss is a nonlinear function of a mean or sum over {unit}: {function.lower()} acts "
        f"on a value to which all {unit} of a batch contribute, such as (loss - b).abs() in "
        "flooding or a clamped mean. The losses of micro-batches do not add up to that of the "
        f"batch wherever the function bends. {WAYS_OUT}"
    )


def model_loss(reason: str) -> str:
    """Return the message for a loss that the model computes, in a form that is not understood."""
    return (
        "the model computes its loss itself, and how the losses of micro-batches add up to that of "
        f"the batch cannot be read from it ({reason}). Compute the loss from the model's output "
        f"instead, or say how much micro-batches count. {WAYS_OUT}"
    )


def count_differs(number: int, expected: float, count: float | None) -> str:
    """Return the message for a micro-batch with another divisor than was expected.

    Args:
        number: the micro-batch.
        expected: the expected divisor.
        count: the divisor; None if it has not been read from the device.
    """
    divisor = "another number" if count is None else f"{count:g}"
    return (
        f"the loss of micro-batch {number} is divided by {divisor}, and {expected:g} was expected: "
        "what it counts does not depend on the batch's targets alone, or not in proportion to its "
        "samples, or has changed since earlier batches, so the micro-batches cannot be weighted "
        f"before the first backward. {WAYS_OUT}"
    )


def infinite_without_weight(number: int) -> str:
    """Return the message for a sum other than 0 that is divided by 0."""
    return (
        f"the loss of micro-batch {number} is infinite, and its weight in the loss of the batch is "
        "0: it divides a sum that is not 0 by a count of 0, so the part of this sum in the loss of "
        "the batch is not known. Let the sum contain what the count counts, such as "
        f"(loss * mask).sum() / mask.sum(). {WAYS_OUT}"
    )


def smoothing_without_weight(number: int) -> str:
    """Return the message for label smoothing over targets whose class weights are all 0."""
    return (
        f"the loss smooths labels, and all targets of micro-batch {number} have a class weight of "
        "0: cross_entropy divides the smoothing by the total weight of the targets, so the part of "
        "this micro-batch in the loss of the batch cannot be computed from its own loss. Ways out: "
        "the loss may return (sum, count), such as cross_entropy(..., reduction='sum') and "
        "weight[target].sum(); Pipeline(loss_on='batch') computes it once on the outputs of the "
        "whole batch; fewer micro-batches or a class weight above 0 avoid the division"
    )


def zero_divisors(divisors: Sequence[float], whole: float) -> str:
    """Return the message for divisors of micro-batches of which one is 0 and some part is missing.

    Args:
        divisors: of the loss, by micro-batch.
        whole: the divisor of the loss of the batch.
    """
    zero = next(number for number, divisor in enumerate(divisors) if not divisor)
    return (
        f"the loss of the batch is divided by {whole:g}, and those of its micro-batches by "
        f"{sum(divisors):g} together; that of micro-batch {zero} by 0, so it cannot be computed. "
        "What the micro-batch contributes to the batch is not in its own loss, as where samples "
        f"are compared with their neighbours. {WAYS_OUT}"
    )


NO_GRAPH = (
    "the loss has no gradient: it does not depend on the output of the model, or only through "
    "detach(), item(), NumPy, no_grad() or a function without a gradient such as argmax. Nothing "
    "would be trained; plain PyTorch raises in loss.backward(). Compute the loss from the output "
    "with functions of torch that have a gradient"
)

#: Cause of a NaN in the loss of a micro-batch of which no target counts, and what to do.
NO_TARGETS = "all its targets are -100 or False, as in padding"
NO_TARGETS_ADVICE = (
    "A mean over no targets is 0 / 0, and the rest of the loss is divided by something else, so "
    "that no weight of this micro-batch is right. Pipeline(loss_on='batch') computes the loss once "
    "on the outputs of the whole batch; fewer micro-batches or another order of the samples leave "
    "targets in each of them"
)
