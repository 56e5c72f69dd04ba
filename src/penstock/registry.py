"""Registry of named entries, one file per entry in a package of their kind."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.errors import UnknownName

T = TypeVar("T")


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
    one file.

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
        if not self._loaded:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            self._loaded = True
        return dict(sorted(self._entries.items()))

    def find(self, name: str) -> Registered[T]:
        """Return the entry called `name`, or with `name` as an alias.

        Raises:
            UnknownName: no entry has that name; the message lists all names and the closest one.
        """
        entries = self.entries()
        # Names take precedence over aliases.
        entry = entries.get(name) or entries.get(self._aliases.get(name, name))
        if entry is None:
            raise UnknownName(self.kind, name, [*entries, *sorted(self._aliases)])
        return entry
