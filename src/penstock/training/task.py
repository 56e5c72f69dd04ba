"""Task: model, data and loss of a run, with matching shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from penstock.errors import SettingError
from penstock.stage.stage import Loss
from penstock.training.config import TrainConfig
from penstock.training.data.batches import Dataset, batches
from penstock.training.data.catalogue import dataset
from penstock.zoo.catalogue import ModelFacts, model, models
from penstock.zoo.gpt import gpt_loss

#: By task: its samples, and a data set that needs no file.
_SAMPLES = {
    "classify": "images",
    "next_token": "tokens",
    "translate": "pairs of sequences of tokens",
}
_DEFAULT_DATA = {"classify": "digits", "next_token": "text", "translate": "reversed"}


@dataclass(frozen=True, eq=False)
class Task:
    """Model, data and loss of a run. `model` is on the meta device: no rank allocates more than its
    own stages.
    """

    model: nn.Sequential
    data: Dataset
    loss: Loss

    def epoch(self, config: TrainConfig, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of one epoch, the same on every rank."""
        return batches(
            self.data.train_inputs,
            self.data.train_targets,
            config.batch,
            seed=config.seed,
            epoch=number,
        )

    def example(self) -> Tensor:
        """Return inputs for measurements."""
        return self.data.train_inputs[:64]


def make_task(config: TrainConfig) -> Task:
    """Load the data and describe the model that fits it.

    Raises:
        SettingError: the model cannot learn from the data, or an option is invalid.
        UnknownName, FileError, MissingExtra: see `dataset` and `model`.
    """
    facts = _model_facts(config.model)
    options = facts.options
    data = dataset(config.data, image=config.image, channels=config.channels, tokens=config.tokens)
    if data.task != facts.task:
        raise SettingError(
            f"model {config.model} takes {_SAMPLES[facts.task]}, but data {data.name} is "
            f"{_SAMPLES[data.task]}: use --data {default_data(config.model)}"
        )
    if "features" in options:
        data = replace(
            data, train_inputs=data.train_inputs.flatten(1), test_inputs=data.test_inputs.flatten(1)
        )
    shape = data.train_inputs.shape
    from_data: dict[str, object] = {
        "classes": data.classes,
        "vocabulary": data.classes,
        "tokens": shape[-1],
        "image": shape[-1],
        "features": shape[-1],
        "channels": shape[1] if len(shape) > 1 else 1,
    }
    model_options = {name: value for name, value in from_data.items() if name in options}
    model_options |= config.model_options
    network = model(config.model, device="meta", **model_options)
    return Task(network, data, cross_entropy if data.task == "classify" else gpt_loss)


def default_data(name: str) -> str:
    """Return the default data set of the task that the model called `name` learns.

    Raises:
        UnknownName: no model has that name.
    """
    return _DEFAULT_DATA[_model_facts(name).task]


def _model_facts(name: str) -> ModelFacts:
    """Return the facts of a model. Raises UnknownName if there is none of that name."""
    facts = models()
    if name not in facts:
        model(name)  # raises UnknownName, with the known names
    return facts[name]


def accuracy(output: Tensor, target: Tensor) -> float:
    """Return the share of correct predictions: of the class, or next token, with the highest
    score.
    """
    return float((output.argmax(-1).to(target.device) == target).to(torch.float64).mean())
