"""Registry of named entries, one file per entry in a package of their kind."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

from penstock.errors import UnknownName

T = TypeVar("T")


#: Group of entry points whose modules register entries when they are imported.
PLUGIN_GROUP = "penstock.plugins"


@cache
def _entry_points(path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of all plug-ins that the distributions on a path have."""
    del path  # importlib reads sys.path itself
    return tuple(importlib.metadata.entry_points(group=PLUGIN_GROUP))


def find_plugins() -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of all plug-ins, without importing any.

    They are read once for each `sys.path`: every installed distribution has a file to open, some
    20 ms for a hundred.
    """
    return _entry_points(tuple(dict.fromkeys(sys.path)))


@cache
def import_plugins() -> tuple[str, ...]:
    """Import the modules that installed distributions name in the group `penstock.plugins`.

    In the `pyproject.toml` of such a distribution:

        [project.entry-points."penstock.plugins"]
        my-schedules = "my_package.my_schedules"

    A module that cannot be imported is reported by a warning, and the others are imported.

    Returns:
        The names of the plug-ins that were imported.
    """
    names = []
    for entry_point in find_plugins():
        try:
            entry_point.load()
        except Exception as error:  # noqa: BLE001 - any error of another distribution's module
            warnings.warn(
                f"the plug-in {entry_point.name} ({entry_point.value}) cannot be imported: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            names.append(entry_point.name)
    return tuple(names)


@dataclass(frozen=True)
class Registered(Generic[T]):
    """A registered function.

    Attributes:
        name: the name to look it up by.
        make: the function.
        facts: the keyword arguments of its `register` decorator.
    """

    name: str
    make: T
    facts: dict[str, object]


class Registry(Generic[T]):
    """The entries of one kind, such as schedules.

    All modules of the package are imported at the first look-up, so adding an entry means adding
    one file. Then the plug-ins of other installed distributions are imported.

    Args:
        kind: name of the kind for messages, e.g. "schedule".
        package: dotted name of the package that holds one module per entry.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, Registered[T]] = {}
        self._aliases: dict[str, str] = {}
        self._loaded = False

    def register(
        self, name: str, *, aliases: tuple[str, ...] = (), **facts: object
    ) -> Callable[[T], T]:
        """Return a decorator that registers a function as the entry `name`.

        Args:
            name: the entry's name.
            aliases: other names to find it by.
            facts: properties of the entry, available as `Registered.facts`.
        """

        def add(make: T) -> T:
            """Register the function and return it unchanged."""
            entry_facts = {**facts, "aliases": aliases} if aliases else facts
            self._entries[name] = Registered(name, make, entry_facts)
            self._aliases.update(dict.fromkeys(aliases, name))
            return make

        return add

    def entries(self) -> dict[str, Registered[T]]:
        """Return all entries by name, in alphabetical order, without aliases."""
        self._load()
        return dict(sorted(self._entries.items()))

    def import_modules(self) -> None:
        """Import the modules of the package, which register its entries, and no plug-ins."""
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
            importlib.import_module(module.name)

    def _load(self) -> None:
        """Import the modules that register entries, once."""
        if not self._loaded:
            self.import_modules()
            # Set first: a plug-in may look up entries while it is imported.
            self._loaded = True
            import_plugins()

    def find(self, name: str) -> Registered[T]:
        """Return the entry called `name`, or with `name` as an alias.

        Raises:
            UnknownName: no entry has that name; the message lists all names and the closest one.
        """
        self._load()
        # Names take precedence over aliases.
        entry = self._entries.get(name) or self._entries.get(self._aliases.get(name, name))
        if entry is None:
            raise UnknownName(self.kind, name, [*self.entries(), *sorted(self._aliases)])
        return entry
