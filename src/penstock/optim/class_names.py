"""Names of classes in checkpoints, which guard state against objects of another class."""

from __future__ import annotations

import re

#: Names of the module of a script that is run instead of imported.
_SCRIPT_MODULES = ("__main__", "__mp_main__")


def class_name(value: object) -> str:
    """Return module and qualified name of an object's class.

    For a scheduler composed of other schedulers, their names follow in brackets.

    >>> from collections import OrderedDict
    >>> class_name(OrderedDict())
    'collections.OrderedDict'
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    parts = getattr(value, "_schedulers", None)
    if isinstance(parts, (list, tuple)) and parts:
        return f"{name}({', '.join(map(class_name, parts))})"
    return name


def same_class(first: str, second: str) -> bool:
    """Return whether two names denote one class.

    A class of a script is `__main__.X` in the script and `script.X` where it is imported.

    >>> same_class("__main__.Lion", "optimizers.Lion"), same_class("torch.optim.sgd.SGD", "x.SGD")
    (True, False)
    """
    rows = [re.split(r"[(), ]+", name) for name in (first, second)]
    return len(rows[0]) == len(rows[1]) and all(map(_same_single_class, *rows))


def _same_single_class(first: str, second: str) -> bool:
    """Return whether two names may be of one class, whose script was run or imported."""
    if first == second:
        return True
    (module, name), (other_module, other_name) = _split_name(first), _split_name(second)
    return name == other_name and (module in _SCRIPT_MODULES or other_module in _SCRIPT_MODULES)


def _split_name(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last
