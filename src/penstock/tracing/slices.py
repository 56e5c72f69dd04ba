"""Check that layers can process a sequence slice by slice and return what they return on the whole.

Layers that process each token separately can: those of torch that are known to, and others that
declare it by `per_token = True`. Layers that use earlier tokens can too, if they pass on what later
tokens need: `forward_slice(value, past) -> (value, past)`. There `past` is None for the first
slice, and else what `forward_slice` returned for the previous slice: nested tuples, lists and dicts
of tensors (e.g. the keys and values of attention, also known as KV cache or past_key_values) and
constants (a position).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from penstock.errors import SettingError
from penstock.modules.hooks import has_hooks
from penstock.schedule.op import Schedule
from penstock.tracing.traced_chain import TracedChain

#: Modules that work on each element, or on the last dimension alone, whatever their settings.
_PER_TOKEN = (
    nn.Identity,
    nn.Linear,
    nn.Embedding,
    nn.Dropout,
    nn.AlphaDropout,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Softplus,
    nn.Softsign,
    nn.Softshrink,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Threshold,
    nn.RReLU,
)
#: Modules that do so with some settings, and the condition on the settings.
_LAST_DIMENSION: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.LayerNorm: lambda norm: len(norm.normalized_shape) == 1,
    nn.RMSNorm: lambda norm: len(norm.normalized_shape) == 1,
    # With several parameters, the second dimension is the channels.
    nn.PReLU: lambda act: act.num_parameters == 1,
    nn.Softmax: lambda act: act.dim == -1,
    nn.LogSoftmax: lambda act: act.dim == -1,
    nn.GLU: lambda act: act.dim == -1,
}
#: Maximum number of layers in the message.
_MAX_LISTED = 6

_ADVICE = (
    "A layer whose output for a token depends on that token alone says so by an attribute "
    "per_token = True. One that also looks at earlier tokens needs a method forward_slice(value, "
    "past) -> (value, past), as in penstock/zoo/gpt.py. Otherwise take a schedule that does not "
    "cut sequences, such as 1f1b"
)


def has_past(module: nn.Module) -> bool:
    """Return whether a layer passes state from slice to slice, by a `forward_slice`."""
    return callable(getattr(module, "forward_slice", None))


def is_per_token(module: nn.Module) -> bool:
    """Return whether a layer's output for a token is known to depend on that token alone."""
    declared = getattr(module, "per_token", None)
    if declared is not None:
        return bool(declared)
    if _runs_as(module, nn.Sequential):
        return all(is_per_token(child) for child in module.children())
    if any(_runs_as(module, kind) for kind in _PER_TOKEN):
        # With these settings an embedding changes weights or gradients depending on all tokens.
        return not isinstance(module, nn.Embedding) or (
            module.max_norm is None and not module.scale_grad_by_freq
        )
    return any(_runs_as(module, kind) and fits(module) for kind, fits in _LAST_DIMENSION.items())


def check_slices(traced: TracedChain, schedule: Schedule) -> None:
    """Raise an error if the schedule divides sequences and the model does not support it.

    Raises:
        SettingError: a layer is neither known to process tokens separately, nor passes state from
            slice to slice.
    """
    if schedule.slicing is None or schedule.slicing.along != "tokens":
        return
    faults = []
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        fault = _slicing_fault(module)
        if fault is not None:
            faults.append(f"layer {layer.name} ({type(module).__name__}) {fault}")
    if faults:
        header = (
            f"{schedule.name} cuts sequences into slices, over which this model is not known to be "
            "causal:"
        )
        more = [f"and {len(faults) - _MAX_LISTED} more"] if len(faults) > _MAX_LISTED else []
        raise SettingError("\n  ".join([header, *faults[:_MAX_LISTED], *more, _ADVICE]))


def _slicing_fault(module: nn.Module) -> str | None:
    """Return why a layer does not support slices; None if it does."""
    if not has_past(module):
        return None if is_per_token(module) else _dependence(module)
    if not has_hooks(module):
        return None
    return (
        "has hooks, which run with forward and not with forward_slice: take them off, or hook a "
        "module inside"
    )


def _dependence(module: nn.Module) -> str:
    """Return how the layer's output for a token may depend on other tokens."""
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
        return "takes its statistics over all tokens of a sequence, which no slice has"
    if isinstance(
        module,
        (
            nn.MultiheadAttention,
            nn.TransformerEncoderLayer,
            nn.TransformerDecoderLayer,
            nn.Transformer,
        ),
    ):
        return "looks at all tokens of a sequence"
    if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase)):
        return "looks at tokens beside each token"
    return "may look at other tokens than its own"


def _runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is an instance of a class and has its forward."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in vars(module)
    )
