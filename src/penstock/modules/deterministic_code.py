"""Prove, by reading the code of a module's forward, that it draws no random numbers.

Saving, seeding and restoring the generators takes about 50 µs per layer and micro-batch, a third of
the forward of a linear layer of width 64. Whether a forward draws cannot be decided in general;
most code of users, however, calls submodules and well-known ops alone. The proof reads the code
objects of the module's classes and allows only

- names of globals that are such ops, plain numbers, or functions that satisfy the same rules;
- attributes that are submodules, parameters, buffers, plain numbers, or methods that satisfy them;
- attributes of anything else (tensors, mostly) that are in `_OPS`.

Everything else, such as an import, an assignment to an attribute or an unknown name, is no proof. A
forward without a proof may still be deterministic: it is then seeded as before.

The values that pass between layers are assumed to be tensors or containers of tensors. A class of
the user that draws in an operator would not be noticed here, but by the observation of forwards,
see `stage_random`.
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Functions of torch, torch.nn.functional and math, methods of tensors and of Python's containers,
#: and attributes of all of these that draw nothing, whatever their arguments. A test compares them
#: with the tags of torch's ops. Not among them, although often used: dropout and attention, which
#: draw depending on an argument.
_OPS = frozenset(
    """
    abs acos add add_ addbmm addcdiv addcmul addmm all amax amin any append arange argmax argmin
    as_tensor asin atan atan2 baddbmm bfloat16 bmm bool broadcast_to cat ceil chunk clamp clamp_
    clamp_max clamp_min clone concat concatenate contiguous conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d cos cosh count cross_entropy cumprod cumsum detach device diag
    diagonal diff dim div div_ dot double dtype einsum elu embedding eq erf exp exp2 expand
    expand_as expm1 extend eye fill_ finfo flatten flip float float16 float32 float64 floor
    floor_divide fmod full full_like functional gather ge gelu get glu group_norm gt half hardsigmoid
    hardswish hardtanh hypot index_add index_select inf int int32 int64 interpolate is_cuda
    is_floating_point isfinite isinf isnan item items keys kthvalue layer_norm le leaky_relu lerp
    linear linspace log log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or
    logit logsigmoid logsumexp long lt mT masked_fill masked_fill_ masked_select matmul max maximum
    mean median min minimum mish mm movedim mse_loss mul mul_ mv nan nan_to_num narrow ndim ne neg
    neg_ new_full new_ones new_zeros nll_loss nn nonzero norm normalize numel one_hot ones ones_like
    outer pad permute pi pixel_shuffle pixel_unshuffle pop pow prod reciprocal relu relu6 relu_
    remainder repeat repeat_interleave requires_grad reshape reshape_as rms_norm roll round rsqrt
    scatter scatter_add select selu shape sigmoid sign silu sin sinh size softmax softplus softsign
    sort split split_with_sizes sqrt square squeeze stack std stride sub sub_ sum swapaxes t
    tan tanh tensor_split tile to topk trace transpose tril triu true_divide trunc type_as unbind
    unflatten unfold unsqueeze update values var view view_as where zeros zeros_like
    """.split()  # noqa: SIM905 - a list of 200 strings is no easier to read
)

#: Builtins that run no code but that of their arguments, which is read as well.
_BUILTINS = frozenset(
    """
    AssertionError NotImplementedError RuntimeError TypeError ValueError abs all any bool dict
    divmod enumerate float int isinstance len list max min range reversed round set slice sorted str
    sum super tuple zip
    """.split()  # noqa: SIM905 - as above
)

_MODULES = (torch, nn, functional, math)

#: Classes of torch whose own code draws nothing; a module of the user may derive from them.
_BASES = (
    object,
    Generic,
    nn.Module,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Embedding,
    nn.LayerNorm,
)

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

#: Special names of a class that a call of its instance does not run.
_UNUSED_SPECIAL_NAMES = frozenset(
    """
    __abstractmethods__ __annotate_func__ __annotations__ __annotations_cache__ __classcell__
    __constants__ __dict__ __doc__
    __final__ __firstlineno__ __init__ __module__ __orig_bases__ __parameters__ __qualname__ __repr__
    __slots__ __static_attributes__ __type_params__ __weakref__ _abc_impl
    """.split()  # noqa: SIM905 - as above
)

_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTE_OPS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_REFUSED_OPS = frozenset(
    {
        "DELETE_ATTR",
        "DELETE_GLOBAL",
        "IMPORT_FROM",
        "IMPORT_NAME",
        "LOAD_BUILD_CLASS",
        "STORE_ATTR",
        "STORE_GLOBAL",
    }
)


class _NoProof(Exception):
    """The code contains something that may draw."""


@dataclass(frozen=True, eq=False)
class DeterminismProof:
    """The values on which a proof rests.

    Attributes:
        bindings: namespaces (the globals of a function, or the attributes of a class or a module),
            names in them, and the values that were read; for a plain number its class instead, as
            any other number does as well.
    """

    bindings: tuple[tuple[Mapping[str, Any], str, Any], ...]

    def holds(self) -> bool:
        """Return whether all names still have the values that were read."""
        for namespace, name, expected in self.bindings:
            value = namespace.get(name, _MISSING)
            if value is not expected and not (expected is _PLAIN and _is_plain(value)):
                return False
        return True


_MISSING = object()


def prove_deterministic(module: nn.Module) -> DeterminismProof | None:
    """Return a proof that the user's code in a module draws no random numbers.

    Args:
        module: the module. Its submodules of torch's own classes are not inspected, see
            `may_draw`.

    Returns:
        The proof; None if there is none.
    """
    reader = _Reader(list(module.modules()))
    try:
        reader.read_modules()
    except _NoProof:
        return None
    return DeterminismProof(tuple(reader.bindings))


def is_torchs(kind: type) -> bool:
    """Return whether a class is one of torch's own modules."""
    return kind.__module__.startswith("torch.nn.modules.")


@dataclass
class _Reader:
    """Reads the code that a call of a module can reach; each function once.

    Attributes:
        parts: the module and all submodules.
        bindings: see `DeterminismProof`.
    """

    parts: list[nn.Module]
    bindings: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    _read: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._classes: dict[type, None] = {}
        for part in self.parts:
            if not is_torchs(type(part)):
                self._classes.update(dict.fromkeys(type(part).__mro__))
        # Functions of a library may have been imported under any name.
        holders = (torch, functional, math)
        allowed = (getattr(holder, name, None) for holder in holders for name in _OPS)
        self._op_ids = {id(value) for value in allowed if value is not None}

    def read_modules(self) -> None:
        """Read the forwards of all parts of classes of the user.

        Raises:
            _NoProof: one may draw.
        """
        for kind in self._classes:
            self._check_class(kind)
        for part in self.parts:
            if is_torchs(type(part)):
                continue
            names = vars(part)
            # Where a call would run something else than the forward of the class.
            replaced = "_call_impl" in names or names.get("_compiled_call_impl") is not None
            if replaced or "forward" in names:
                raise _NoProof
            self._read_attribute("forward")

    def _check_class(self, kind: type) -> None:
        """Refuse classes of torch that are not known, and classes that change what a call runs."""
        if kind.__module__.partition(".")[0] in ("torch", "typing", "builtins"):
            if kind not in _BASES:
                raise _NoProof
            return
        for name in vars(kind):
            special = name.startswith("_") and (name.startswith("__") or hasattr(nn.Module, name))
            if special and name not in _UNUSED_SPECIAL_NAMES:
                raise _NoProof

    def _read_function(self, function: FunctionType) -> None:
        """Read a function and everything that it reaches."""
        if id(function) in self._read:
            return
        self._read.add(id(function))
        variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in variables:
            if name != "__class__":  # which super() refers to
                self._check_value(_contents(cell))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._check_value(value)
        for code in _nested(function.__code__):
            self._read_code(code, function.__globals__)

    def _read_code(self, code: CodeType, namespace: Mapping[str, Any]) -> None:
        """Check all names that a code object uses.

        Args:
            code: the code, without the code that is nested in it.
            namespace: its globals.
        """
        for instruction in dis.get_instructions(code):
            if instruction.opname in _REFUSED_OPS:
                raise _NoProof
            if instruction.opname in _GLOBAL_OPS:
                self._check_global(instruction.argval, namespace)
            elif instruction.opname in _ATTRIBUTE_OPS:
                self._read_attribute(instruction.argval)

    def _check_global(self, name: str, namespace: Mapping[str, Any]) -> None:
        """Check the value of a global name; builtins that draw no random numbers are accepted."""
        if name in namespace:
            value = namespace[name]
            self._bind(namespace, name, value)
            self._check_value(value)
        elif name not in _BUILTINS or not hasattr(builtins, name):
            raise _NoProof

    def _check_value(self, value: Any) -> None:
        """Check a value that code refers to by a name of its own."""
        if isinstance(value, FunctionType) and id(value) not in self._op_ids:
            self._read_function(value)
            return
        allowed = (
            _is_plain(value)
            or id(value) in self._op_ids
            or value is Tensor
            or type(value) in (Tensor, nn.Parameter)
            or any(value is module for module in _MODULES)
        )
        if not allowed:
            raise _NoProof

    def _read_attribute(self, name: str) -> None:
        """Check everything that an attribute of this name may be, on whatever it is looked up."""
        may_be_op = name in _OPS
        # It may be a method of a tensor, and only those in `_OPS` are known to draw nothing.
        if hasattr(Tensor, name) and not may_be_op:
            raise _NoProof
        defined = False
        for kind in self._classes:
            if name in vars(kind) and kind not in _BASES:
                defined = True
                self._read_class_attribute(kind, name)
        for part in self.parts:
            defined |= self._check_instance_attribute(part, name)
        if not defined and not may_be_op and name != "forward":
            raise _NoProof

    def _read_class_attribute(self, kind: type, name: str) -> None:
        """Check an attribute of a class of the user."""
        value = vars(kind)[name]
        self._bind(vars(kind), name, value)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        self._check_value(value)

    def _check_instance_attribute(self, part: nn.Module, name: str) -> bool:
        """Check an attribute of a part, and return whether the part has it."""
        if name in part._modules or name in part._parameters or name in part._buffers:
            return True
        values = vars(part)
        if name not in values:
            return False
        if not _is_plain(values[name]):
            raise _NoProof
        self._bind(values, name, values[name])
        return True

    def _bind(self, namespace: Mapping[str, Any], name: str, value: Any) -> None:
        """Note that the proof rests on a value."""
        self.bindings.append((namespace, name, _PLAIN if _is_plain(value) else value))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, or a tuple of them."""
    if type(value) is tuple:
        return all(_is_plain(item) for item in value)
    return type(value) in _PLAIN


def _contents(cell: Any) -> Any:
    """Return the value of a variable of an enclosing function."""
    try:
        return cell.cell_contents
    except ValueError as error:  # a cell that is still empty
        raise _NoProof from error


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all that are nested in it, such as those of its lambdas."""
    yield code
    constants: Iterable[Any] = code.co_consts
    for constant in constants:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
