"""What one torch op costs by its shapes alone: operations, bytes, launches, and which family it is
of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from penstock.profile.counts import Family

#: Ops that touch no memory, though their schemas do not call them views.
_FREE = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "lift_fresh",
        "alias",
    }
)
#: Ops that write without reading what they are given.
_WRITE_ONLY = frozenset(
    {
        "zeros_like",
        "ones_like",
        "full_like",
        "fill_",
        "zero_",
        "bernoulli_",
        "normal_",
        "uniform_",
        "new_zeros",
        "new_ones",
        "new_full",
        "rand_like",
        "randn_like",
    }
)
#: Ops that read of their first argument only what they return: rows of a table.
_LOOK_UP = frozenset({"embedding", "index_select", "gather", "index"})
#: How often statistics make an op go over its inputs.
_PASSES = {"native_batch_norm": 2, "native_batch_norm_backward": 2, "_native_batch_norm_legit": 2}
#: Numbers that a recurrent layer keeps for its backward for each that it returns: four gates, the
#: cell and the hidden state. A fake
#: layer keeps none; cuDNN keeps about these, oneDNN 16 (measured, 1,024 hidden).
_RESERVE = 6
_MATRIX = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "dot", "mv", "addmv"})


@dataclass(frozen=True)
class OpWork:
    """One call of an op at one size. `reserve_bytes`: what it keeps inside for its backward, where
    no tensor shows it.
    """

    op: str
    family: Family
    launches: int
    flops: float
    bytes: float
    reserve_bytes: int = 0


def op_work(
    func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> list[OpWork]:
    """What a call costs, kernel by kernel where it has several; nothing if it only looks at its
    arguments in another way.

    Operations are those of torch's own flop counter where it knows the op, of the formulas here for
    recurrent layers and for the CPU's fused attention, and one for each number that comes out of
    any other.
    """
    name = func.overloadpacket.__name__
    if func.is_view or func.namespace == "prim" or name in _FREE:
        return []
    outputs = _tensors(out)
    if not outputs and not func._schema.is_mutable:
        return []  # a question about shapes, answered without a launch
    if name == "convolution_backward":
        return _convolution_backward(func, args, out)
    reserve = _RESERVE * _size(outputs[0]) if name == "mkldnn_rnn_layer" else 0
    works = [
        OpWork(
            name,
            _family(name, args),
            _launches(name, args),
            _flops(func, name, args, kwargs, out, outputs),
            _bytes(name, _tensors((args, kwargs)), outputs),
            reserve,
        )
    ]
    if name == "convolution" and args[2] is not None:
        works.append(
            OpWork("bias", "other", 1, float(out.numel()), 2.0 * _size(out))
        )  # cuDNN's convolution adds it afterwards
    return works


def _convolution_backward(
    func: OpOverload[..., Any], args: tuple[Any, ...], out: Any
) -> list[OpWork]:
    """Gradients of input, weight and bias: a kernel each, and each reads what comes in anew."""
    grad, value, weight = args[:3]
    family = _family("convolution_backward", args)
    formula = flop_registry[func.overloadpacket]
    works = []
    for part, (word, other) in enumerate((("input", weight), ("weight", value))):
        if out[part] is not None:
            only = [part == 0, part == 1, False]
            flops = float(formula(*args[:10], only, out_val=out))
            works.append(
                OpWork(
                    f"convolution_backward_{word}",
                    family,
                    1,
                    flops,
                    float(_size(grad) + _size(other) + _size(out[part])),
                )
            )
    if out[2] is not None:
        works.append(
            OpWork(
                "bias_backward", "other", 1, float(grad.numel()), float(_size(grad) + _size(out[2]))
            )
        )
    return works


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _family(name: str, args: tuple[Any, ...]) -> Family:
    if name in _MATRIX:
        return "matrix"
    if "attention" in name:
        return "attention"
    if "rnn" in name:
        return "recurrent"
    if name in ("convolution", "convolution_backward", "_convolution"):
        backward = name == "convolution_backward"
        weight = args[2] if backward else args[1]
        # convolution(input, weight, bias, stride, …); convolution_backward(grad, input, weight,
        # bias_sizes, stride, …)
        stride, _, dilation, _, _, groups = args[4:10] if backward else args[3:9]
        if groups > 1:
            return "grouped_convolution"
        plain = set(stride) == {1} and set(dilation) == {1}
        return "convolution_3x3" if plain and tuple(weight.shape[2:]) == (3, 3) else "convolution"
    return "other"


def _launches(name: str, args: tuple[Any, ...]) -> int:
    if name.startswith("mkldnn_rnn_layer"):
        # One step after the other, each a product with the recurrent weights: so cuDNN runs it, and
        # oneDNN.
        return max(int(args[0].shape[0]), 1)
    return 1


def _flops(
    func: OpOverload[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    outputs: Sequence[Tensor],
) -> float:
    own = _FORMULAS.get(name)
    if own is not None:
        return own(args)
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    return float(sum(tensor.numel() for tensor in outputs))


def _recurrent_flops(args: tuple[Any, ...]) -> float:
    """Input and recurrent products of every step: 2 t b (weights) of `(t, b, features)`."""
    value, *weights = args[:3]
    assert isinstance(value, Tensor), "the input comes first"
    return float(2 * value.shape[0] * value.shape[1] * sum(weight.numel() for weight in weights))


def _attention_flops(args: tuple[Any, ...], products: int) -> float:
    """`products` products of (t x s x width) for each head; a causal mask halves nothing here, as
    in torch's own counter.
    """
    query, key = args
    assert isinstance(query, Tensor), "query and key come first"
    return float(2 * products * query.numel() * int(key.shape[2]))


_FORMULAS: dict[str, Callable[[tuple[Any, ...]], float]] = {
    "mkldnn_rnn_layer": _recurrent_flops,
    "mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent_flops(args),
    "_scaled_dot_product_flash_attention_for_cpu": lambda args: _attention_flops(args[:2], 2),
    # The two products of the forward are half made again, and each has two gradients: torch's
    # counter says 5 for the backward.
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda args: _attention_flops(
        args[1:3], 5
    ),
}


def _size(tensor: Tensor) -> int:
    """Bytes of memory that a tensor looks at: an expanded one looks at some of it many times."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _bytes(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    written = sum(_size(tensor) for tensor in outputs)
    if name in _WRITE_ONLY:
        return float(written)
    read = sum(_size(tensor) for tensor in {id(tensor): tensor for tensor in inputs}.values())
    if name in _LOOK_UP and inputs:
        read += min(written - _size(inputs[0]), 0)
    return float(read * _PASSES.get(name, 1) + written)
