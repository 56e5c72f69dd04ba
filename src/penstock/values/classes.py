"""Classes by name: what a message says, and what this process has under that name.

A class that a value needs on another rank travels as `module:qualname`. The receiver looks it up
among what it has already: the modules
that are loaded, and the classes that it has met itself, either in values of its own or in the
functions of its model. Nothing is
imported and nothing is called. The second place is for classes that no module has by that name:
those of a script that `ps.launch` has
sent to its ranks, and those that are defined inside functions.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.errors import RunError

#: How many functions, classes and containers a search in a model's code looks at.
_MOST_VISITS = 50_000

#: Classes that this process has met and that no module has under their name. The last one of a name
#: counts.
_MET: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def name_of(cls: type) -> str:
    """The name under which a class travels."""
    return f"{cls.__module__}:{cls.__qualname__}"


def remember(cls: type) -> None:
    """Let `find` know a class that this process has."""
    if _importable(cls) is not cls:
        _MET[name_of(cls)] = cls


def find(name: str) -> type:
    """The class of a name.

    Raises:
        RunError: this process has no class of that name.
    """
    module, _, path = name.partition(":")
    cls = _MET.get(name)
    if cls is None:
        cls = _lookup(module, path)
    if not isinstance(cls, type):
        raise RunError(
            f"a {path} of {module} crosses a stage boundary, and this rank does not find that "
            "class: define it at the top of a "
            "module that every rank imports, or name it in the forward of one of the model's "
            "layers (an annotation will "
            "do)"
        )
    return cls


def remember_code(roots: Iterable[Any]) -> None:
    """Remember the classes that the code of some modules, functions or classes refers to.

    Followed are what functions name, their closures, defaults and annotations, methods and
    annotations of classes, and attributes of
    modules. What lies in an importable module is found there by its name, and is not followed.
    """
    waiting: list[Any] = []
    for root in roots:
        waiting += _start(root)
    visited: dict[int, Any] = {}
    while waiting and len(visited) < _MOST_VISITS:
        item = waiting.pop()
        if id(item) in visited:
            continue
        visited[id(item)] = item  # kept alive, so that its id stays its own
        if isinstance(item, type):
            if _importable(item) is not item:
                remember(item)
                waiting += _in_class(item)
        else:
            waiting += _referenced(item)


def _start(root: Any) -> Iterator[Any]:
    """What a root refers to; its own class is followed wherever it lies."""
    if isinstance(root, (type, types.FunctionType, types.MethodType, functools.partial)):
        yield root
        return
    yield from vars(root).values() if hasattr(root, "__dict__") else ()
    for cls in type(root).__mro__:
        if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield from _in_class(cls)
            remember(cls)


def _referenced(item: Any) -> Iterator[Any]:
    """What a function, a partial, a method or a container refers to directly."""
    if isinstance(item, types.FunctionType):
        yield from _in_function(item)
    elif isinstance(item, (types.MethodType, staticmethod, classmethod)):
        yield item.__func__
    elif isinstance(item, property):
        yield from filter(None, (item.fget, item.fset))
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from item
    elif isinstance(item, (dict, types.MappingProxyType)):
        yield from item.values()
    elif isinstance(item, types.GenericAlias) or hasattr(item, "__args__"):
        yield from getattr(item, "__args__", None) or ()


def _in_function(function: types.FunctionType) -> Iterator[Any]:
    if wrapped := getattr(function, "__wrapped__", None):
        yield wrapped
    names = function.__globals__
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield from (names[name] for name in code.co_names if name in names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the name has no value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _annotated(function.__annotations__, names)


def _in_class(cls: type) -> Iterator[Any]:
    members = vars(cls)
    yield from members.values()
    yield from cls.__bases__
    module = sys.modules.get(cls.__module__)
    yield from _annotated(members.get("__annotations__", {}), vars(module) if module else {})


def _annotated(annotations: dict[str, Any], names: dict[str, Any]) -> Iterator[Any]:
    """The classes of annotations; of those that are text, the ones whose words are names."""
    for annotation in annotations.values():
        if not isinstance(annotation, str):
            yield annotation
            continue
        words = "".join(c if c.isidentifier() or c.isdigit() else " " for c in annotation).split()
        yield from (names[word] for word in words if word in names)


def _importable(cls: type) -> Any:
    """What the module that a class says it is of has under its name."""
    return _lookup(cls.__module__, cls.__qualname__)


def _lookup(module: str, path: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        if value is None:
            return None
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    return value
