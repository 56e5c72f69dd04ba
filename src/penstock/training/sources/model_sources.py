"""How the model of a run is written: a name of the zoo, `package.module:factory`, or
`hf:config.json`. Every command takes models in these forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss

from penstock.errors import SettingError, did_you_mean
from penstock.stage.stage import Loss
from penstock.training.data.batches import Dataset
from penstock.training.sources import hugging_face
from penstock.training.sources.user_code import call_factory, is_reference, load_attribute
from penstock.zoo.catalogue import ModelFacts, model, models
from penstock.zoo.gpt import gpt_loss

#: By task: its samples, and a data set that needs no file.
_SAMPLES = {
    "classify": "images",
    "next_token": "tokens",
    "translate": "pairs of sequences of tokens",
}
_DEFAULT_DATA = {"classify": "digits", "next_token": "text", "translate": "reversed"}

#: By task, the loss of a model that returns scores.
_LOSSES: dict[str, Loss] = {
    "classify": cross_entropy,
    "next_token": gpt_loss,
    "translate": gpt_loss,
    "regress": mse_loss,
}
_HUGGING_FACE = "hf:"


@dataclass(frozen=True, eq=False)
class MadeModel:
    """A model that has been made, the data in the form that it takes, and its usual loss."""

    network: nn.Module | Sequence[nn.Module]
    data: Dataset
    loss: Loss


class ModelSource(Protocol):
    """A way to write a model.

    Attributes:
        name: for the folder of a run.
        default_data: name of a data set that the model can learn from; None if unknown.
    """

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def default_data(self) -> str | None:
        """See the class."""

    def make(self, data: Dataset, options: Mapping[str, Any], seed: int) -> MadeModel:
        """Make the model.

        Args:
            data: that it learns from.
            options: of the model.
            seed: of its weights.

        Raises:
            SettingError: the model cannot learn from the data, or an option is invalid.
        """


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo, on the meta device: no rank allocates more than its own stages."""

    facts: ModelFacts

    @property
    def name(self) -> str:
        """Its name in the zoo."""
        return self.facts.name

    @property
    def default_data(self) -> str | None:
        """The data set of its task that needs no file."""
        return _DEFAULT_DATA[self.facts.task]

    def make(self, data: Dataset, options: Mapping[str, Any], seed: int) -> MadeModel:  # noqa: ARG002 - weights are made by each stage
        """See `ModelSource`."""
        if data.task != self.facts.task:
            samples = _SAMPLES.get(data.task, "numbers")
            raise SettingError(
                f"model {self.name} takes {_SAMPLES[self.facts.task]}, but data {data.name} is "
                f"{samples}: use --data {self.default_data}"
            )
        if "features" in self.facts.options:
            data = replace(
                data,
                train_inputs=data.train_inputs.flatten(1),
                test_inputs=data.test_inputs.flatten(1),
            )
        sizes = _sizes(data)
        data_sizes = {name: value for name, value in sizes.items() if name in self.facts.options}
        network = model(self.name, device="meta", **{**data_sizes, **options})
        return MadeModel(network, data, _LOSSES[data.task])


@dataclass(frozen=True)
class UserModel:
    """A model that a user's factory returns, written `package.module:factory`."""

    reference: str

    @property
    def name(self) -> str:
        """The reference in characters that every file system takes."""
        return self.reference.replace(":", "-")

    @property
    def default_data(self) -> str | None:
        """None: it is the user who knows."""
        return None

    def make(self, data: Dataset, options: Mapping[str, Any], seed: int) -> MadeModel:
        """See `ModelSource`. Parameters of the factory without a default get sizes of the data."""
        factory = load_attribute(self.reference, "--model")
        # Forked, so that the caller's random numbers do not depend on the model.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = factory
            if not isinstance(factory, nn.Module):
                network = call_factory(factory, self.reference, "--model", options, _sizes(data))
        is_list = isinstance(network, list | tuple) and len(network) > 0
        modules = network if is_list else [network]
        for module in modules:
            if not isinstance(module, nn.Module):
                raise SettingError(
                    f"--model {self.reference} returned a {type(network).__name__}, and must "
                    "return an nn.Module, or a list of modules that run one after another"
                )
        if not any(module.training for module in modules):
            raise SettingError(
                f"--model {self.reference} returned a model in evaluation mode, as from_pretrained "
                "does, and would be trained without dropout: call model.train() in the factory, "
                "and eval() on the parts that shall stay as they are"
            )
        return MadeModel(network, data, _LOSSES[data.task])


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model of the transformers library, written `hf:config.json` or `hf:folder`."""

    path: str

    @property
    def name(self) -> str:
        """The path in characters that every file system takes."""
        words = re.sub(r"[^\w.-]+", "-", self.path.removesuffix(".json"))
        return f"hf-{words.strip('-.')}"

    @property
    def default_data(self) -> str | None:
        """Text: most of these models are language models."""
        return "text"

    def make(self, data: Dataset, options: Mapping[str, Any], seed: int) -> MadeModel:
        """See `ModelSource`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = hugging_face.make_model(self.path, data, options)
        is_text = data.task == "next_token"
        loss = hugging_face.token_loss if is_text else hugging_face.class_loss
        return MadeModel(network, data, loss)


def parse_model(text: str) -> ModelSource:
    """Return the model that a text names.

    Raises:
        UnknownName: the text is no name of the zoo, and has no other form.
    """
    if text.startswith(_HUGGING_FACE):
        return HuggingFaceModel(text.removeprefix(_HUGGING_FACE))
    if is_reference(text):
        return UserModel(text)
    facts = models()
    if text not in facts:
        model(text)  # raises UnknownName, with the known names
    return ZooModel(facts[text])


def default_data(text: str) -> str:
    """Return the data set that a model learns from if the user names none.

    Raises:
        UnknownName: there is no such model.
        SettingError: the user has to name it.
    """
    data = parse_model(text).default_data
    if data is None:
        raise SettingError(
            f"--model {text} needs --data: a data set such as digits or text, or "
            "package.module:factory"
        )
    return data


def parse_loss(text: str) -> Loss:
    """Return the loss that a text names: one of torch.nn.functional, or `package.module:function`.

    Raises:
        SettingError: there is none of that name, or it is no function.
    """
    if not is_reference(text):
        names = [name for name in dir(functional) if name.endswith(("_loss", "cross_entropy"))]
        if text not in names:
            hint = did_you_mean(text, names)
            raise SettingError(
                f"--loss {text}: name a loss of torch.nn.functional, such as cross_entropy, or "
                f"package.module:function.{hint}"
            )
        named: Loss = getattr(functional, text)
        return named
    function: Callable[..., Any] = load_attribute(text, "--loss")
    if isinstance(function, type) and issubclass(function, nn.Module):
        function = call_factory(function, text, "--loss", {}, {})
    if not callable(function):
        raise SettingError(f"--loss {text} is not a function but of type {type(function).__name__}")
    return function


def _sizes(data: Dataset) -> dict[str, object]:
    """Return the sizes of a data set, by the names of the options that take them."""
    shape = data.train_inputs.shape
    return {
        "classes": data.classes,
        "vocabulary": data.classes,
        "tokens": shape[-1],
        "image": shape[-1],
        "features": shape[-1],
        "channels": shape[1] if len(shape) > 1 else 1,
    }
