"""The data sets by name."""

from __future__ import annotations

import os.path
from collections.abc import Callable

from penstock.errors import SettingError
from penstock.registry import Registered, Registry
from penstock.training.data.batches import Dataset

DATASETS: Registry[Callable[..., Dataset]] = Registry("data set", "penstock.training.data")
#: Facts of an entry: `usage` is how its name is written, with `:PATH` if it needs a path and
#: `[:PATH]` if it accepts one; `takes` are its options; `source` is where the data comes from.
register = DATASETS.register

#: Options that a trainer passes to every data set; an entry receives those that it takes.
SHARED_OPTIONS = ("image", "channels", "tokens")


def dataset(name: str, **options: object) -> Dataset:
    """Load the data set called `name`. Nothing is downloaded.

    Args:
        name: `"digits"`, `"cifar100:PATH"`, `"text"`, `"text:PATH"`, `"reversed"`: the text after
            the first colon is a path, where `~` is home.
        options: `image` (pixels), `channels` and `tokens` are ignored by data sets that do not take
            them. All other options must be among those that the data set takes; see its own
            docstring.

    Raises:
        UnknownName: no data set has that name.
        SettingError: a path is missing or not allowed, or an option is unknown or out of range.
        FileError: the file is missing, truncated or of another kind.
        MissingExtra: an optional dependency is not installed.
    """
    word, colon, path = name.partition(":")
    entry = DATASETS.find(word)
    takes = _facts(entry, "takes")
    unknown = [option for option in options if option not in takes and option not in SHARED_OPTIONS]
    if unknown:
        raise SettingError(
            f"the data set {entry.name} does not take {', '.join(unknown)}; "
            f"it takes {', '.join(takes)} and is written {entry.facts['usage']}"
        )
    accepted = {option: value for option, value in options.items() if option in takes}
    return entry.make(*_path(entry, colon, path), **accepted)


def _path(entry: Registered[Callable[..., Dataset]], colon: str, path: str) -> tuple[str, ...]:
    """Return the path argument, if there is one.

    Raises:
        SettingError: a path is missing or not allowed.
    """
    usage = str(entry.facts["usage"])
    if colon and "PATH" not in usage:
        raise SettingError(
            f"the data set {entry.name} takes no path, but {path!r} follows its colon; write "
            f"{usage}"
        )
    if not path and (colon or usage.endswith(":PATH")):
        raise SettingError(
            f"the data set {entry.name} needs a path; write {usage} ({entry.facts['source']})"
        )
    # Path.expanduser raises without a home directory; here the file is then simply not found.
    return (os.path.expanduser(path),) if path else ()  # noqa: PTH111


def _facts(entry: Registered[Callable[..., Dataset]], fact: str) -> tuple[str, ...]:
    """Return a fact of a registered data set that is a tuple."""
    value = entry.facts[fact]
    assert isinstance(value, tuple), f"{entry.name} declares {fact}={value!r}"
    return value
