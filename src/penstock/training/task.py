"""Model and data brought together: shapes, loss and score of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from penstock.errors import SettingError
from penstock.runtime.stage import Loss
from penstock.training.config import TrainConfig
from penstock.training.data.batches import Dataset, batches
from penstock.training.data.catalogue import dataset
from penstock.zoo.catalogue import model, models
from penstock.zoo.gpt import gpt_loss

#: By task: what its samples are, and a data set that is always at hand.
_TAKES = {"classify": "images", "next_token": "tokens", "translate": "pairs of sequences of tokens"}
_AT_HAND = {"classify": "digits", "next_token": "text", "translate": "reversed"}


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained on what. `model` is on the meta device: no rank holds more than its own
    stages.
    """

    model: nn.Sequential
    data: Dataset
    loss: Loss

    def epoch(self, config: TrainConfig, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch, the same on every rank."""
        return batches(
            self.data.train_inputs,
            self.data.train_targets,
            config.batch,
            seed=config.seed,
            epoch=number,
        )

    def example(self) -> Tensor:
        """Inputs to measure with."""
        return self.data.train_inputs[:64]


def make_task(config: TrainConfig) -> Task:
    """Load the data and describe the model that fits it.

    Raises:
        SettingError: the model and the data do not go together, or an option is wrong.
        UnknownName, FileError, MissingExtra: see `dataset` and `model`.
    """
    known = models()
    if config.model not in known:
        model(config.model)  # says what there is
    options = known[config.model].options
    data = dataset(config.data, image=config.image, channels=config.channels, tokens=config.tokens)
    if data.task != known[config.model].task:
        raise SettingError(
            f"model {config.model} takes {_TAKES[known[config.model].task]}, but data {data.name} is "
            f"{_TAKES[data.task]}: take --data {fitting_data(config.model)}"
        )
    if "features" in options:
        data = replace(
            data, train_inputs=data.train_inputs.flatten(1), test_inputs=data.test_inputs.flatten(1)
        )
    shape = data.train_inputs.shape
    fitting: dict[str, object] = {
        "classes": data.classes,
        "vocabulary": data.classes,
        "tokens": shape[-1],
        "image": shape[-1],
        "features": shape[-1],
        "channels": shape[1] if len(shape) > 1 else 1,
    }
    chosen = {
        name: value for name, value in fitting.items() if name in options
    } | config.model_options
    made = model(config.model, device="meta", **chosen)
    return Task(made, data, cross_entropy if data.task == "classify" else gpt_loss)


def fitting_data(name: str) -> str:
    """The data set at hand whose task the model called `name` learns.

    Raises:
        UnknownName: no model has that name.
    """
    known = models()
    if name not in known:
        model(name)  # says what there is
    return _AT_HAND[known[name].task]


def accuracy(output: Tensor, target: Tensor) -> float:
    """The share of right answers: the class, or the next token, with the highest score is the
    answer.
    """
    return float((output.argmax(-1).to(target.device) == target).to(torch.float64).mean())
