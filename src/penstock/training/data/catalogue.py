"""All data sets by name."""

from __future__ import annotations

import os.path
from collections.abc import Callable

from penstock.errors import SettingError
from penstock.registry import Registered, Registry
from penstock.training.data.batches import Dataset

DATASETS: Registry[Callable[..., Dataset]] = Registry("data set", "penstock.training.data")
#: Facts of an entry: `usage` is how its name is written, with `:PATH` where it takes one and
#: `[:PATH]` where it may;
#: `takes` are its options; `source` says where the data comes from.
register = DATASETS.register

#: What a trainer says of every data set, whichever it is; an entry gets those of them that it
#: takes.
SHARED_OPTIONS = ("image", "channels", "tokens")


def dataset(name: str, **options: object) -> Dataset:
    """Load the data set called `name`. Nothing is downloaded.

    Args:
        name: `"digits"`, `"cifar100:PATH"`, `"text"`, `"text:PATH"`, `"reversed"`: what follows the
        first colon is a path, where `~` is home. options: `image` (pixels), `channels`, `tokens`:
        whoever does not take them is not told. All other options must be
            among those that the data set takes; its own docstring says.

    Raises:
        UnknownName: no data set has that name.
        SettingError: a path is missing or too many, or an option is not known or out of range.
        FileError: the file is missing, short or foreign.
        MissingExtra: an optional dependency is not installed.
    """
    word, colon, path = name.partition(":")
    entry = DATASETS.find(word)
    takes = _facts(entry, "takes")
    strangers = [
        option for option in options if option not in takes and option not in SHARED_OPTIONS
    ]
    if strangers:
        raise SettingError(
            f"the data set {entry.name} does not take {', '.join(strangers)}; "
            f"it takes {', '.join(takes)} and is written {entry.facts['usage']}"
        )
    given = {option: value for option, value in options.items() if option in takes}
    return entry.make(*_path(entry, colon, path), **given)


def _path(entry: Registered[Callable[..., Dataset]], colon: str, path: str) -> tuple[str, ...]:
    usage = str(entry.facts["usage"])
    if colon and "PATH" not in usage:
        raise SettingError(
            f"the data set {entry.name} takes no path, but {path!r} follows its colon; write {usage}"
        )
    if not path and (colon or usage.endswith(":PATH")):
        raise SettingError(
            f"the data set {entry.name} is given without a path; write {usage} ({entry.facts['source']})"
        )
    # Not Path.expanduser, which fails without a home: here the file is then just not found, and the
    # data set says so.
    return (os.path.expanduser(path),) if path else ()  # noqa: PTH111


def _facts(entry: Registered[Callable[..., Dataset]], fact: str) -> tuple[str, ...]:
    found = entry.facts[fact]
    assert isinstance(found, tuple), f"{entry.name} declares {fact}={found!r}"
    return found
