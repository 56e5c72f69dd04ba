"""Classes by name: send the name of a class to another rank, and look it up there.

A class that a value needs on another rank is sent as `module:qualname`. The receiver looks it up
among what it already has: loaded modules, and classes that it has remembered, from values of its
own or from the functions of its model. Nothing is imported and nothing is called. Remembered
classes are those that no module has under their name: classes of a script that `ps.launch` has sent
to its ranks, and classes defined inside functions.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.errors import RunError

#: Functions, classes and containers that a search in a model's code examines at most.
_MAX_VISITS = 50_000

#: Remembered classes that no module has under their name. A later class of a name replaces the
#: earlier one.
_REMEMBERED: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def name_of(cls: type) -> str:
    """Return the name under which a class is sent."""
    return f"{cls.__module__}:{cls.__qualname__}"


def remember(cls: type) -> None:
    """Register a class of this process, so that `find` can return it."""
    if _importable(cls) is not cls:
        _REMEMBERED[name_of(cls)] = cls


def find(name: str) -> type:
    """Return the class of a name.

    Raises:
        RunError: this process has no class of that name.
    """
    module, _, path = name.partition(":")
    cls = _REMEMBERED.get(name)
    if cls is None:
        cls = _lookup(module, path)
    if not isinstance(cls, type):
        raise RunError(
            f"a {path} of {module} crosses a stage boundary, and this rank does not find that "
            "class: define it at the top of a module that every rank imports, or name it in the "
            "forward of one of the model's layers (an annotation will do)"
        )
    return cls


def remember_code(roots: Iterable[Any]) -> None:
    """Remember the classes that the code of some modules, functions or classes refers to.

    The search follows names in functions, their closures, defaults and annotations; methods and
    annotations of classes; and attributes of modules. It does not follow importable objects, which
    can be looked up by name.
    """
    pending: list[Any] = []
    for root in roots:
        pending += _root_references(root)
    visited: dict[int, Any] = {}
    while pending and len(visited) < _MAX_VISITS:
        candidate = pending.pop()
        if id(candidate) in visited:
            continue
        # The reference keeps the object alive, so that no other object can get its id.
        visited[id(candidate)] = candidate
        if isinstance(candidate, type):
            if _importable(candidate) is not candidate:
                remember(candidate)
                pending += _class_references(candidate)
        else:
            pending += _references(candidate)


def _root_references(root: Any) -> Iterator[Any]:
    """Yield what a root refers to; its own class is followed even if it is importable."""
    if isinstance(root, (type, types.FunctionType, types.MethodType, functools.partial)):
        yield root
        return
    yield from vars(root).values() if hasattr(root, "__dict__") else ()
    for cls in type(root).__mro__:
        if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield from _class_references(cls)
            remember(cls)


def _references(value: Any) -> Iterator[Any]:
    """Yield what a function, a partial, a method or a container refers to directly."""
    if isinstance(value, types.FunctionType):
        yield from _function_references(value)
    elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from filter(None, (value.fget, value.fset))
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, (dict, types.MappingProxyType)):
        yield from value.values()
    elif isinstance(value, types.GenericAlias) or hasattr(value, "__args__"):
        yield from getattr(value, "__args__", None) or ()


def _function_references(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function's code, closure, defaults and annotations refer to."""
    if wrapped := getattr(function, "__wrapped__", None):
        yield wrapped
    names = function.__globals__
    yield from _code_references(function.__code__, names)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _annotated_classes(function.__annotations__, names)


def _code_references(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield the global names that a function's code uses, nested functions included."""
    codes = [code]
    while codes:
        code = codes.pop()
        yield from (names[name] for name in code.co_names if name in names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _class_references(cls: type) -> Iterator[Any]:
    """Yield members, bases and annotations of a class."""
    members = vars(cls)
    yield from members.values()
    yield from cls.__bases__
    module = sys.modules.get(cls.__module__)
    names = vars(module) if module else {}
    yield from _annotated_classes(members.get("__annotations__", {}), names)


def _annotated_classes(annotations: dict[str, Any], names: dict[str, Any]) -> Iterator[Any]:
    """Yield the classes of annotations; in annotations that are text, the words that are names."""
    for annotation in annotations.values():
        if not isinstance(annotation, str):
            yield annotation
            continue
        words = "".join(c if c.isidentifier() or c.isdigit() else " " for c in annotation).split()
        yield from (names[word] for word in words if word in names)


def _importable(cls: type) -> Any:
    """Return what the module that a class claims to be of has under the class's name."""
    return _lookup(cls.__module__, cls.__qualname__)


def _lookup(module: str, path: str) -> Any:
    """Return an attribute of a loaded module by its dotted path; None if there is none."""
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        if value is None:
            return None
        # Not getattr, which could run the `__getattr__` of a module.
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value
