"""Things of which there are many: one file each in a folder of their kind, found by name."""

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
    """A registered function with what its file says about it."""

    name: str
    make: T
    facts: dict[str, object]


class Registry(Generic[T]):
    """The entries of one kind. The folder's files are imported at the first look-up, so a new entry
    is one new file.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, Registered[T]] = {}
        self._aliases: dict[str, str] = {}
        self._complete = False

    def register(
        self, name: str, *, aliases: tuple[str, ...] = (), **facts: object
    ) -> Callable[[T], T]:
        """Decorate the function that makes the entry called `name`."""

        def add(make: T) -> T:
            self._entries[name] = Registered(
                name, make, {**facts, "aliases": aliases} if aliases else facts
            )
            self._aliases.update(dict.fromkeys(aliases, name))
            return make

        return add

    def entries(self) -> dict[str, Registered[T]]:
        """Every entry by its own name, in alphabetical order."""
        if not self._complete:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            self._complete = True
        return dict(sorted(self._entries.items()))

    def find(self, name: str) -> Registered[T]:
        """The entry called `name` or one of its aliases.

        Raises:
            UnknownName: there is none; the message lists all and the closest.
        """
        entries = self.entries()
        entry = entries.get(name) or entries.get(
            self._aliases.get(name, name)
        )  # a name goes before an alias
        if entry is None:
            raise UnknownName(self.kind, name, [*entries, *sorted(self._aliases)])
        return entry
