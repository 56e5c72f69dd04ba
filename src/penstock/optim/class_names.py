"""Names of classes as a checkpoint has them, so that state is never loaded into an object of
another class.
"""

from __future__ import annotations

import re

#: Modules whose name depends on how a script was started.
_SCRIPTS = ("__main__", "__mp_main__")


def class_name(value: object) -> str:
    """Module and qualified name of an object's class; of a scheduler made of others, theirs in
    brackets.

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
    """Whether two names are of one class. A class of a script is `__main__.X` there and `script.X`
    where it is imported.

    >>> same_class("__main__.Lion", "optimizers.Lion"), same_class("torch.optim.sgd.SGD", "x.SGD")
    (True, False)
    """
    rows = [re.split(r"[(), ]+", name) for name in (first, second)]
    return len(rows[0]) == len(rows[1]) and all(map(_alike, *rows))


def _alike(first: str, second: str) -> bool:
    if first == second:
        return True
    (module, name), (other_module, other_name) = _split(first), _split(second)
    return name == other_name and (module in _SCRIPTS or other_module in _SCRIPTS)


def _split(name: str) -> tuple[str, str]:
    module, _, last = name.rpartition(".")
    return module, last
