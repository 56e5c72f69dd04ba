"""Models of the transformers library from a config file on this machine. Nothing is downloaded, and
no code that comes with a model is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from penstock.cluster.local import available_memory_bytes
from penstock.errors import FileError, MissingExtra, SettingError
from penstock.files.read import read_json
from penstock.files.text import one_line, quote, shorten
from penstock.training.data.batches import Dataset
from penstock.training.scores import scores_of
from penstock.units import format_bytes
from penstock.zoo.gpt import gpt_loss

#: Weights in a folder of Hugging Face.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

#: Tokens of the sequence on which `_check_causal` compares predictions, and the largest difference
#: that rounding makes, relative to the largest score. A token that is attended to makes one of
#: 1e-3 and more.
_CAUSAL_TOKENS, _CAUSAL_TOLERANCE = 8, 1e-4

#: Most layers of a model: making 10,000 of them takes a minute.
_MAX_LAYERS = 10_000


def make_model(path: str, data: Dataset, options: Mapping[str, Any]) -> nn.Module:
    """Make a model of the transformers library.

    Args:
        path: a config.json, whose model gets random weights; or a folder that holds one and
            possibly weights in safetensors, which are then loaded.
        data: that the model learns from.
        options: attributes of the configuration to change.

    Raises:
        FileError: the file cannot be read, or is no configuration.
        MissingExtra: transformers is not installed.
        SettingError: an option is unknown, no model of this kind can learn from the data, or a
            model that is to predict the next token sees it.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "models", "--model hf:…") from error
    auto_class_name = _auto_class_name(data)
    if auto_class_name is None:
        raise SettingError(
            f"--model hf:{path} learns to classify images or sequences of tokens, or to predict the "
            f"next token, and data {data.name} is for none of these; write a factory, --model "
            "package.module:factory"
        )
    place = Path(path).expanduser()
    config_file = place / "config.json" if place.is_dir() else place
    config = _configuration(config_file, options)
    _fit_to_data(config, config_file, data)
    auto_class = getattr(transformers, auto_class_name)
    _check_size(config, auto_class, path)
    has_weights = place.is_dir() and any((place / name).exists() for name in _WEIGHTS)
    try:
        if has_weights:
            model: nn.Module = auto_class.from_pretrained(
                place,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            )
        else:
            model = auto_class.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise _refusal(path, error) from error
    model = model.float()
    if data.task == "next_token":
        _check_causal(model, data, path)
    # `from_pretrained` leaves the model in evaluation mode, without dropout.
    return model.train()


def _auto_class_name(data: Dataset) -> str | None:
    """Return the name of the class of transformers that makes the model for a data set, if any."""
    if data.task == "next_token":
        return "AutoModelForCausalLM"
    if data.task != "classify":
        return None
    if _has_tokens(data):
        return "AutoModelForSequenceClassification"
    return "AutoModelForImageClassification"


def _has_tokens(data: Dataset) -> bool:
    """Whether the inputs of a data set are sequences of tokens."""
    return not data.train_inputs.is_floating_point() and data.train_inputs.dim() == 2


@torch.no_grad()
def _check_causal(model: nn.Module, data: Dataset, path: str) -> None:
    """Refuse a model whose prediction of a token depends on that token, such as an encoder.

    Its loss would fall to zero, because it learns to copy. Transformers makes such a model of the
    configuration of an encoder.

    Raises:
        SettingError: it does.
    """
    tokens = data.train_inputs[:1, :_CAUSAL_TOKENS]
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % data.classes
    model.eval()
    try:
        # Only the last token differs, so no earlier prediction may change.
        before, after = (scores_of(model(inputs))[:, :-1] for inputs in (tokens, changed))
    except Exception:  # noqa: BLE001 - of the model, which the first trace will report
        return
    if float((after - before).abs().max()) > _CAUSAL_TOLERANCE * float(before.abs().max()):
        raise SettingError(
            f"--model hf:{path} makes a {type(model).__name__} whose predictions of the next token "
            "depend on that token, so that it would learn to copy: it is an encoder. Give it "
            "sequences with classes (--data package.module:factory), or, if its configuration has "
            "is_decoder, set --model-option is_decoder=true"
        )


def _check_size(config: Any, auto_class: Any, path: str) -> None:
    """Refuse a model that cannot be made: it is made without memory for its weights first.

    Raises:
        SettingError: transformers cannot make it, or its weights take more than the free memory.
    """
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        raise SettingError(f"--model hf:{path} has {layers:,} layers, more than {_MAX_LAYERS:,}")
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model: nn.Module = auto_class.from_config(config, trust_remote_code=False)
        # The numbers become float32, see `make_model`.
        needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    except Exception as error:
        raise _refusal(path, error) from error
    free = available_memory_bytes()
    if needed > free:
        raise SettingError(
            f"--model hf:{path} has weights of {format_bytes(needed)}, and {format_bytes(free)} of "
            "memory are free"
        )


def _refusal(path: str, error: Exception) -> SettingError:
    """Return the refusal of a model that transformers cannot make, for whatever reason.

    It checks few of the values in a configuration, and raises what the code raises that meets them.
    """
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return SettingError(
        f"--model hf:{path}: transformers cannot make this model: {shorten(ascii(reason)[1:-1], 300)}"
    )


def _configuration(file: Path, options: Mapping[str, Any]) -> Any:
    """Read a config.json, with some attributes changed."""
    from transformers import CONFIG_MAPPING

    values = read_json(file, object, kind="configuration")
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise FileError(
            f"{file} is no configuration of a model that transformers knows: its model_type is "
            f"{shorten(repr(kind))}"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # of the class of the configuration, which checks its values
        reason = ascii(one_line(error))[1:-1]
        raise FileError(f"{file} is no configuration of {kind}: {shorten(reason)}") from error
    for name in options:
        if not hasattr(config, name):
            names = ", ".join(sorted(config.to_dict()))
            raise SettingError(f"{file} has no option {name!r}; it has {names}")
    if options:
        try:
            config = CONFIG_MAPPING[kind].from_dict({**config.to_dict(), **options})
        except Exception as error:
            reason = ascii(one_line(error))[1:-1]
            raise SettingError(f"--model-option: {shorten(reason)}") from error
    # Training does not use the cache of keys and values, which would cross the stages.
    config.use_cache = False
    return config


def _fit_to_data(config: Any, file: Path, data: Dataset) -> None:
    """Set the number of classes; refuse a vocabulary or a length that is too small for the data."""
    needed = data.classes
    if data.task == "classify":
        config.num_labels = data.classes
        if not _has_tokens(data):
            return
        needed = 1 + int(max(data.train_inputs.max(), data.test_inputs.max()))
    vocabulary = getattr(config, "vocab_size", needed)
    if not isinstance(vocabulary, int):
        raise SettingError(f"{file} has a vocab_size that is no number: {quote(vocabulary)}")
    if vocabulary < needed:
        raise SettingError(
            f"{file} has a vocabulary of {vocabulary} tokens, and data {data.name} has "
            f"{needed}: set --model-option vocab_size={needed} or more"
        )
    tokens = data.train_inputs.shape[-1]
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < tokens:
        raise SettingError(
            f"{file} has {positions} positions, and the sequences of data {data.name} have "
            f"{tokens} tokens: set --tokens {positions} or less"
        )


def token_loss(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, in nats: a scalar.

    Args:
        output: of the model; `logits` are (batch, tokens, vocabulary).
        targets: int64 (batch, tokens), the token that follows each token of the input.
    """
    return gpt_loss(scores_of(output), targets)


def class_loss(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all samples, in nats: a scalar.

    Args:
        output: of the model; `logits` are (batch, classes).
        targets: int64 (batch,).
    """
    return cross_entropy(scores_of(output), targets)
