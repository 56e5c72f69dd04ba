"""The flags that name a model and its data, the same for every command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from penstock.cli.flags.flag_values import named_values
from penstock.option import options_of
from penstock.training.config import TrainConfig

_HELP = {entry.name: facts.help for entry, facts in options_of(TrainConfig)}


def complete_models() -> list[str]:
    """Return the names of the zoo, for shell completion."""
    from penstock.zoo.catalogue import MODELS

    return list(MODELS.entries())


Model = Annotated[
    str | None, typer.Option("--model", help=_HELP["model"], autocompletion=complete_models)
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model-option", metavar="NAME=VALUE", help=_HELP["model_options"]),
]
Data = Annotated[
    str | None, typer.Option("--data", help=f"{_HELP['data']} Default: one that suits the model.")
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data-option", metavar="NAME=VALUE", help=_HELP["data_options"]),
]
LossName = Annotated[str | None, typer.Option("--loss", help=_HELP["loss"])]
Image = Annotated[int | None, typer.Option("--image", help=f"{_HELP['image']} Default: 32.")]
Channels = Annotated[
    int | None, typer.Option("--channels", help=f"{_HELP['channels']} Default: 3.")
]
Tokens = Annotated[int | None, typer.Option("--tokens", help=f"{_HELP['tokens']} Default: 64.")]


@dataclass(frozen=True)
class ModelFlags:
    """The values of the flags; None where a flag is not set."""

    model: Model = None
    model_option: ModelOption = None
    data: Data = None
    data_option: DataOption = None
    loss: LossName = None
    image: Image = None
    channels: Channels = None
    tokens: Tokens = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that the flags set, by the names of the fields of `TrainConfig`.

        Raises:
            SettingError: a text `name=value` cannot be parsed.
        """
        values = {
            "model": self.model,
            "model_options": named_values("model-option", self.model_option) or None,
            "data": self.data,
            "data_options": named_values("data-option", self.data_option) or None,
            "loss": self.loss,
            "image": self.image,
            "channels": self.channels,
            "tokens": self.tokens,
        }
        return {name: value for name, value in values.items() if value is not None}


def with_model_flags(
    *, omit: Collection[str] = (), default_model: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the parameter `flags` of a command by a flag for each field
    of `ModelFlags`. Typer reads the flags of a command from its signature.

    Args:
        omit: names of the fields that the command has no flag for; they stay None.
        default_model: the model without --model.
    """
    hints = get_type_hints(ModelFlags, include_extras=True)
    names = [name for name in hints if name not in omit]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        """Return the command with the flags."""

        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            """Collect the values of the flags and run the command."""
            values = {name: kwargs.pop(name) for name in names}
            command(*args, flags=ModelFlags(**values), **kwargs)

        parameters: list[inspect.Parameter] = []
        signature = inspect.signature(command, eval_str=True)
        for parameter in signature.parameters.values():
            if parameter.name != "flags":
                parameters.append(parameter)
                continue
            for name in names:
                default = default_model if name == "model" else None
                parameters.append(
                    parameter.replace(name=name, annotation=hints[name], default=default)
                )
        vars(run)["__signature__"] = signature.replace(parameters=parameters)
        return run

    return decorate
