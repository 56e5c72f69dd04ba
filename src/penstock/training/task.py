"""Task: model, data and loss of a run, with matching shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from penstock.runtime.batch_needs import BatchReader
from penstock.runtime.pipeline import Pipeline
from penstock.stage.stage import Loss
from penstock.tracing.traced_chain import TracedChain, chain
from penstock.training.config import TrainConfig
from penstock.training.data.batches import Dataset, batches
from penstock.training.data.catalogue import dataset
from penstock.training.sources.model_sources import parse_loss, parse_model
from penstock.training.sources.user_code import is_reference
from penstock.training.sources.user_data import load_user_data


@dataclass(frozen=True, eq=False)
class Task:
    """Model, data and loss of a run.

    A model of the zoo is on the meta device: no rank allocates more than its own stages.
    """

    model: nn.Module | Sequence[nn.Module]
    data: Dataset
    loss: Loss

    @cached_property
    def chain(self) -> TracedChain:
        """The layers of the model. A model that is no nn.Sequential is traced, once.

        Raises:
            ChainError: it cannot be traced.
        """
        return chain(self.model, self.example()[:2])

    def epoch(self, config: TrainConfig, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of one epoch, the same on every rank."""
        return batches(
            self.data.train_inputs,
            self.data.train_targets,
            config.batch,
            seed=config.seed,
            epoch=number,
        )

    def reader(self, pipe: Pipeline, config: TrainConfig, number: int) -> BatchReader:
        """Return the batches of `epoch`, of which each process reads what its ranks need."""
        return pipe.reader(
            self.data.train_inputs,
            self.data.train_targets,
            batch=config.batch,
            seed=config.seed,
            epoch=number,
        )

    def example(self) -> Tensor:
        """Return inputs for measurements."""
        return self.data.train_inputs[:64]


def make_task(config: TrainConfig) -> Task:
    """Load the data and make the model that fits it.

    Raises:
        SettingError: the model cannot learn from the data, or an option is invalid.
        UnknownName, FileError, MissingExtra: see `dataset` and `parse_model`.
    """
    source = parse_model(config.model)
    model_and_data = source.make(load_data(config), config.model_options, config.seed)
    loss = model_and_data.loss if config.loss is None else parse_loss(config.loss)
    return Task(model_and_data.network, model_and_data.data, loss)


def load_data(config: TrainConfig) -> Dataset:
    """Load the data set of a run: one of Penstock, or what a user's factory returns.

    Raises:
        SettingError, UnknownName, FileError, MissingExtra: see `dataset` and `load_user_data`.
    """
    sizes = {"image": config.image, "channels": config.channels, "tokens": config.tokens}
    if not is_data_factory(config.data):
        return dataset(config.data, **sizes, **config.data_options)
    return load_user_data(config.data, config.data_options, {**sizes, "seed": config.seed})


def is_data_factory(text: str) -> bool:
    """Whether a text names a user's factory; `text:book` is Penstock's data set with a path."""
    from penstock.training.data.catalogue import DATASETS

    return is_reference(text) and text.partition(":")[0] not in DATASETS.entries()


def data_name(text: str) -> str:
    """Return a data set's name in characters that every file system takes."""
    return text.replace(":", "-") if is_data_factory(text) else text.partition(":")[0]
