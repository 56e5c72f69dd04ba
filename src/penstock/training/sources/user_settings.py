"""Settings of a new run from a file and from flags, completed by those that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.training.config import TrainConfig, read_settings, validate_settings
from penstock.training.plan_file import settings_of_plan
from penstock.training.sources.model_sources import default_data


def load_settings(path: str | Path | None, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a new run.

    Without a data set, it is one that the model can learn from; without a batch size, that of the
    plan to run.

    Args:
        path: YAML file of settings; None if there is none.
        changes: further settings, which override the file.

    Raises:
        FileError: a file is missing, or has an unknown key or an invalid value.
        SettingError, UnknownName: a setting is invalid, or settings contradict each other.
    """
    settings = {} if path is None else read_settings(path)
    return complete_settings({**settings, **changes}, "the settings" if path is None else str(path))


def complete_settings(values: Mapping[str, Any], where: str = "the settings") -> TrainConfig:
    """Return the configuration of a new run from the settings that the user has set.

    Args:
        values: by the names of the fields.
        where: their source, for messages.

    Raises:
        SettingError, UnknownName, FileError: see `load_settings`.
    """
    # Validated first, so that a value of another type is refused by the name of its setting.
    validate_settings(dict(values), where)
    completed = {**settings_of_plan(values), **values}
    if "model" in values and "data" not in values:
        completed["data"] = default_data(values["model"])
    return validate_settings(completed, where)
