"""All models by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from penstock.errors import SettingError
from penstock.registry import Registered, Registry

MODELS: Registry[Callable[..., nn.Sequential]] = Registry("model", "penstock.zoo")
register = MODELS.register


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is made.

    `parameters` counts the numbers in all parameters at the default options; `options` has every
    option's default by name; `input` and `output` say what one call takes and gives, in the
    options' words. `task` is what it can learn, as data sets call it: "classify", "next_token" or
    "translate".
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
            object.__setattr__(
                self, "task", "next_token" if "vocabulary" in self.options else "classify"
            )


def models() -> dict[str, ModelFacts]:
    """Every model's name and short facts."""
    return {
        name: ModelFacts(name=name, options=_options(entry), **entry.facts)  # type: ignore[arg-type]  # facts are checked by this call
        for name, entry in MODELS.entries().items()
    }


def model(
    name: str, *, device: str | torch.device | None = None, **options: object
) -> nn.Sequential:
    """Make the model called `name`, with fresh weights that depend on torch's random state alone.

    The Sequential may hold Sequentials; its layers in the order of running are the leaves of that
    tree. Every submodule that owns parameters or buffers can draw them anew by its own
    `reset_parameters()`, so that a model made on the meta device is materialised one layer at a
    time.

    >>> model("mlp", device="meta", layers=2).fc2
    NormalLinear(in_features=64, out_features=10, bias=True, std=0.125)

    Args:
        name: one of `models()`.
        device: where its tensors are made; "meta" makes no memory. None takes torch's current
        default. options: what this model takes besides; its own docstring and
        `models()[name].options` say.

    Raises:
        UnknownName: no model has that name.
        SettingError: the model has no such option, the option's value makes no sense, or torch
        knows no such device.
    """
    entry = MODELS.find(name)
    known = _options(entry)
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingError(
                f"{entry.name} has no option {option!r}.{hint} It has: {', '.join(known)}"
            )
    try:
        place = nullcontext() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError(
            f"torch knows no device {device!r}; write for example 'cpu', 'cuda:0' or 'meta'"
        ) from error
    with place:
        return entry.make(**options)


def _options(entry: Registered[Callable[..., nn.Sequential]]) -> dict[str, object]:
    return {
        option: parameter.default
        for option, parameter in inspect.signature(entry.make).parameters.items()
    }


def check_counts(model_name: str, **counts: int) -> None:
    """Refuse an option of which there must be at least one.

    Raises:
        SettingError: one of `counts` is not a whole number of 1 or more; the message names it.
    """
    for option, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SettingError(
                f"{model_name} takes {option} of 1 or more, a whole number, not {count!r}"
            )


def check_image(model_name: str, image: int) -> None:
    """Refuse a side of the input images for which the model is not drawn.

    Raises:
        SettingError: it is neither 224 nor 32 pixels.
    """
    if not isinstance(image, int) or image not in (224, 32):
        raise SettingError(
            f"{model_name} takes image=224 (as in the paper) or image=32 (CIFAR), pixels a side, not {image!r}"
        )


def check_dropout(model_name: str, dropout: float) -> None:
    """Refuse what is no probability of dropping.

    Raises:
        SettingError: it is not a number from 0 to less than 1.
    """
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise SettingError(f"{model_name} takes dropout from 0 to less than 1, not {dropout!r}")
