"""Data sets that a user's factory returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import default_collate

from penstock.errors import SettingError
from penstock.training.data.batches import Dataset
from penstock.training.sources.user_code import call_factory, load_attribute, user_error

#: Share of the samples that is used for tests where the factory returns only one part.
_TEST_SHARE = 0.1
#: Number of samples that are read twice.
_REREAD = 8
_FORMS = (
    "a pair of tensors (inputs, targets), a torch Dataset of such pairs, or two of these to train "
    "and to test with"
)


def load_user_data(
    reference: str, options: Mapping[str, Any], available: Mapping[str, object]
) -> Dataset:
    """Call a user's data factory and return its data set.

    Args:
        reference: `package.module:factory`. It returns a pair of tensors (inputs, targets), a
            `torch.utils.data.Dataset` of such pairs, or two of these to train and to test with; or
            a `Dataset`. Of a single part the last tenth is for tests. All samples are stored in
            memory, as tensors.
        options: keyword arguments of the factory.
        available: values for its parameters that have no default.

    Raises:
        SettingError: it cannot be imported, raises an exception, or returns something else.
    """
    factory = load_attribute(reference, "--data")
    result = call_factory(factory, reference, "--data", options, available)
    if isinstance(result, Dataset):
        return result
    train, test = _parts(result, reference)
    inputs, targets = train
    task = _task(inputs, targets)
    classes = 0
    if task != "regress":
        classes = int(max(part.max() for part in (targets, test[1]))) + 1
        if task == "next_token":
            classes = max(classes, int(inputs.max()) + 1, int(test[0].max()) + 1)
    shape = " x ".join(map(str, inputs.shape[1:])) or "one number"
    return Dataset(
        name=reference,
        train_inputs=inputs,
        train_targets=targets,
        test_inputs=test[0],
        test_targets=test[1],
        classes=classes,
        task=task,
        description=f"{len(inputs):,} samples of {shape}, {len(test[0]):,} for tests",
    )


def _parts(result: Any, reference: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the samples to train and to test with."""
    single = _pair(result, reference)
    if single is not None:
        inputs, targets = single
        train_count = len(inputs) - max(1, round(len(inputs) * _TEST_SHARE))
        if train_count < 1:
            raise SettingError(f"--data {reference} returned {len(inputs)} samples: 2 at least")
        train = (inputs[:train_count], targets[:train_count])
        return train, (inputs[train_count:], targets[train_count:])
    if isinstance(result, tuple | list) and len(result) == 2:
        pairs = [_pair(part, reference) for part in result]
        if pairs[0] is not None and pairs[1] is not None:
            return pairs[0], pairs[1]
    raise SettingError(f"--data {reference} returned {_describe(result)}, and must return {_FORMS}")


def _pair(part: Any, reference: str) -> tuple[Tensor, Tensor] | None:
    """Return inputs and targets of one part, or None if it is something else."""
    if isinstance(part, tuple | list):
        if len(part) != 2 or not all(isinstance(tensor, Tensor) for tensor in part):
            return None
        inputs, targets = part
    elif isinstance(part, torch.utils.data.Dataset) and hasattr(part, "__len__"):
        inputs, targets = _stack(part, reference)
    else:
        return None
    if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets) or not len(inputs):
        raise SettingError(
            f"--data {reference} returned inputs of shape {tuple(inputs.shape)} and targets of "
            f"shape {tuple(targets.shape)}: their first dimensions must be the same number of "
            "samples, 1 or more"
        )
    return inputs.detach().cpu(), targets.detach().cpu()


def _stack(samples: Any, reference: str) -> tuple[Tensor, Tensor]:
    """Return the samples of a torch Dataset as two tensors."""
    try:
        rows = [samples[index] for index in range(len(samples))]
    except Exception as error:
        raise user_error(error, reference, "--data") from error
    try:
        stacked = default_collate(rows)
    except (TypeError, RuntimeError, IndexError) as error:
        raise SettingError(f"--data {reference}: its samples cannot be stacked: {error}") from error
    is_pair = isinstance(stacked, Sequence) and len(stacked) == 2
    if not is_pair or not all(isinstance(tensor, Tensor) for tensor in stacked):
        raise SettingError(
            f"--data {reference}: its samples must be pairs of an input and a target, both tensors "
            "or numbers"
        )
    _check_steady(samples, stacked, reference)
    inputs, targets = stacked
    return inputs, targets


def _check_steady(samples: Any, stacked: Sequence[Tensor], reference: str) -> None:
    """Refuse a torch Dataset that draws its samples at random, as with augmentation.

    Its samples are stored, so that every epoch would have the same draws.

    Args:
        samples: the Dataset.
        stacked: inputs and targets, as read once.
        reference: its name, for messages.

    Raises:
        SettingError: reading the first samples again gives others.
    """
    count = min(len(samples), _REREAD)
    again = default_collate([samples[index] for index in range(count)])
    for first, second in zip(stacked, again, strict=True):
        # NaN, which stands for missing values in some data, is not equal to itself.
        if not torch.equal(first[:count].nan_to_num(), second.nan_to_num()):
            raise SettingError(
                f"--data {reference}: {type(samples).__name__} returns other samples each time "
                "they are read. Samples are read once and stored, so that every epoch would have "
                "the same random numbers: draw them in the model, or write the loop with "
                "ps.Pipeline"
            )


def _task(inputs: Tensor, targets: Tensor) -> Literal["classify", "next_token", "regress"]:
    """Return what can be learnt from the samples, by their types and shapes."""
    if targets.is_floating_point():
        return "regress"
    if not inputs.is_floating_point() and inputs.shape == targets.shape:
        return "next_token"
    return "classify"


def _describe(value: Any) -> str:
    """Return the type of a value, for messages."""
    if isinstance(value, tuple | list):
        items = ", ".join(type(item).__name__ for item in value[:4])
        return f"a {type(value).__name__} of {len(value)} ({items})"
    return f"a {type(value).__name__}"
