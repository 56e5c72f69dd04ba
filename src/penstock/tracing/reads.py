"""Which attributes of a model's modules its forward reads, and which it changes.

What a forward reads becomes part of the graph: a number is a constant in it, a branch is taken once
and for all. What is read is therefore watched afterwards (see `watch`). What a forward changes and
reads again in its next call, as a counter, cannot be part of a graph at all, and is refused.
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
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.modules import module as torch_module

from penstock.tracing.faults import Refused, is_torchs
from penstock.tracing.plain import contents, described, summary

MISSING = object()

#: What every module keeps, and what torch's recurrent modules do besides their parameters: set anew
#: when these are exchanged, as
#: torch.export does.
TORCHS = frozenset({"_flat_weights", "_flat_weight_refs", *vars(nn.Module())} - {"training"})

_OWN_FILE = torch_module.__file__


class Reads:
    """Of one forward of a model.

    Attributes:
        names: by the path of a module, the attributes that were read.
        written: by the path of a module, the attributes that the forward has set before it read
        them, or that are caches. sizes: by path and name, numbers that the forward has read and
        then set to a size of its inputs, each in words: caches, if
            they do not depend on what they were before.

        tables: by path and name, the shape and dtype of tensors that the forward makes where there
        is None: caches, if the next call
            does not change them.

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
        for path, part in model.named_modules():
            self._dicts.setdefault(id(part.__dict__), (path, part.__dict__))
        self._before = {key: dict(names) for key, (_, names) in self._dicts.items()}
        self._seen: set[tuple[int, str]] = set()
        self._stale: set[tuple[int, str]] = set()
        self._contents: dict[tuple[int, str], Any] = {}
        self.names: dict[str, set[str]] = {}
        self.written: dict[str, set[str]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the forward in here.

        Raises:
            Refused: it has changed an attribute that it had read.
        """
        kind: Any = nn.Module
        plain, own = kind.__getattribute__, threading.get_ident()
        overridden = "__getattribute__" in vars(kind)

        def get(module: nn.Module, name: str) -> Any:
            if threading.get_ident() == own:
                names = plain(module, "__dict__")
                if (id(names), name) not in self._seen:
                    self._note(names, name)
            return plain(module, name)

        kind.__getattribute__ = get
        try:
            yield
        finally:
            if overridden:
                kind.__getattribute__ = plain
            else:
                del kind.__getattribute__
        self._check_written()

    def _note(self, names: dict[str, Any], name: str) -> None:
        key = id(names)
        if key not in self._dicts:
            return
        if name == "__dict__":
            if sys._getframe(2).f_code.co_filename != _OWN_FILE:
                for other in list(names):
                    if (key, other) not in self._seen:
                        self._note(names, other)
            return
        self._seen.add((key, name))
        path = self._dicts[key][0]
        self.names.setdefault(path, set()).add(name)
        value = names.get(name, MISSING)
        if value is self._before[key].get(name, MISSING):
            self._stale.add((key, name))
            # A tensor that is changed in place is refused by its own rule, see `flow`.
            if contents(value) and not isinstance(value, Tensor):
                self._contents[key, name] = summary(value)

    def _check_written(self) -> None:
        for key, (path, names) in self._dicts.items():
            before = self._before[key]
            for name in {**before, **names}:
                old, new = before.get(name, MISSING), names.get(name, MISSING)
                if name in TORCHS:
                    continue
                if name in self._caches.get(path, ()):
                    self.written.setdefault(path, set()).add(name)
                    continue
                if old is new:
                    self._check_contents(key, path, name, new)
                elif (key, name) not in self._stale or _same(old, new) or _of_sizes(old, new):
                    if (key, name) in self._stale and old is None and isinstance(new, Tensor):
                        shape = [int(getattr(size, "hint", size)) for size in new.shape]
                        self.tables[path, name] = shape, new.dtype
                    self.written.setdefault(path, set()).add(name)
                elif self._is_size(old, new):
                    self.sizes[path, name] = str(new)
                    self.written.setdefault(path, set()).add(name)
                else:
                    self._refuse(path, name, f"from {described(old)} to {described(new)}")

    def _check_contents(self, key: int, path: str, name: str, value: Any) -> None:
        before = self._contents.get((key, name))
        if before is None or before == summary(value):
            return
        if _added_of_sizes(before, value):
            self.written.setdefault(path, set()).add(name)
            return
        self._refuse(path, name, "in place")

    def _is_size(self, old: Any, new: Any) -> bool:
        if isinstance(old, bool) or not isinstance(old, int):
            return False
        if isinstance(new, torch.SymInt):
            return not free_unbacked_symbols(new)
        return type(new) is int and new > 1 and new in self._lengths

    def _refuse(self, path: str, name: str, how: str) -> None:
        raise Refused(carried(path, name, how))


def carried(path: str, name: str, how: str) -> str:
    """The message on an attribute that goes from one call to the next."""
    return (
        f"its forward changes `{name}` of {path or 'the model'} {how} and reads it in the next call, and a trace would have the value of "
        "one call in every batch. Make it a buffer that is changed in place (register_buffer), or an input of the model"
    )


def _same(old: Any, new: Any) -> bool:
    return isinstance(old, (bool, int, float, str)) and type(old) is type(new) and old == new


def _of_sizes(old: Any, new: Any) -> bool:
    """Whether a new value is a cache: made of sizes of the inputs and of constants, so that the
    next call would make it again.
    """
    if isinstance(new, bool) or new is MISSING or new is None:
        return False
    if isinstance(new, int):
        return old is None or old is MISSING
    if isinstance(new, torch.SymInt):
        return (old is None or old is MISSING) and not free_unbacked_symbols(new)
    if isinstance(new, Tensor):
        return _is_table(new, alone=isinstance(old, Tensor))
    if isinstance(new, (list, tuple)):
        return all(_of_sizes(None, item) for item in new)
    if isinstance(new, dict):
        return all(_of_sizes(None, item) for item in new.values())
    return isinstance(new, (torch.dtype, torch.device, torch.Size)) and old in (None, MISSING)


def _added_of_sizes(before: Any, value: Any) -> bool:
    """Whether nothing but such values has been added to a dict."""
    if not isinstance(value, dict) or before[0] != "dict":
        return False
    known = dict(before[1])
    added = [item for key, item in value.items() if summary(key) not in known]
    kept = [key for key, item in value.items() if known.get(summary(key)) == summary(item)]
    return len(kept) == len(known) and all(_of_sizes(None, item) for item in added)


def _is_table(tensor: Tensor, *, alone: bool) -> bool:
    """Whether a tensor of the trace depends on no weights, no content of the inputs, and no random
    numbers.

    With `alone`, on no tensor at all that was there before: the one in whose place it is put may be
    one.
    """
    mode = get_proxy_mode()
    if mode is None:
        return False
    tracer: Any = mode.tracer
    proxy = tracer.unwrap_proxy(tensor)
    if not isinstance(proxy, fx.Proxy):
        return not alone
    waiting, seen = [proxy.node], {proxy.node}
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" or torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            return False
        if alone and node.op == "get_attr":
            return False
        if not str(node.target).startswith(("aten.sym_size", "sym_size", "aten::sym_size")):
            fresh = [each for each in node.all_input_nodes if each not in seen]
            seen.update(fresh)
            waiting += fresh
    return True


def is_users_class(kind: type) -> bool:
    """Whether a class is neither torch's nor Python's."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ != "builtins" and (file is None or not is_torchs(file))
