"""What torch.export would get wrong without a word while it traces: caught here, and put right or
refused.
"""

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
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.tracing.checks import passing, record_check, record_sizes
from penstock.tracing.faults import Refused

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})


class Interceptor(TorchFunctionMode):
    """While the model runs: `.data` is `.detach()`, checks of values become ops, and hooks on
    gradients are refused. `functions` by name, those with a backward of their own that the model
    has called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        name = getattr(func, "__name__", "")
        if name == "__bool__":
            frame = sys._getframe(1)
            passes = passing(frame)
            if passes is not None:
                record_check(args[0], passes=passes, frame=frame)
                return passes
        if name == "__get__" and func == _DATA_GETTER:
            return args[0].detach()
        if func is torch._assert and isinstance(args[0], Tensor):
            record_check(args[0], passes=True, frame=sys._getframe(1))
            return None
        if func in (functional.ctc_loss, torch.ctc_loss):
            return _ctc_loss(self, *args, **(kwargs or {}))
        if name in _HOOKS:
            raise Refused(
                f"it calls {name} on a tensor, and what a hook does to gradients is not written down: give the tensor a "
                "torch.autograd.Function with that backward instead"
            )
        return func(*args, **(kwargs or {}))

    def name_of(self, kind: Any) -> str:
        """The name under which `functions` has it."""
        for name, known in self.functions.items():
            if known is kind:
                return name
        name = f"{kind.__name__}_{len(self.functions)}"
        self.functions[name] = kind
        return name


def _as_one_op(name: str, mode: Any, args: tuple[Any, ...], made: Any) -> Any:
    """Write down a call as one op: what is made stands for what the call would return."""
    tracer = mode.tracer
    proxies = pytree.tree_map(
        lambda leaf: tracer.unwrap_proxy(leaf) if isinstance(leaf, Tensor) else leaf, args
    )
    proxy = tracer.create_proxy("call_function", custom_function(), (name, *proxies), {})
    return track_tensor_tree(made, proxy, constant=None, tracer=tracer)


def _ctc_loss(
    interceptor: Interceptor, log_probs: Tensor, targets: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """As one op: inside, the lengths decide sizes, which a trace does not know."""
    mode = get_proxy_mode()
    values = {**_CTC_DEFAULTS, **dict(zip(_CTC_NAMES, rest, strict=False)), **named}
    arguments = [values[name] for name in _CTC_NAMES]
    if mode is None:
        return functional.ctc_loss(log_probs, targets, *arguments)
    with disable_proxy_modes_tracing():
        rows = log_probs.sum(0).sum(-1)
        made = rows if values["reduction"] in ("none", 0) else rows.sum()
    name = interceptor.name_of(functional.ctc_loss)
    found: Tensor = _as_one_op(name, mode, (log_probs, targets, *arguments), made)
    return found


_CTC_NAMES = ("input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
_CTC_DEFAULTS = {"blank": 0, "reduction": "mean", "zero_infinity": False}
_DATA_GETTER = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor


@lru_cache(maxsize=1)
def custom_function() -> HigherOrderOperator:
    """Stands in a graph where the model calls an autograd.Function: its first argument is the name."""

    class CustomFunction(HigherOrderOperator):
        """Never called: the graph gets the function itself in its place."""

        def __init__(self) -> None:
            super().__init__("penstock_custom_function")  # type: ignore[no-untyped-call]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    return CustomFunction()


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Let calls of autograd.Functions in this thread stand in the trace as such: torch.export would
    follow their forward, and autograd would then differentiate that, whatever their backward says.
    """
    original = torch.autograd.Function.__dict__["apply"]
    own = threading.get_ident()
    plain: Callable[..., Any] = original.__func__

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        mode = get_proxy_mode() if threading.get_ident() == own else None
        if mode is None or cls.__module__.startswith("torch._"):
            return plain(cls, *args, **kwargs)
        if cls.__module__ == "torch.utils.checkpoint":
            # Recomputing is the plan's business. What is to be run stands first, after it a flag.
            return args[0](*args[2:])
        if kwargs or any(isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves(args)):
            raise Refused(
                f"it calls {cls.__name__}, an autograd.Function, with keywords or with sizes that may change"
            )
        with disable_proxy_modes_tracing():
            made = plain(cls, *args)
        return _as_one_op(interceptor.name_of(cls), mode, args, made)

    decide: Callable[[Any], bool] = torch.SymBool.__bool__

    def truth(value: Any) -> bool:
        if threading.get_ident() != own:
            return decide(value)
        try:
            return decide(value)
        except GuardOnDataDependentSymNode:
            passes = passing(sys._getframe(1))
            if passes is None:
                raise
            record_sizes(value, passes=passes)
            return passes

    function: Any = torch.autograd.Function
    numbers: Any = torch.SymBool
    function.apply, numbers.__bool__ = classmethod(apply), truth
    try:
        yield
    finally:
        function.apply, numbers.__bool__ = original, decide
