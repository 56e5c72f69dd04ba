"""Attributes of a model's modules that its forward reads or changes.

What a forward reads becomes part of the graph: a number is a constant in it, a branch is taken once
and for all. Attributes that were read are therefore watched afterwards (see `state_watch`). An
attribute that a forward changes and reads again in its next call, such as a counter, cannot be part
of a graph, and is rejected.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as torch_module

from penstock.tracing.faults import Refused, is_torchs
from penstock.tracing.python_state.python_values import described, is_mutable, summary

#: Value of an attribute that does not exist.
MISSING = object()

#: Attributes that belong to torch, not to the model: those of every module (but `training`), and
#: two of torch's recurrent modules, which are set again when torch.export replaces parameters.
TORCHS = frozenset({"_flat_weights", "_flat_weight_refs", *vars(nn.Module())} - {"training"})

_OWN_FILE = torch_module.__file__


class Reads:
    """Records one forward of a model.

    Attributes:
        names: by the path of a module, the attributes that were read.
        written: by the path of a module, the attributes that the forward has set before it read
            them, or that are caches.
        sizes: by path and name, numbers that the forward has read and then set to a size of its
            inputs, as text. They are caches if they do not depend on their previous value.
        tables: by path and name, shape and dtype of tensors that the forward creates in place of
            None. They are caches if the next call does not change them.

    Args:
        model: the model.
        caches: by the path of a module, attributes that are known to be caches.
        lengths: the sizes of the inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: Mapping[str, Collection[str]],
        lengths: Collection[int],
    ) -> None:
        self._caches, self._lengths = caches, lengths
        self.sizes: dict[tuple[str, str], str] = {}
        self.tables: dict[tuple[str, str], tuple[list[int], torch.dtype]] = {}
        self._dicts: dict[int, tuple[str, dict[str, Any]]] = {}
        for path, module in model.named_modules():
            self._dicts.setdefault(id(module.__dict__), (path, module.__dict__))
        self._before = {key: dict(names) for key, (_, names) in self._dicts.items()}
        self._recorded: set[tuple[int, str]] = set()
        self._unchanged_when_read: set[tuple[int, str]] = set()
        self._contents: dict[tuple[int, str], Any] = {}
        self.names: dict[str, set[str]] = {}
        self.written: dict[str, set[str]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the forward in this context.

        Raises:
            Refused: it has changed an attribute that it had read.
        """
        module_class: Any = nn.Module
        plain, thread = module_class.__getattribute__, threading.get_ident()
        is_overridden = "__getattribute__" in vars(module_class)

        def get(module: nn.Module, name: str) -> Any:
            if threading.get_ident() == thread:
                names = plain(module, "__dict__")
                if (id(names), name) not in self._recorded:
                    self._record(names, name)
            return plain(module, name)

        module_class.__getattribute__ = get
        try:
            yield
        finally:
            if is_overridden:
                module_class.__getattribute__ = plain
            else:
                # nn.Module inherits this method from object: nothing of the replacement remains.
                del module_class.__getattribute__
        self._check_written()

    def _record(self, names: dict[str, Any], name: str) -> None:
        """Record that an attribute is read. `names` is the `__dict__` of its module."""
        key = id(names)
        # A module that the forward creates keeps nothing from one call to the next.
        if key not in self._dicts:
            return
        if name == "__dict__":
            # torch's own methods of a module read `__dict__` without reading its attributes.
            if sys._getframe(2).f_code.co_filename != _OWN_FILE:
                for other in list(names):
                    if (key, other) not in self._recorded:
                        self._record(names, other)
            return
        self._recorded.add((key, name))
        path = self._dicts[key][0]
        self.names.setdefault(path, set()).add(name)
        value = names.get(name, MISSING)
        if value is self._before[key].get(name, MISSING):
            self._unchanged_when_read.add((key, name))
            # A tensor that is changed in place is refused by its own rule, see `flow`.
            if is_mutable(value) and not isinstance(value, Tensor):
                self._contents[key, name] = summary(value)

    def _check_written(self) -> None:
        """Raise an error for attributes that go from one call to the next; record caches."""
        for key, (path, names) in self._dicts.items():
            before = self._before[key]
            for name in {**before, **names}:
                if name in TORCHS:
                    continue
                old, new = before.get(name, MISSING), names.get(name, MISSING)
                if name in self._caches.get(path, ()):
                    self._add_written(path, name)
                elif old is new:
                    self._check_contents(key, path, name, new)
                else:
                    self._check_replaced((key, name), path, old, new)

    def _check_replaced(self, key: tuple[int, str], path: str, old: Any, new: Any) -> None:
        """Check an attribute to which the forward has assigned another object."""
        name = key[1]
        if key not in self._unchanged_when_read:
            pass  # set before it was read: nothing goes from one call to the next
        elif _is_equal(old, new) or _is_cache(old, new):
            if old is None and isinstance(new, Tensor):
                shape = [int(getattr(size, "hint", size)) for size in new.shape]
                self.tables[path, name] = shape, new.dtype
        elif self._is_size(old, new):
            self.sizes[path, name] = str(new)
        else:
            self._refuse(path, name, f"from {described(old)} to {described(new)}")
        self._add_written(path, name)

    def _add_written(self, path: str, name: str) -> None:
        self.written.setdefault(path, set()).add(name)

    def _check_contents(self, key: int, path: str, name: str, value: Any) -> None:
        """Check an attribute that is still the same object, for changes in place."""
        before = self._contents.get((key, name))
        if before is None or before == summary(value):
            return
        if _only_caches_added(before, value):
            self._add_written(path, name)
            return
        self._refuse(path, name, "in place")

    def _is_size(self, old: Any, new: Any) -> bool:
        """Return whether an integer was replaced by a size of the inputs."""
        if isinstance(old, bool) or not isinstance(old, int):
            return False
        if isinstance(new, torch.SymInt):
            return not _depends_on_data(new)
        # 0 and 1 are as likely a flag or a counter as a size.
        return type(new) is int and new > 1 and new in self._lengths

    def _refuse(self, path: str, name: str, how: str) -> None:
        raise Refused(carried(path, name, how))


def carried(path: str, name: str, how: str) -> str:
    """Return the message for an attribute that goes from one call to the next."""
    return (
        f"its forward changes `{name}` of {path or 'the model'} {how} and reads it in the next "
        "call, and a trace would have the value of one call in every batch. Make it a buffer that "
        "is changed in place (register_buffer), or an input of the model"
    )


def _is_equal(old: Any, new: Any) -> bool:
    """Return whether a plain value was replaced by an equal one."""
    return isinstance(old, (bool, int, float, str)) and type(old) is type(new) and old == new


def _depends_on_data(size: torch.SymInt) -> bool:
    """Return whether a size is known only when the graph runs."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def _is_cache(old: Any, new: Any) -> bool:
    """Return whether a new value is computed from sizes of the inputs and constants alone.

    Then the next call would compute it again.
    """
    was_empty = old is None or old is MISSING
    if isinstance(new, bool) or new is MISSING or new is None:
        return False  # a flag steers what the next call does
    if isinstance(new, int):
        return was_empty
    if isinstance(new, torch.SymInt):
        return was_empty and not _depends_on_data(new)
    if isinstance(new, Tensor):
        return _is_table(new, alone=isinstance(old, Tensor))
    if isinstance(new, (list, tuple, dict)):
        items = new.values() if isinstance(new, dict) else new
        return all(_is_cache(None, item) for item in items)
    return isinstance(new, (torch.dtype, torch.device, torch.Size)) and old in (None, MISSING)


def _only_caches_added(before: Any, value: Any) -> bool:
    """Return whether a dict has changed only by additional entries that are caches.

    Args:
        before: the summary of the dict before.
        value: the dict.
    """
    if not isinstance(value, dict) or before[0] != "dict":
        return False
    unchanged = dict(before[1])
    added = []
    for key, item in value.items():
        key_summary = summary(key)
        if key_summary not in unchanged:
            added.append(item)
        elif unchanged.pop(key_summary) != summary(item):
            return False
    return not unchanged and all(_is_cache(None, item) for item in added)


def _is_table(tensor: Tensor, *, alone: bool) -> bool:
    """Return whether a tensor of the trace depends on sizes and constants alone.

    It depends neither on weights, nor on values of the inputs, nor on random numbers.

    Args:
        tensor: the tensor.
        alone: it must not depend on any attribute that is a tensor either, since one of these may
            be its own previous value.
    """
    mode = get_proxy_mode()
    if mode is None:
        return False
    tracer: Any = mode.tracer
    proxy = tracer.unwrap_proxy(tensor)
    if not isinstance(proxy, fx.Proxy):
        return not alone
    excluded = ("placeholder", "get_attr") if alone else ("placeholder",)
    stack, visited = [proxy.node], {proxy.node}
    while stack:
        node = stack.pop()
        tags = getattr(node.target, "tags", ())
        if node.op in excluded or torch.Tag.nondeterministic_seeded in tags:
            return False
        if str(node.target).startswith(("aten.sym_size", "sym_size", "aten::sym_size")):
            continue  # depends on the shape of its argument, not on its values
        sources = [source for source in node.all_input_nodes if source not in visited]
        visited.update(sources)
        stack += sources
    return True


def is_users_class(kind: type) -> bool:
    """Return whether a class belongs neither to torch nor to Python."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ != "builtins" and (file is None or not is_torchs(file))
