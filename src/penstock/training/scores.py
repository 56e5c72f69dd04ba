"""The scores in a model's output, and the share of them that is correct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch import float64 as torch_float64

from penstock.errors import SettingError

#: The class of targets that torch's losses leave out by default, such as padding.
IGNORED = -100


def scores_of(output: Any) -> Tensor:
    """Return the tensor of scores in a model's output: the output, its `logits`, or its first item.

    Raises:
        SettingError: there is none.
    """
    scores = output
    if isinstance(output, Mapping):
        scores = output.get("logits", next(iter(output.values()), None))
    elif not isinstance(output, Tensor):
        scores = getattr(output, "logits", None)
        if scores is None and isinstance(output, Sequence) and output:
            scores = output[0]
    if not isinstance(scores, Tensor):
        raise SettingError(
            f"the model returns a {type(output).__name__} without a tensor of scores: return a "
            "tensor, a tuple or a mapping that begins with one, or an object with logits"
        )
    return scores


def accuracy(output: Any, target: Tensor) -> float | None:
    """Return the share of correct predictions: of the class, or next token, with the highest
    score.

    Args:
        output: of the model, see `scores_of`; classes are in the last dimension, or in the second
            one as in torch's cross_entropy.
        target: integer classes.

    Returns:
        None where the targets are no classes, or do not match the scores; NaN if all targets are
        ignored.
    """
    scores = scores_of(output)
    if target.is_floating_point() or scores.dim() != target.dim() + 1:
        return None
    classes = -1 if scores.shape[:-1] == target.shape else 1
    predicted = scores.argmax(classes)
    if predicted.shape != target.shape:
        return None
    correct = (predicted.to(target.device) == target).to(torch_float64)
    return float(correct[target != IGNORED].mean())


def target_count(target: Tensor) -> int:
    """Return the number of targets that losses and accuracies count."""
    return target.numel() if target.is_floating_point() else int((target != IGNORED).sum())
