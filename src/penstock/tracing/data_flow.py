"""Where the contents of some tensors go while a module runs: followed from op to op, below
autograd.

A buffer that a forward changes matters to training only if a later forward reads it. Batch norm's
running statistics are changed and not read; a codebook's means are both. The difference is not in
the buffer but in what is computed from it, which is followed here by the memory that every op reads
and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: Batch norms that in training normalise by the batch: (argument that says so, arguments that are
#: then only written).
_BATCH_NORMS: Final = {
    "native_batch_norm": (5, (3, 4)),
    "_native_batch_norm_legit": (5, (3, 4)),
    "_native_batch_norm_legit_functional": (5, (3, 4)),
    "_batch_norm_with_update": (None, (3, 4)),
    "_batch_norm_with_update_functional": (None, (3, 4)),
    "cudnn_batch_norm": (5, (3, 4)),
    "miopen_batch_norm": (5, (3, 4)),
}
#: Ops that leave nothing of what was there.
_OVERWRITE: Final = ("copy_", "fill_", "zero_")
#: Ops that look rows of a table up.
_TABLES: Final = ("embedding", "_embedding_bag")
#: The arguments of such an op that its result depends on begin here; the first is what it writes.
_SOURCES: Final = 1

#: Packages whose objects hold no results.
_OPAQUE: Final = ("builtins", "torch", "penstock")

_NOTHING: Final[frozenset[str]] = frozenset()


class DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Follows some tensors by name while it is entered.

    Attributes:
        read_by_python: names whose contents became a number of Python's, by which the program may
        have branched. written: names that an op has written to. sparse: the tables of which an op
        has asked for sparse gradients.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read_by_python: set[str] = set()
        self.written: set[str] = set()
        self.sparse: list[Tensor] = []
        self._alive: list[Tensor] = []  # memory that is freed would be given to other tensors
        self._names: dict[int, frozenset[str]] = {}
        self._home: dict[int, set[str]] = {}
        for name, tensor in tensors.items():
            place = _place(tensor)
            if place is not None:
                self._home.setdefault(place, set()).add(name)
                self._names[place] = self._names.get(place, _NOTHING) | {name}
                self._alive.append(tensor)

    def names_in(self, value: Any) -> set[str]:
        """The names whose contents any tensor in `value` was computed from."""
        return {name for tensor in _tensors(value) for name in self._of(tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, and note what it has read and written."""
        kwargs = kwargs or {}
        read = {name for tensor in _read(func, args, kwargs) for name in self._of(tensor)}
        made = func(*args, **kwargs)
        if func.__name__.partition(".")[0] in _TABLES and _asks_for_sparse(func, args, kwargs):
            self.sparse.append(args[0])
        for tensor, overwritten in _written(func, args, kwargs):
            self._note(tensor, read, overwritten=overwritten)
        if read:
            self._take(made, read)
        return made

    def _of(self, tensor: Tensor) -> frozenset[str]:
        place = _place(tensor)
        return _NOTHING if place is None else self._names.get(place, _NOTHING)

    def _note(self, tensor: Tensor, read: set[str], *, overwritten: bool) -> None:
        place = _place(tensor)
        if place is None:
            self.read_by_python |= read  # a layout without one memory: taken for read
            return
        self.written |= self._home.get(place, set())
        before = _NOTHING if overwritten else self._names.get(place, _NOTHING)
        self._names[place] = before | read
        self._alive.append(tensor)

    def _take(self, made: Any, read: set[str]) -> None:
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                place = _place(leaf)
                if place is None:
                    self.read_by_python |= read
                    continue
                self._names[place] = self._names.get(place, _NOTHING) | read
                self._alive.append(leaf)
            elif isinstance(leaf, (bool, int, float, complex)):
                self.read_by_python |= read


def has_custom_function(value: Any) -> bool:
    """Whether the graph behind any tensor in `value` has an `autograd.Function` of Python, whose
    backward may read anything.
    """
    waiting: list[Any] = [tensor.grad_fn for tensor in _tensors(value)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
    return False


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in a nested value; objects that torch takes for leaves (dataclasses, user
    classes) are looked into.
    """
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and type(leaf).__module__.partition(".")[0] not in _OPAQUE:
            yield from _tensors(list(getattr(leaf, "__dict__", {}).values()), depth - 1)
            if isinstance(leaf, Mapping):
                yield from _tensors(list(leaf.values()), depth - 1)


def _place(tensor: Tensor) -> int | None:
    """What tells the memory of a tensor from others'; None where it has not one memory."""
    try:
        place: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return place


def _read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """The tensors that an op's results depend on."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    if name in _BATCH_NORMS:
        flag, statistics = _BATCH_NORMS[name]
        if flag is None or (len(args) > flag and args[flag]):
            args = tuple(arg for place, arg in enumerate(args) if place not in statistics)
    if name in _OVERWRITE and _covers(args[0]):
        args = args[_SOURCES:]
    return _tensors((args, dict(kwargs)))


def _written(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an op writes to, and whether it leaves nothing of what was there."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return
    name = func.overloadpacket.__name__
    statistics: tuple[int, ...] = _BATCH_NORMS[name][1] if name in _BATCH_NORMS else ()
    for place, argument in enumerate(schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if not writes and place not in statistics:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for tensor in _tensors(value):
            yield tensor, name in _OVERWRITE and _covers(tensor)


def _asks_for_sparse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a look-up's argument `sparse` is true."""
    places = [place for place, each in enumerate(func._schema.arguments) if each.name == "sparse"]
    return any(args[place] if place < len(args) else kwargs.get("sparse") for place in places)


def _covers(tensor: Any) -> bool:
    """Whether a tensor is all of its memory."""
    if not isinstance(tensor, Tensor) or _place(tensor) is None:
        return False
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and tensor.is_contiguous()
