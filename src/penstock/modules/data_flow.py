"""Data flow at run time: follows the contents of tensors from op to op, below autograd.

A buffer that a forward changes matters to training only if a later forward reads it. Batch norm's
running statistics are changed and not read; the means of a codebook are both. The difference is not
visible in the buffer but in what is computed from it. It is followed here by the memory that every
op reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: Batch norms that in training normalise by the batch: position of the argument `training`, and
#: positions of the arguments that are then only written.
_BATCH_NORMS: Final = {
    "native_batch_norm": (5, (3, 4)),
    "_native_batch_norm_legit": (5, (3, 4)),
    "_native_batch_norm_legit_functional": (5, (3, 4)),
    "_batch_norm_with_update": (None, (3, 4)),
    "_batch_norm_with_update_functional": (None, (3, 4)),
    "cudnn_batch_norm": (5, (3, 4)),
    "miopen_batch_norm": (5, (3, 4)),
}
#: Ops that overwrite their first argument completely.
_OVERWRITE: Final = ("copy_", "fill_", "zero_")
#: Ops that look up rows of a table.
_TABLES: Final = ("embedding", "_embedding_bag")

#: Packages whose objects are not searched for tensors.
_OPAQUE: Final = ("builtins", "torch", "penstock")

_NO_NAMES: Final[frozenset[str]] = frozenset()


class DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Follows the contents of named tensors while it is entered.

    Attributes:
        read_by_python: names whose contents became a Python number, on which the program may
            branch.
        written: names of tensors that an op has written to.
        sparse: embedding tables for which an op has requested sparse gradients.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read_by_python: set[str] = set()
        self.written: set[str] = set()
        self.sparse: list[Tensor] = []
        # Keeps memory allocated, so that its id is not reused for other tensors.
        self._alive: list[Tensor] = []
        # Names that each memory's contents depend on, and names of the tensors in that memory.
        self._names: dict[int, frozenset[str]] = {}
        self._home: dict[int, set[str]] = {}
        for name, tensor in tensors.items():
            memory = _memory_id(tensor)
            if memory is not None:
                self._home.setdefault(memory, set()).add(name)
                self._names[memory] = self._names.get(memory, _NO_NAMES) | {name}
                self._alive.append(tensor)

    def names_in(self, value: Any) -> set[str]:
        """Return the names of the tensors from which any tensor in `value` was computed."""
        return {name for tensor in _tensors(value) for name in self._of(tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, and record what it has read and written."""
        kwargs = kwargs or {}
        # Before the op runs, since it may overwrite what it reads.
        read = {name for tensor in _read(func, args, kwargs) for name in self._of(tensor)}
        outputs = func(*args, **kwargs)
        if func.__name__.partition(".")[0] in _TABLES and _asks_for_sparse(func, args, kwargs):
            self.sparse.append(args[0])
        for tensor, overwritten in _written(func, args, kwargs):
            self._record_write(tensor, read, overwritten=overwritten)
        if read:
            self._record_outputs(outputs, read)
        return outputs

    def _of(self, tensor: Tensor) -> frozenset[str]:
        memory = _memory_id(tensor)
        return _NO_NAMES if memory is None else self._names.get(memory, _NO_NAMES)

    def _record_write(self, tensor: Tensor, read: set[str], *, overwritten: bool) -> None:
        """Record that a tensor is written from values that depend on `read`."""
        memory = _memory_id(tensor)
        if memory is None:
            # A layout without a single memory cannot be followed; assume that it is read.
            self.read_by_python |= read
            return
        self.written |= self._home.get(memory, set())
        before = _NO_NAMES if overwritten else self._names.get(memory, _NO_NAMES)
        self._names[memory] = before | read
        self._alive.append(tensor)

    def _record_outputs(self, outputs: Any, read: set[str]) -> None:
        """Record that outputs of an op depend on `read`; numbers may decide what Python does."""
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                memory = _memory_id(leaf)
                if memory is None:
                    self.read_by_python |= read
                    continue
                self._names[memory] = self._names.get(memory, _NO_NAMES) | read
                self._alive.append(leaf)
            elif isinstance(leaf, (bool, int, float, complex)):
                self.read_by_python |= read


def has_custom_function(value: Any) -> bool:
    """Return whether the graph of any tensor in `value` has an `autograd.Function` of the user's.

    The backward of such a function may read any state.
    """
    stack: list[Any] = [tensor.grad_fn for tensor in _tensors(value)]
    visited: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        visited.add(node)
        stack += [after for after, _ in node.next_functions]
    return False


def _tensors(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a nested value.

    Objects that are leaves to torch (dataclasses, user classes) are searched down to `depth`
    levels.
    """
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and type(leaf).__module__.partition(".")[0] not in _OPAQUE:
            yield from _tensors(list(getattr(leaf, "__dict__", {}).values()), depth - 1)
            if isinstance(leaf, Mapping):
                yield from _tensors(list(leaf.values()), depth - 1)


def _memory_id(tensor: Tensor) -> int | None:
    """Return an identifier of a tensor's memory; None for layouts without a single memory."""
    try:
        address: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return address


def _read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    """Return the tensors on which an op's results depend."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    if name in _BATCH_NORMS:
        flag, statistics = _BATCH_NORMS[name]
        if flag is None or (len(args) > flag and args[flag]):
            args = tuple(arg for position, arg in enumerate(args) if position not in statistics)
    if name in _OVERWRITE and _covers(args[0]):
        args = args[1:]  # the first argument is only written
    return _tensors((args, dict(kwargs)))


def _written(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that an op writes to, and whether it overwrites them completely."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return
    name = func.overloadpacket.__name__
    # The schemas of batch norms do not declare that they write their statistics.
    statistics: tuple[int, ...] = _BATCH_NORMS[name][1] if name in _BATCH_NORMS else ()
    for position, argument in enumerate(schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if not writes and position not in statistics:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in _tensors(value):
            yield tensor, name in _OVERWRITE and _covers(tensor)


def _asks_for_sparse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a look-up requests sparse gradients, by its argument `sparse`."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "sparse":
            return bool(args[position] if position < len(args) else kwargs.get("sparse"))
    return False


def _covers(tensor: Any) -> bool:
    """Return whether a tensor covers all of its memory."""
    if not isinstance(tensor, Tensor) or _memory_id(tensor) is None:
        return False
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return whole and tensor.is_contiguous()
