"""Detection of changes of a model's Python state since its graphs were traced.

Watched are the attributes that the forward has read, of modules and of their classes; plain values
and functions among the globals of their files; and of all modules the sets of submodules,
parameters, buffers and hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from penstock.modules.host_random import names_of_code
from penstock.tracing.faults import is_users
from penstock.tracing.python_state.attribute_reads import MISSING, TORCHS, is_users_class
from penstock.tracing.python_state.python_values import (
    array_bytes,
    containers,
    copy_container,
    describe_value,
    is_array,
    summary,
    version_of,
)

#: Attributes of modules whose members are compared by their identity, and what the members are.
_MEMBER_NAMES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
#: Attributes of modules that hold hooks. Tracing again takes account of forward hooks only.
_HOOK_DIRECTIONS = {
    "_forward_hooks": "forward",
    "_forward_pre_hooks": "forward",
    "_backward_hooks": "backward",
    "_backward_pre_hooks": "backward",
}
#: torch's hooks on the forwards of all modules.
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
_COMPARED_SEPARATELY = TORCHS | {"_compiled_call_impl"}


@dataclass(frozen=True)
class Change:
    """A difference from the traced state.

    Attributes:
        text: description.
        traceable: whether tracing again takes account of it.
    """

    text: str
    traceable: bool


@dataclass(frozen=True)
class _Variable:
    """A variable in the namespace of a module, a class or a file.

    Attributes:
        where: description of the variable.
        names: the namespace.
        key: its name.
        value: its value when it was read.
        summary: digest of the value.
    """

    where: str
    names: Any
    key: str
    value: Any
    summary: Any

    @property
    def present(self) -> Any:
        """Its present value; `MISSING` if it does not exist now."""
        return self.names.get(self.key, MISSING)


class Watch:
    """Watches the state of one model from now on.

    Args:
        model: the user's model.
        reads: by path, the attributes that the forward reads.
        modes: whether the training modes of the modules matter, as in training; not in evaluation.
        ignored: by path, attributes that the forward sets itself before it reads them.
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
        self._shared = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._summaries: dict[int, tuple[Any, Any]] = {}
        self._parts = list(model.named_modules(remove_duplicate=False))
        skipped = _COMPARED_SEPARATELY if modes else _COMPARED_SEPARATELY | {"training"}
        self._variables = list(self._variables_of(reads, skipped, ignored))
        self._build_lists()

    def renew(self) -> None:
        """Compare with the present objects from now on, after `changes` has found no difference."""
        self._variables = [
            replace(variable, value=variable.present) for variable in self._variables
        ]
        self._build_lists()

    def _build_lists(self) -> None:
        """Build the flat lists that `unchanged` compares."""
        self._items = [
            (variable.names, variable.key, variable.value) for variable in self._variables
        ]
        self._contents: list[tuple[Any, Any]] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        visited: set[int] = set()
        for variable in self._variables:
            for container in containers(variable.value, visited):
                self._add(container)
        # Dicts of members and hooks. Most are empty, and these are compared fastest.
        self._members: list[tuple[dict[str, Any], list[int]]] = []
        self._hooks = [(hooks, list(hooks)) for hooks in _GLOBAL_HOOKS]
        self._empty: list[Any] = []
        for _, part in self._parts:
            self._watch_structure(part)

    def _watch_structure(self, part: nn.Module) -> None:
        """Add a module's members, by their ids, and its hooks, by their keys."""
        for kind in _MEMBER_NAMES:
            members = vars(part)[kind]
            if members:
                self._members.append((members, [*map(id, members.values())]))
            else:
                self._empty.append(members)
        for kind in _HOOK_DIRECTIONS:
            hooks = vars(part)[kind]
            if hooks:
                self._hooks.append((hooks, list(hooks)))
            else:
                self._empty.append(hooks)

    def _add(self, container: Any) -> None:
        """Add a mutable value to the list by which its kind is compared."""
        if isinstance(container, Tensor):
            if id(container) not in self._shared:
                self._versions.append((container, version_of(container)))
        elif is_array(container):
            self._arrays.append((container, array_bytes(container)))
        else:
            self._contents.append((container, copy_container(container)))

    def unchanged(self) -> bool:
        """Return whether all objects are the same with the same contents.

        Fast. False also if a variable was assigned an equal value.
        """
        for names, key, value in self._items:
            if names.get(key, MISSING) is not value:
                return False
        # All of these dicts were empty: a non-empty one now has a member or a hook.
        if any(self._empty):
            return False
        for members, ids in self._members:
            if [*map(id, members.values())] != ids:
                return False
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        return self._contents_unchanged() and all(
            list(hooks) == keys for hooks, keys in self._hooks
        )

    def _contents_unchanged(self) -> bool:
        """Return whether all containers and arrays equal their copies."""
        try:
            for live, copied in self._contents:
                if live != copied:
                    return False
        except (RuntimeError, TypeError, ValueError):
            return False  # a comparison of tensors has no single truth value
        return all(array_bytes(array) == content for array, content in self._arrays)

    def changes(self) -> list[Change]:
        """Return the changes; none if all assigned values are equal to the previous ones."""
        changes = list(self._structure_changes())
        # An object may have changed in place since its digest was stored.
        self._summaries.clear()
        for variable in self._variables:
            if self._summary(variable.present) != variable.summary:
                changes.append(Change(_change_text(variable), traceable=True))
        return changes

    def _structure_changes(self) -> Iterator[Change]:
        """Yield the changes of submodules, parameters, buffers and hooks."""
        yield from self._member_changes()
        yield from self._hook_changes()

    def _member_changes(self) -> Iterator[Change]:
        """Yield a change for every module with other submodules, parameters or buffers."""
        # Dicts that were empty are not in the list, hence the default [].
        ids_before = {id(members): ids for members, ids in self._members}
        for path, part in self._parts:
            for kind, member in _MEMBER_NAMES.items():
                members = vars(part)[kind]
                before = ids_before.get(id(members), [])
                if [*map(id, members.values())] != before:
                    new = [name for name, value in members.items() if id(value) not in before]
                    listed = ", ".join(f"`{name}`" for name in new) or "one fewer"
                    text = f"the {member}s of {path or 'the model'} are others ({listed})"
                    yield Change(text, traceable=False)

    def _hook_changes(self) -> Iterator[Change]:
        """Yield a change for every module with other hooks, and for torch's global hooks."""
        # As above, dicts that were empty are not in the list.
        keys_before = {id(hooks): keys for hooks, keys in self._hooks}
        for path, part in self._parts:
            for kind, direction in _HOOK_DIRECTIONS.items():
                hooks = vars(part)[kind]
                if list(hooks) != keys_before.get(id(hooks), []):
                    text = f"the {direction} hooks of {path or 'the model'} are others"
                    yield Change(text, traceable=direction == "forward")
        for hooks in _GLOBAL_HOOKS:
            if list(hooks) != keys_before[id(hooks)]:
                text = "hooks of all modules (register_module_forward_hook) are others"
                yield Change(text, traceable=True)

    def _variables_of(
        self,
        reads: Mapping[str, Collection[str]],
        skipped: Collection[str],
        ignored: Mapping[str, Collection[str]],
    ) -> Iterator[_Variable]:
        """Yield the variables that are compared."""
        visited: set[tuple[int, str]] = set()  # by id of a namespace, and name
        for path, part in self._parts:
            for key in sorted(set(reads.get(path, ())) - set(ignored.get(path, ()))):
                if key not in skipped and not key.startswith("__"):
                    where = f"`{key}` of {path or 'the model'}"
                    yield from self._attribute_variables(part, key, where, visited)

    def _attribute_variables(
        self, part: nn.Module, key: str, where: str, visited: set[tuple[int, str]]
    ) -> Iterator[_Variable]:
        """Yield an attribute of a module, or what its class has in place of it."""
        names = vars(part)
        if key in names:
            yield self._variable(where, names, key)
            return
        owner = next((kind for kind in type(part).__mro__ if key in vars(kind)), None)
        if owner is None or owner is nn.Module:
            return
        # Watched although it does not exist: it would take the place of the class's attribute.
        yield self._variable(where, names, key)
        if is_users_class(owner):
            yield from self._class_variables(owner, key, visited)

    def _class_variables(
        self, kind: type, key: str, visited: set[tuple[int, str]]
    ) -> Iterator[_Variable]:
        """Yield an attribute of a class, and the globals that it reads if it is a function."""
        if (id(kind), key) in visited:
            return
        visited.add((id(kind), key))
        yield self._variable(f"`{kind.__qualname__}.{key}`", vars(kind), key)
        value = vars(kind)[key]
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            yield from self._global_variables(function, visited)
            # The function may call those of the same name in the bases by super().
            for base in kind.__mro__[1:]:
                if key in vars(base) and is_users_class(base) and base is not nn.Module:
                    yield from self._class_variables(base, key, visited)

    def _global_variables(
        self, function: FunctionType, visited: set[tuple[int, str]]
    ) -> Iterator[_Variable]:
        """Yield the globals that a user's function reads: plain values and functions."""
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
            return
        names = function.__globals__
        for key in names_of_code(function.__code__):
            if (id(names), key) in visited or key not in names:
                continue
            visited.add((id(names), key))
            value = names[key]
            if isinstance(value, FunctionType):
                yield self._variable(f"the function `{key}`", names, key)
                yield from self._global_variables(value, visited)
            elif _is_plain(value):
                yield self._variable(f"the global `{key}` of {names.get('__name__')}", names, key)

    def _variable(self, where: str, names: Any, key: str) -> _Variable:
        """Return a variable with its present value."""
        value = names.get(key, MISSING)
        return _Variable(where, names, key, value, self._summary(value))

    def _summary(self, value: Any) -> Any:
        """Return a digest of a value, computed once for an object that many modules share."""
        # The object is stored with its digest: once it is freed, another may get its id.
        entry = self._summaries.get(id(value))
        if entry is None or entry[0] is not value:
            entry = self._summaries[id(value)] = (value, summary(value, self._shared))
        return entry[1]


def _is_plain(value: Any) -> bool:
    """Return whether a global is data: numbers, strings, containers of these, and tensors."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (bool, int, float, complex, str, type(None))) and not callable(value)


def _change_text(variable: _Variable) -> str:
    """Return the description of a variable's change."""
    if variable.value is variable.present:
        return f"{variable.where} has changed in place"
    return f"{variable.where} was {describe_value(variable.value)} and is {describe_value(variable.present)}"
