"""Interception of calls that torch.export silently gets wrong: corrected, or rejected."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.tracing.checks import passing, record_check, record_sizes
from penstock.tracing.faults import Refused

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
#: Arguments of CTC loss after the scores and the targets, in order, and their defaults.
_CTC_NAMES = ("input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
_CTC_DEFAULTS = {"blank": 0, "reduction": "mean", "zero_infinity": False}
_DATA_GETTER = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor


class Interceptor(TorchFunctionMode):
    """Active while the model runs under torch.export.

    `.data` becomes `.detach()`, value checks become ops, and hooks on gradients are rejected.

    Attributes:
        functions: by name, the functions with a backward of their own that the model has called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__bool__":
            # `if tensor:` would make the graph hold for one branch alone. Where the other branch
            # raises, the condition becomes a check in the graph.
            frame = sys._getframe(1)
            passes = passing(frame)
            if passes is not None:
                record_check(args[0], passes=passes, frame=frame)
                return passes
        if name == "__get__" and func == _DATA_GETTER:
            # torch.export would take what `.data` returns for a constant.
            return args[0].detach()
        if func is torch._assert and isinstance(args[0], Tensor):
            record_check(args[0], passes=True, frame=sys._getframe(1))
            return None
        if func in (functional.ctc_loss, torch.ctc_loss):
            return _ctc_loss(self, *args, **kwargs)
        if name in _HOOKS:
            raise Refused(
                f"it calls {name} on a tensor, and what a hook does to gradients is not written "
                "down: give the tensor a torch.autograd.Function with that backward instead"
            )
        return func(*args, **kwargs)

    def name_of(self, function: Any) -> str:
        """Return the name of a function in `functions`, after adding it if necessary."""
        for name, recorded in self.functions.items():
            if recorded is function:
                return name
        name = f"{function.__name__}_{len(self.functions)}"
        self.functions[name] = function
        return name


def _record_as_one_op(name: str, mode: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    """Record a call as one op.

    Args:
        name: name in `Interceptor.functions`.
        mode: the proxy mode of the trace.
        args: arguments of the call.
        outputs: stand for what the call returns.
    """
    tracer = mode.tracer
    proxies = pytree.tree_map_only(Tensor, tracer.unwrap_proxy, args)
    proxy = tracer.create_proxy("call_function", custom_function(), (name, *proxies), {})
    return track_tensor_tree(outputs, proxy, constant=None, tracer=tracer)


def _ctc_loss(
    interceptor: Interceptor, log_probs: Tensor, targets: Tensor, *positional: Any, **keywords: Any
) -> Tensor:
    """Record CTC loss as one op: inside, lengths become sizes, which a trace does not know."""
    mode = get_proxy_mode()
    values = {**_CTC_DEFAULTS, **dict(zip(_CTC_NAMES, positional, strict=False)), **keywords}
    arguments = [values[name] for name in _CTC_NAMES]
    if mode is None:
        return functional.ctc_loss(log_probs, targets, *arguments)
    with disable_proxy_modes_tracing():
        # (time, batch, classes) to (batch): shape and dtype of the loss, whose value is not used.
        rows = log_probs.sum(0).sum(-1)
        output = rows if values["reduction"] in ("none", 0) else rows.sum()
    name = interceptor.name_of(functional.ctc_loss)
    loss: Tensor = _record_as_one_op(name, mode, (log_probs, targets, *arguments), output)
    return loss


@lru_cache(maxsize=1)
def custom_function() -> HigherOrderOperator:
    """Return the op for calls of an autograd.Function; its first argument is the name."""

    class CustomFunction(HigherOrderOperator):
        """Never called: cleaning the graph replaces it by the function."""

        def __init__(self) -> None:
            super().__init__("penstock_custom_function")  # type: ignore[no-untyped-call]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """See the class."""
            raise NotImplementedError

    return CustomFunction()


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Record calls of autograd.Functions in this thread as single ops.

    torch.export would trace their forward, and autograd would then differentiate that and ignore
    their backward.
    """
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()
    original_apply: Callable[..., Any] = original.__func__

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        """Call an autograd.Function; while tracing, as a single op of the graph."""
        mode = get_proxy_mode() if threading.get_ident() == thread else None
        if mode is None or cls.__module__.startswith("torch._"):
            return original_apply(cls, *args, **kwargs)
        if cls.__module__ == "torch.utils.checkpoint" and cls.__name__ != "CheckpointFunction":
            # Before 2.13, a checkpoint that is not reentrant saves its inputs by a function that
            # returns nothing.
            return original_apply(cls, *args, **kwargs)
        if cls.__module__ == "torch.utils.checkpoint":
            # The plan decides about recomputation, so the function is called directly. It is the
            # first argument; the second is a flag.
            return args[0](*args[2:])
        if kwargs or any(isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves(args)):
            raise Refused(
                f"it calls {cls.__name__}, an autograd.Function, with keywords or with sizes that "
                "may change"
            )
        with disable_proxy_modes_tracing():
            outputs = original_apply(cls, *args)
        return _record_as_one_op(interceptor.name_of(cls), mode, args, outputs)

    original_bool: Callable[[Any], bool] = torch.SymBool.__bool__
    function: Any = torch.autograd.Function
    symbolic_bool: Any = torch.SymBool
    function.apply, symbolic_bool.__bool__ = (
        classmethod(apply),
        _recording_truth(original_bool, thread),
    )
    try:
        yield
    finally:
        function.apply, symbolic_bool.__bool__ = original, original_bool


def _recording_truth(original_bool: Callable[[Any], bool], thread: int) -> Callable[[Any], bool]:
    """Return a replacement of `SymBool.__bool__` that records checks of undecidable conditions."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    def truth(value: Any) -> bool:
        """Return the truth value; of a value check, the one for which it passes."""
        # The replacement is one for all threads of the process, of which others may compute.
        if threading.get_ident() != thread:
            return original_bool(value)
        try:
            return original_bool(value)
        except GuardOnDataDependentSymNode:
            passes = passing(sys._getframe(1))
            if passes is None:
                raise
            record_sizes(value, passes=passes)
            return passes

    return truth
