"""The zoo's models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import SettingError, did_you_mean
from penstock.registry import Registered, Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Its modules import torch where a model is made, so that facts and names load without it.
MODELS: Registry[Callable[..., nn.Sequential]] = Registry("model", "penstock.zoo")
register = MODELS.register


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that are known before it is made.

    Attributes:
        name: of the model.
        parameters: number of elements in all parameters at the default options.
        options: every option's default, by name.
        input, output: shapes of a call's input and output, in terms of the options.
        source: the paper.
        task: what it can learn, as data sets call it: "classify", "next_token" or "translate".
    """

    name: str
    parameters: int
    options: dict[str, object]
    input: str
    output: str
    source: str
    task: str = ""

    def __post_init__(self) -> None:
        if not self.task:
            task = "next_token" if "vocabulary" in self.options else "classify"
            object.__setattr__(self, "task", task)


def models() -> dict[str, ModelFacts]:
    """Return the facts of every model, by name."""
    facts = {}
    for name, entry in MODELS.entries().items():
        options = _options(entry)
        # The call checks that the registered facts are the fields of ModelFacts.
        registered: dict[str, Any] = dict(entry.facts)
        facts[name] = ModelFacts(name=name, options=options, **registered)
    return facts


def model(
    name: str, *, device: str | torch.device | None = None, **options: object
) -> nn.Sequential:
    """Make the model called `name`, with fresh weights that depend only on torch's random state.

    The Sequential may contain Sequentials; its layers, in the order of execution, are the leaves of
    that tree. Every submodule that owns parameters or buffers can reinitialise them by its own
    `reset_parameters()`, so that a model made on the meta device is materialised one layer at a
    time.

    >>> model("mlp", device="meta", layers=2).fc2
    NormalLinear(in_features=64, out_features=10, bias=True, std=0.125)

    Args:
        name: one of `models()`.
        device: where its tensors are made; "meta" allocates no memory. None means torch's current
            default.
        options: the model's own options; see its docstring and `models()[name].options`.

    Raises:
        UnknownName: no model has that name.
        SettingError: the model has no such option, the option's value is invalid, or torch knows no
            such device.
    """
    import torch

    entry = MODELS.find(name)
    defaults = _options(entry)
    for option in options:
        if option not in defaults:
            hint = did_you_mean(option, defaults)
            raise SettingError(
                f"{entry.name} has no option {option!r}.{hint} It has: {', '.join(defaults)}"
            )
    try:
        device_context = nullcontext() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError(
            f"torch knows no device {device!r}; write for example 'cpu', 'cuda:0' or 'meta'"
        ) from error
    with device_context:
        return entry.make(**options)


def _options(entry: Registered[Callable[..., nn.Sequential]]) -> dict[str, object]:
    """Return the options of a registered model with their defaults."""
    return {
        option: parameter.default
        for option, parameter in inspect.signature(entry.make).parameters.items()
    }


def check_counts(model_name: str, **counts: int) -> None:
    """Refuse a count that is below 1.

    Raises:
        SettingError: one of `counts` is not a whole number of 1 or more; the message names it.
    """
    for option, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SettingError(
                f"{model_name} takes {option} of 1 or more, a whole number, not {count!r}"
            )


def check_image(model_name: str, image: int) -> None:
    """Refuse an image size that the model is not defined for.

    Raises:
        SettingError: it is neither 224 nor 32 pixels.
    """
    if not isinstance(image, int) or image not in (224, 32):
        raise SettingError(
            f"{model_name} takes image=224 (as in the paper) or image=32 (CIFAR), pixels a side, "
            f"not {image!r}"
        )


def check_dropout(model_name: str, dropout: float) -> None:
    """Refuse an invalid dropout probability.

    Raises:
        SettingError: it is not a number from 0 to less than 1.
    """
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise SettingError(f"{model_name} takes dropout from 0 to less than 1, not {dropout!r}")
