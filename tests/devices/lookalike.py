"""A device that torch takes for an accelerator, in pure Python, for machines without a GPU.

Its import registers it; `tensor.to("lookalike:0")` then works. Data lie in CPU memory and
nothing is asynchronous. What it has in common with a GPU:

- A tensor on it and one on the CPU cannot be mixed, except CPU numbers without dimensions, as on
  CUDA: the op raises.
- Autograd runs its nodes, and what hooks and recomputation run inside them, in a device thread.
- Copies between it and the host are counted, and so are ops that make a host wait (`LOG`).
- gloo and NumPy cannot read its tensors.

What it does not have: streams, events, an allocator, kernels with numerics of their own.

It changes torch for the whole process, and a process that has run a backward on it does not end by
itself, as autograd's device thread cannot be joined: use it in a process of its own, which ends
with `os._exit`, such as a rank of `launch`. Works with torch 2.11 to 2.13, whose interface for this
is experimental (torch.utils.backend_registration).
"""

from __future__ import annotations

import collections
import sys
import threading
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "lookalike"
DEVICE = f"{NAME}:0"

#: How often the host copied to the device ("h2d"), from it ("d2h"), or waited for it ("wait OP").
LOG: collections.Counter[str] = collections.Counter()
#: The lines of penstock that caused each of these.
LINES: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
#: How many ops ran, by the name of the thread that ran them.
THREADS: collections.Counter[str] = collections.Counter()

#: The graph that ops are recorded in, if one is being captured.
CAPTURE: list[Graph] = []

#: Ops whose result is on the host, or has a shape that depends on values: the host waits for both.
_WAITS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique2",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_consecutive",
    }
)


#: Ops for which a mask is turned into indices, whose number the host has to know.
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})


def clear() -> None:
    """Begin all counts anew."""
    LOG.clear()
    LINES.clear()
    THREADS.clear()


def _count(what: str) -> None:
    """Count a copy or a wait, and the line of penstock that asked for it.

    Raises:
        CaptureError: a graph is being captured.
    """
    LOG[what] += 1
    frame = sys._getframe(2)
    while frame is not None and "/penstock/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        line = "code outside of penstock"
    else:
        line = f"{frame.f_code.co_filename.rpartition('/penstock/')[2]}:{frame.f_lineno}"
        LINES[what][line] += 1
    if CAPTURE:
        raise CaptureError(f"{what} by {line} while a graph is captured")


class CaptureError(RuntimeError):
    """The host waits for the device, or copies to it, while a graph is captured."""


class Graph:
    """Ops that were recorded in the order in which they ran, in all threads, to be played again in
    the same memory: what a CUDA graph does to a program that is captured.

    As with a CUDA graph nothing but kernels is played again: numbers that the host has computed,
    seeds that it has set and branches that it has taken stay as they were. As with a CUDA graph a
    wait of the host for the device raises while the graph is captured.
    """

    def __init__(self) -> None:
        """Begin with no ops."""
        self._lock = threading.RLock()
        self._ops: list[tuple[Any, Any, Any, Any]] = []

    def __enter__(self) -> Graph:  # noqa: PYI034 - typing.Self is newer
        """Begin to record."""
        CAPTURE.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        """End the capture."""
        CAPTURE.remove(self)

    def __len__(self) -> int:
        """Return the number of ops."""
        return len(self._ops)

    def run(self, func: Any, args: Any, options: Any) -> Any:
        """Run an op on data in host memory, and record it. The memory lasts as long as the graph."""
        with self._lock:
            result = func(*args, **options)
            self._ops.append((func, args, options, result))
        return result

    def replay(self) -> None:
        """Run all ops again: results go to the memory of the first ones."""
        with torch.no_grad():
            for func, args, options, result in self._ops:
                again = func(*args, **options)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    # An op that works in place, or returns a view, has written there already.
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _call(func: Any, args: Any, options: Any) -> Any:
    """Run an op on data in host memory; while a graph is captured, record it."""
    return CAPTURE[0].run(func, args, options) if CAPTURE else func(*args, **options)


class Lookalike(torch.Tensor):
    """A tensor on the device; `inner` has its data."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Lookalike:  # noqa: PYI034 - typing.Self is newer
        """Make a tensor that has no data itself."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
            requires_grad=False,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        """Take the data.

        Args:
            inner: a CPU tensor.
        """
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Tell torch that the tensor is made of another one."""
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Lookalike:
        """Make the tensor from what `__tensor_flatten__` named."""
        del meta, size, stride
        return Lookalike(inner["inner"])

    def __repr__(self) -> str:
        """Show the data."""
        return f"Lookalike({self.inner})"

    # Addresses are those of the data: code that tells storages apart by them works as on a GPU.

    def untyped_storage(self) -> Any:
        """Return the storage of the data."""
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        """Return the address of the data."""
        return self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the data; a parameter stays one."""
        if id(self) not in memo:
            copied: Any = Lookalike(self.inner.detach().clone())
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, in the words that torch has for CUDA."""
        del args, kwargs
        message = f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first."
        raise TypeError(message)

    def tolist(self) -> Any:
        """Return the values, for which a host would wait."""
        _count("wait tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        """Run an op on the data."""
        del types
        options = dict(kwargs or {})
        name = func._schema.name
        THREADS[threading.current_thread().name] += 1
        if name == "aten::_to_copy":
            return _converted(func, args[0], options)
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            _count_copies(args)
        elif "index" not in name:  # indices may be on the CPU, as on CUDA
            _check_one_device(name, (args, options))
        if name in _WAITS or (name in _INDEXING and _has_mask(args)):
            _count(f"wait {name.removeprefix('aten::')}")
        return _run(func, args, options)


def _has_mask(args: Any) -> bool:
    """Whether an index among the arguments of an op is a mask."""
    indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _data(value: Any) -> Any:
    """Return the data of a tensor on the device; anything else as it is."""
    return value.inner if isinstance(value, Lookalike) else value


def _converted(func: Any, source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Copy a tensor to another dtype or device."""
    device = options.pop("device", None)
    options.pop("non_blocking", None)
    options.pop("pin_memory", None)
    result = _call(func, (_data(source),), options)
    if device is None or torch.device(device).type == NAME:
        return Lookalike(result)
    if isinstance(source, Lookalike) and torch.device(device).type == "cpu":
        _count("d2h")
    return result


def _count_copies(args: Any) -> None:
    """Count the copies between device and host in the arguments of `copy_` and `_foreach_copy_`."""
    several = isinstance(args[0], (list, tuple))
    pairs = zip(args[0], args[1], strict=True) if several else [args[:2]]
    for target, source in pairs:
        if isinstance(target, Lookalike) and not isinstance(source, Lookalike):
            _count("h2d")
        if isinstance(source, Lookalike) and not isinstance(target, Lookalike):
            _count("d2h")


def _check_one_device(name: str, values: Any) -> None:
    """Refuse to mix tensors of the device with CPU tensors that have dimensions.

    Raises:
        RuntimeError: they are mixed.
    """
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    if not any(isinstance(tensor, Lookalike) for tensor in tensors):
        return
    for tensor in tensors:
        if not isinstance(tensor, Lookalike) and tensor.dim() > 0:
            message = (
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and cpu! ({name}, CPU tensor of {tuple(tensor.shape)})"
            )
            raise RuntimeError(message)


def _run(func: Any, args: Any, options: dict[str, Any]) -> Any:
    """Run an op on the data, and return its results on the device."""
    to_host = False
    device = options.get("device")
    if device is not None:
        to_host = torch.device(device).type != NAME
        if not to_host:
            options["device"] = "cpu"
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Lookalike)]
    arguments = {id(tensor.inner): tensor for tensor in tensors}
    result = _call(func, tree_map(_data, args), tree_map(_data, options))

    def on_device(value: Any) -> Any:
        """Return a result as a tensor of the device; an argument that was changed, as itself."""
        if not isinstance(value, torch.Tensor) or to_host:
            return value
        argument = arguments.get(id(value))
        return Lookalike(value) if argument is None else argument

    return tree_map(on_device, result)


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Lookalike:
    """Make an uninitialised tensor on the device."""
    del layout, device, pin_memory
    order = memory_format or torch.contiguous_format
    return Lookalike(torch.empty(size, dtype=dtype, device="cpu", memory_format=order))


def _empty_strided(
    size: Any,
    stride: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Lookalike:
    """Make an uninitialised tensor with given strides on the device."""
    del layout, device, pin_memory
    return Lookalike(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    """Copy one tensor into another: how torch moves CPU tensors to the device."""
    del non_blocking
    if isinstance(target, Lookalike) and not isinstance(source, Lookalike):
        _count("h2d")
    _data(target).copy_(_data(source))
    return target


def _swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange two tensors as `torch.utils.swap_tensors` does, also where there are weak
    references.

    `nn.Module.to` swaps what is moved to a device in Python. torch refuses that for tensors with
    weak references; these lead to the Python object, which stays the same here as with CUDA's
    `param.data = ...`.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


_setup_privateuseone_for_python_backend(NAME)
getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
torch.utils.swap_tensors = _swap_tensors
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
