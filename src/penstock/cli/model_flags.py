"""The flags that name a model and its data, the same for every command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.options import named_values
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
    list[str] | None, typer.Option("--model-option", help=_HELP["model_options"])
]
Data = Annotated[
    str | None, typer.Option("--data", help=f"{_HELP['data']} Default: one that suits the model.")
]
DataOption = Annotated[list[str] | None, typer.Option("--data-option", help=_HELP["data_options"])]
LossName = Annotated[str | None, typer.Option("--loss", help=_HELP["loss"])]
Image = Annotated[int | None, typer.Option("--image", help=f"{_HELP['image']} Default: 32.")]
Channels = Annotated[
    int | None, typer.Option("--channels", help=f"{_HELP['channels']} Default: 3.")
]
Tokens = Annotated[int | None, typer.Option("--tokens", help=f"{_HELP['tokens']} Default: 64.")]


@dataclass(frozen=True)
class ModelFlags:
    """The values of the flags; None where a flag is not set."""

    model: str | None
    model_option: list[str] | None
    data: str | None
    data_option: list[str] | None
    loss: str | None = None
    image: int | None = None
    channels: int | None = None
    tokens: int | None = None

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
