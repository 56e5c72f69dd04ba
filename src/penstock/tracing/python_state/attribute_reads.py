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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as torch_module

from penstock.tracing.faults import Refused, is_torchs
from penstock.tracing.python_state.python_values import describe_value, is_mutable, summary

#: Value of an attribute that does not exist.
MISSING = object()

#: Attributes that belong to torch, not to the model: those of every module (but `training`), and
#: two of torch's recurrent modules, which are set again when torch.export replaces parameters.
TORCHS = frozenset({"_flat_weights", "_flat_weight_refs", *vars(nn.Module())} - {"training"})

_FILE_OF_MODULE = torch_module.__file__

#: Added to a number that may be a counter or a cache: a counter continues from there, a cache is
#: set to the same value as before.
_COUNTER_OFFSET = 1_000_003


@dataclass(frozen=True)
class _ModuleReads:
    """What one forward does with the attributes of one module.

    Attributes:
        path: the path of the module.
        attributes: its `__dict__`.
        before: a copy of it from before the forward.
        read: the attributes that were read.
        unchanged_when_read: those of them that the forward had not set when it first read them.
        contents: of these, if they are mutable, a digest from when they were first read.
    """

    path: str
    attributes: dict[str, Any]
    before: dict[str, Any]
    read: set[str] = field(default_factory=set)
    unchanged_when_read: set[str] = field(default_factory=set)
    contents: dict[str, Any] = field(default_factory=dict)


class Reads:
    """Records one forward of a model.

    Attributes:
        written: by the path of a module, the attributes that the forward has set before it read
            them, or that are caches.
        sizes: by path and name, numbers that the forward has read and then set to a size of its
            inputs, as text. They are caches if they do not depend on their previous value.
        settled: by path and name, options of an object, such as a configuration, that were None and
            that the forward has set to a text. They are like those of the model if the next call
            changes nothing and does the same.
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
        self.written: dict[str, set[str]] = {}
        self.sizes: dict[tuple[str, str], str] = {}
        self.tables: dict[tuple[str, str], tuple[list[int], torch.dtype]] = {}
        self.settled: dict[tuple[str, str], dict[str, str]] = {}
        self._modules: dict[int, _ModuleReads] = {}  # by id of the module's `__dict__`
        for path, module in model.named_modules():
            attributes = module.__dict__
            self._modules[id(attributes)] = _ModuleReads(path, attributes, dict(attributes))

    @property
    def names(self) -> dict[str, set[str]]:
        """By the path of a module, the attributes that were read."""
        return {module.path: module.read for module in self._modules.values()}

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
            """Read an attribute, and note it if it belongs to the model."""
            if threading.get_ident() == thread:
                # A module that the forward creates keeps nothing from one call to the next.
                reads = self._modules.get(id(plain(module, "__dict__")))
                if reads is not None and name not in reads.read:
                    if name != "__dict__":
                        _record(reads, name)
                    # torch's own methods of a module read `__dict__` without its attributes.
                    elif sys._getframe(1).f_code.co_filename != _FILE_OF_MODULE:
                        for attribute in reads.attributes.keys() - reads.read:
                            _record(reads, attribute)
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
        for reads in self._modules.values():
            self._check(reads)

    def fill(self, model: nn.Module) -> None:
        """Set what may be a cache in another instance of the model as its forward has set it.

        A number that may be a size gets another value: a counter goes on from there.
        """
        for path, name in self.sizes:
            vars(model.get_submodule(path))[name] += _COUNTER_OFFSET
        for (path, name), (shape, dtype) in self.tables.items():
            vars(model.get_submodule(path))[name] = torch.zeros(shape, dtype=dtype)
        for (path, name), options in self.settled.items():
            vars(vars(model.get_submodule(path))[name]).update(options)

    def _check(self, reads: _ModuleReads) -> None:
        """Reject attributes of a module that go from one call to the next; record caches."""
        for name in {**reads.before, **reads.attributes}:
            if name in TORCHS:
                continue
            old = reads.before.get(name, MISSING)
            new = reads.attributes.get(name, MISSING)
            if name in self._caches.get(reads.path, ()):
                self._add_written(reads.path, name)
            elif old is new:
                self._check_contents(reads, name, new)
            else:
                self._check_replaced(reads, name, old, new)

    def _check_replaced(self, reads: _ModuleReads, name: str, old: Any, new: Any) -> None:
        """Check an attribute to which the forward has assigned another object."""
        path = reads.path
        if name not in reads.unchanged_when_read:
            pass  # set before it was read: nothing goes from one call to the next
        elif _is_equal(old, new) or _is_cache(old, new):
            if old is None and isinstance(new, Tensor):
                shape = [int(getattr(size, "hint", size)) for size in new.shape]
                self.tables[path, name] = shape, new.dtype
        elif self._is_size(old, new):
            self.sizes[path, name] = str(new)
        else:
            how = f"from {describe_value(old)} to {describe_value(new)}"
            message = carried_message(path, name, how)
            if old is MISSING or old is None:
                message += ". If the first call alone sets it, call the model once before"
            raise Refused(message)
        self._add_written(path, name)

    def _check_contents(self, reads: _ModuleReads, name: str, value: Any) -> None:
        """Check an attribute that is still the same object, for changes in place."""
        before = reads.contents.get(name)
        if before is None or before == summary(value):
            return
        options = _settled_options(before, value)
        if options:
            self.settled[reads.path, name] = options
            return
        if not _only_caches_added(before, value):
            raise Refused(carried_message(reads.path, name, "in place"))
        self._add_written(reads.path, name)

    def _add_written(self, path: str, name: str) -> None:
        """Note that the forward sets an attribute of a module."""
        self.written.setdefault(path, set()).add(name)

    def _is_size(self, old: Any, new: Any) -> bool:
        """Return whether an integer was replaced by a size of the inputs."""
        if isinstance(old, bool) or not isinstance(old, int):
            return False
        if isinstance(new, torch.SymInt):
            return not _depends_on_data(new)
        # 0 and 1 are as likely a flag or a counter as a size.
        return type(new) is int and new > 1 and new in self._lengths


def _record(reads: _ModuleReads, name: str) -> None:
    """Record that the forward reads an attribute for the first time."""
    reads.read.add(name)
    value = reads.attributes.get(name, MISSING)
    if value is reads.before.get(name, MISSING):
        reads.unchanged_when_read.add(name)
        # A tensor that is changed in place is refused by its own rule, see `flow`.
        if is_mutable(value) and not isinstance(value, Tensor):
            reads.contents[name] = summary(value)


def carried_message(path: str, name: str, how: str) -> str:
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


def _settled_options(before: Any, value: Any) -> dict[str, str]:
    """Return the attributes of an object that were None and are a text now.

    Args:
        before: the summary of the object before.
        value: the object.

    Returns:
        The new texts by name; none if anything else has changed.
    """
    after, empty = summary(value), summary(None)
    if not hasattr(value, "__dict__") or not isinstance(before[1], tuple):
        return {}
    if before[0] != after[0] or len(before[1]) != len(after[1]):
        return {}
    options = {}
    for (key, old), (new_key, new) in zip(before[1], after[1], strict=True):
        if key != new_key or (old != new and (old != empty or new[0] != "str")):
            return {}
        if old != new:
            options[key[1]] = new[1]
    return options


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
