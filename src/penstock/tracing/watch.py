"""Whether the Python state of a model is still the one that its graphs were traced with.

Watched is what the forward has read: attributes of modules, of their classes, and plain values and
functions among the globals of their files; and, of all modules, which submodules, parameters,
buffers and hooks they have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from penstock.tracing.faults import is_users
from penstock.tracing.plain import (
    array_bytes,
    containers,
    contents,
    described,
    is_array,
    saved,
    summary,
    version_of,
)
from penstock.tracing.reads import MISSING, TORCHS, is_users_class

#: Of these a module's own dicts are compared.
_HELD = ("_parameters", "_buffers", "_modules")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_APART = TORCHS | {"_compiled_call_impl"}
_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


@dataclass(frozen=True)
class Change:
    """What is not as it was traced: where, in words; and whether a new trace could have it."""

    text: str
    traceable: bool


@dataclass(frozen=True)
class _Value:
    """One name in one dict: of a module, a class or a file."""

    where: str
    names: Any
    key: str
    value: Any
    summary: Any


class Watch:
    """Of one model, as it is now.

    Args:
        model: the user's own.
        reads: by path, the attributes that forward reads.
        modes: whether the modes of the modules matter: in evaluation they do not.
        ignored: by path, attributes that forward sets itself before it reads them.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: Mapping[str, Collection[str]],
        *,
        modes: bool,
        ignored: Mapping[str, Collection[str]],
    ) -> None:
        self._model = model
        self._shared = {id(each) for each in (*model.parameters(), *model.buffers())}
        self._summaries: dict[int, tuple[Any, Any]] = {}
        self._parts = list(model.named_modules(remove_duplicate=False))
        skipped = _APART if modes else _APART | {"training"}
        self._values = list(self._read(reads, skipped, ignored))
        self._take()

    def renew(self) -> None:
        """Take what is there now, after `changes` has found none, for what is compared."""
        for number, each in enumerate(self._values):
            now = each.names.get(each.key, MISSING)
            self._values[number] = _Value(each.where, each.names, each.key, now, each.summary)
        self._take()

    def _take(self) -> None:
        """Lay out what `unchanged` compares, as flat lists."""
        self._items = [(each.names, each.key, each.value) for each in self._values]
        self._contents: list[tuple[Any, Any]] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        seen: set[int] = set()
        for value in self._values:
            for each in containers(value.value, seen):
                self._add(each)
        self._ids = [
            (names, [*map(id, names.values())], where)
            for path, part in self._parts
            for where in _HELD
            if (names := vars(part)[where])
        ]
        self._hooks = [
            (vars(part)[where], list(vars(part)[where]), where, path)
            for path, part in self._parts
            for where in (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
            if vars(part)[where]
        ]
        self._hooks += [(hooks, list(hooks), "", "") for hooks in _global_hooks()]
        self._empty = [
            vars(part)[where]
            for _, part in self._parts
            for where in (*_HELD, *_FORWARD_HOOKS, *_BACKWARD_HOOKS)
            if not vars(part)[where]
        ]

    def _add(self, each: Any) -> None:
        if isinstance(each, Tensor):
            if id(each) not in self._shared:
                self._versions.append((each, version_of(each)))
        elif is_array(each):
            self._arrays.append((each, array_bytes(each)))
        else:
            self._contents.append((each, saved(each)))

    def unchanged(self) -> bool:
        """Whether everything is the very same object with the same parts. Fast; False also where
        only equal values were set.
        """
        for names, key, value in self._items:
            if names.get(key, MISSING) is not value:
                return False
        if any(self._empty):
            return False
        for names, ids, _ in self._ids:
            if [*map(id, names.values())] != ids:
                return False
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        try:
            for live, copied in self._contents:
                if live != copied:
                    return False
        except (RuntimeError, TypeError, ValueError):  # tensors and arrays have no one truth
            return False
        if any(array_bytes(array) != content for array, content in self._arrays):
            return False
        return all(list(hooks) == keys for hooks, keys, _, _ in self._hooks)

    def changes(self) -> list[Change]:
        """What has changed, in words; empty where all that was set is equal to what it was."""
        found = [*self._structure()]
        self._summaries.clear()
        for each in self._values:
            now = each.names.get(each.key, MISSING)
            if self._summary(now) != each.summary:
                found.append(Change(_told(each, now), traceable=True))
        return found

    def _structure(self) -> Iterator[Change]:
        before = {id(names): ids for names, ids, _ in self._ids}
        for path, part in self._parts:
            for kind in _HELD:
                names = vars(part)[kind]
                ids = before.get(id(names), [])
                if [*map(id, names.values())] != ids:
                    which = [key for key, value in names.items() if id(value) not in ids]
                    listed = ", ".join(f"`{key}`" for key in which) or "one fewer"
                    yield Change(
                        f"the {_KINDS[kind]}s of {path or 'the model'} are others ({listed})",
                        traceable=False,
                    )
        yield from self._hook_changes()

    def _hook_changes(self) -> Iterator[Change]:
        keys = {id(hooks): names for hooks, names, _, _ in self._hooks}
        for path, part in self._parts:
            for kind in (*_FORWARD_HOOKS, *_BACKWARD_HOOKS):
                hooks = vars(part)[kind]
                if list(hooks) != keys.get(id(hooks), []):
                    of = "backward" if kind in _BACKWARD_HOOKS else "forward"
                    yield Change(
                        f"the {of} hooks of {path or 'the model'} are others", of == "forward"
                    )
        for hooks, names, kind, _ in self._hooks:
            if not kind and list(hooks) != names:
                yield Change("hooks of all modules (register_module_forward_hook) are others", True)

    def _read(
        self,
        reads: Mapping[str, Collection[str]],
        skipped: Collection[str],
        ignored: Mapping[str, Collection[str]],
    ) -> Iterator[_Value]:
        seen: set[tuple[int, str]] = set()
        for path, part in self._parts:
            names = vars(part)
            for key in sorted(set(reads.get(path, ())) - set(ignored.get(path, ()))):
                if key in skipped or key.startswith("__"):
                    continue
                where = f"`{key}` of {path or 'the model'}"
                if key in names:
                    yield self._value(where, names, key)
                    continue
                owner = next((kind for kind in type(part).__mro__ if key in vars(kind)), None)
                if owner is None or owner is nn.Module:
                    continue
                yield self._value(where, names, key)
                if is_users_class(owner):
                    yield from self._of_class(owner, key, seen)

    def _of_class(self, kind: type, key: str, seen: set[tuple[int, str]]) -> Iterator[_Value]:
        if (id(kind), key) in seen:
            return
        seen.add((id(kind), key))
        yield self._value(f"`{kind.__qualname__}.{key}`", vars(kind), key)
        value = vars(kind)[key]
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            yield from self._of_function(function, seen)
            for base in kind.__mro__[1:]:
                if key in vars(base) and is_users_class(base) and base is not nn.Module:
                    yield from self._of_class(base, key, seen)

    def _of_function(self, function: FunctionType, seen: set[tuple[int, str]]) -> Iterator[_Value]:
        """Globals that a function of the user's reads: plain values, and functions with what they
        read.
        """
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
            return
        names = function.__globals__
        for key in _names(function.__code__):
            if (id(names), key) in seen or key not in names:
                continue
            seen.add((id(names), key))
            value = names[key]
            if isinstance(value, FunctionType):
                yield self._value(f"the function `{key}`", names, key)
                yield from self._of_function(value, seen)
            elif _is_plain(value):
                yield self._value(f"the global `{key}` of {names.get('__name__')}", names, key)

    def _value(self, where: str, names: Any, key: str) -> _Value:
        value = names.get(key, MISSING)
        return _Value(where, names, key, value, self._summary(value))

    def _summary(self, value: Any) -> Any:
        """Of one object that many modules hold, such as a configuration, once."""
        known = self._summaries.get(id(value))
        if known is None or known[0] is not value:
            known = self._summaries[id(value)] = (value, summary(value, self._shared))
        return known[1]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _is_plain(value: Any) -> bool:
    """Whether a global is data: numbers, strings, containers of these, and tensors."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return (
        not contents(value)
        and not callable(value)
        and isinstance(value, (bool, int, float, complex, str, type(None)))
    )


def _global_hooks() -> list[Any]:
    return [
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
    ]


def _told(each: _Value, now: Any) -> str:
    if each.value is now:
        return f"{each.where} has changed in place"
    return f"{each.where} was {described(each.value)} and is {described(now)}"
