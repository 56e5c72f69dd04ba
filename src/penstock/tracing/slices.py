"""Which layers can work on slices of sequences, one after another, and give what they give on the
whole.

Those that look at one token at a time can: torch's own that are known to, and others that say so by
`per_token = True`. Those that look at earlier tokens can, too, if they hand on what later ones need
of them: `forward_slice(value, past) -> (value, past)`, where `past` is None for the first slice,
and else what `forward_slice` returned for the slice before: nested tuples, lists and dicts of
tensors (the keys and values of attention, say, also known as its KV cache or past_key_values) and
plain constants (a position).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from penstock.errors import SettingError
from penstock.schedule.op import Schedule
from penstock.tracing.chain import TracedChain

#: Work on each number, or on the last dimension alone, whatever their settings.
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
#: Do so with some settings.
_LAST_DIMENSION: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.LayerNorm: lambda norm: len(norm.normalized_shape) == 1,
    nn.RMSNorm: lambda norm: len(norm.normalized_shape) == 1,
    nn.PReLU: lambda act: (
        act.num_parameters == 1
    ),  # with several, the second dimension is that of channels
    nn.Softmax: lambda act: act.dim == -1,
    nn.LogSoftmax: lambda act: act.dim == -1,
    nn.GLU: lambda act: act.dim == -1,
}
_ADVICE = (
    "A layer whose output for a token depends on that token alone says so by an attribute per_token = True. One that also looks at "
    "earlier tokens needs a method forward_slice(value, past) -> (value, past), as in penstock/zoo/gpt.py. Otherwise take a schedule "
    "that does not cut sequences, such as 1f1b"
)


def has_past(module: nn.Module) -> bool:
    """Whether a layer hands something on from slice to slice, by a `forward_slice` of its own."""
    return callable(getattr(module, "forward_slice", None))


def is_per_token(module: nn.Module) -> bool:
    """Whether the layer's output for a token is known to depend on that token alone."""
    marked = getattr(module, "per_token", None)
    if marked is not None:
        return bool(marked)
    if _runs_as(module, nn.Sequential):
        return all(is_per_token(child) for child in module.children())
    if any(_runs_as(module, kind) for kind in _PER_TOKEN):
        # Settings by which an embedding does something to weights or gradients that depends on all
        # tokens at once.
        return not isinstance(module, nn.Embedding) or (
            module.max_norm is None and not module.scale_grad_by_freq
        )
    return any(_runs_as(module, kind) and fits(module) for kind, fits in _LAST_DIMENSION.items())


def check_slices(traced: TracedChain, schedule: Schedule) -> None:
    """Refuse a model that would learn something else under this schedule, because it cuts
    sequences.

    Raises:
        SettingError: a layer is neither known to work token by token nor hands on a past.
    """
    if schedule.slicing is None or schedule.slicing.along != "tokens":
        return
    found = []
    for layer, module in zip(traced.layers, traced.modules, strict=True):
        place = f"layer {layer.name} ({type(module).__name__})"
        if has_past(module):
            if (
                module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                found.append(
                    f"{place} has hooks, which run with forward and not with forward_slice: take them off, or hook a "
                    "module inside"
                )
        elif not is_per_token(module):
            found.append(f"{place} {_why(module)}")
    if found:
        more = [f"and {len(found) - 6} more"] if len(found) > 6 else []
        raise SettingError(
            "\n  ".join(
                [
                    f"{schedule.name} cuts sequences into slices, over which this model is not known to be causal:",
                    *found[:6],
                    *more,
                    _ADVICE,
                ]
            )
        )


def _why(module: nn.Module) -> str:
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
    """Whether it is one of these, or a subclass that leaves its forward alone."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in vars(module)
    )
