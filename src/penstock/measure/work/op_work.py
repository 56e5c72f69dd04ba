"""The cost of one torch op by its shapes alone: operations, bytes, launches, and its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from penstock.measure.example_samples import tensors_in
from penstock.profile.counts import Family

#: Ops that access no memory, although their schemas do not declare them as views.
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
#: Ops that write without reading their arguments.
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
#: Ops that read only those rows of their first argument, a table, that they return.
_LOOK_UP = frozenset({"embedding", "index_select", "gather", "index"})
#: Number of times that an op reads its inputs, because it computes statistics first.
_PASSES = {"native_batch_norm": 2, "native_batch_norm_backward": 2, "_native_batch_norm_legit": 2}
#: Numbers that a recurrent layer saves for its backward per number that it returns: four gates, the
#: cell and the hidden state. A fake layer saves none; cuDNN saves about these, oneDNN 16 (measured,
#: 1,024 hidden).
_RESERVE = 6
_MATRIX = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "dot", "mv", "addmv"})


@dataclass(frozen=True)
class OpWork:
    """One call of an op at one size.

    `reserve_bytes` is what it saves internally for its backward, not visible as a tensor.
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
    """Return the cost of a call, per kernel if it launches several; empty for a mere view.

    Operations are those of torch's own flop counter if it knows the op, of the formulas below for
    recurrent layers and for the CPU's fused attention, and one per number of the output for any
    other op.
    """
    name = func.overloadpacket.__name__
    if func.is_view or func.namespace == "prim" or name in _FREE:
        return []
    outputs = tensors_in(out)
    if not outputs and not func._schema.is_mutable:
        return []  # a query about shapes, answered without a launch
    if name == "convolution_backward":
        return _convolution_backward(func, args, out)
    reserve = _RESERVE * _size(outputs[0]) if name == "mkldnn_rnn_layer" else 0
    works = [
        OpWork(
            name,
            _family(name, args),
            _launches(name, args),
            _flops(func, name, args, kwargs, out, outputs),
            _bytes(name, tensors_in((args, kwargs)), outputs),
            reserve,
        )
    ]
    if name == "convolution" and args[2] is not None:
        # cuDNN's convolution adds the bias afterwards.
        works.append(OpWork("bias", "other", 1, float(out.numel()), 2.0 * _size(out)))
    return works


def _convolution_backward(
    func: OpOverload[..., Any], args: tuple[Any, ...], out: Any
) -> list[OpWork]:
    """Return the gradients of input, weight and bias: one kernel each, each reading its inputs."""
    grad, value, weight = args[:3]
    family = _family("convolution_backward", args)
    formula = flop_registry[func.overloadpacket]
    works = []
    # The gradient of the input needs the weight, and that of the weight the input.
    for output, (name, operand) in enumerate((("input", weight), ("weight", value))):
        if out[output] is not None:
            output_mask = [output == 0, output == 1, False]
            flops = float(formula(*args[:10], output_mask, out_val=out))
            moved = float(_size(grad) + _size(operand) + _size(out[output]))
            works.append(OpWork(f"convolution_backward_{name}", family, 1, flops, moved))
    if out[2] is not None:
        moved = float(_size(grad) + _size(out[2]))
        works.append(OpWork("bias_backward", "other", 1, float(grad.numel()), moved))
    return works


def _family(name: str, args: tuple[Any, ...]) -> Family:
    """Return the family of ops that an op belongs to, by which its speed is estimated."""
    if name in _MATRIX:
        return "matrix"
    if "attention" in name:
        return "attention"
    if "rnn" in name:
        return "recurrent"
    if name in ("convolution", "convolution_backward", "_convolution"):
        return _convolution_family(name == "convolution_backward", args)
    return "other"


def _convolution_family(backward: bool, args: tuple[Any, ...]) -> Family:
    """Return the family of a convolution or its backward."""
    weight = args[2] if backward else args[1]
    # convolution(input, weight, bias, stride, …); convolution_backward(grad, input, weight,
    # bias_sizes, stride, …)
    stride, _, dilation, _, _, groups = args[4:10] if backward else args[3:9]
    if groups > 1:
        return "grouped_convolution"
    unit_steps = set(stride) == {1} and set(dilation) == {1}
    is_3x3 = tuple(weight.shape[2:]) == (3, 3)
    return "convolution_3x3" if unit_steps and is_3x3 else "convolution"


def _launches(name: str, args: tuple[Any, ...]) -> int:
    """Return the number of kernels that an op launches."""
    if name.startswith("mkldnn_rnn_layer"):
        # cuDNN and oneDNN run one step after the other, each a product with the recurrent weights.
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
    """Return the operations of an op."""
    own_formula = _FORMULAS.get(name)
    if own_formula is not None:
        return own_formula(args)
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    return float(sum(tensor.numel() for tensor in outputs))


def _recurrent_flops(args: tuple[Any, ...]) -> float:
    """Return the operations of a recurrent layer: 2 t b (weights) for input `(t, b, features)`."""
    value, *weights = args[:3]
    assert isinstance(value, Tensor), "the input comes first"
    return float(2 * value.shape[0] * value.shape[1] * sum(weight.numel() for weight in weights))


def _attention_flops(args: tuple[Any, ...], products: int) -> float:
    """Return the operations of `products` products of (t x s x width) per head.

    A causal mask does not halve them, as in torch's own counter.
    """
    query, key = args
    assert isinstance(query, Tensor), "query and key come first"
    return float(2 * products * query.numel() * int(key.shape[2]))


_FORMULAS: dict[str, Callable[[tuple[Any, ...]], float]] = {
    "mkldnn_rnn_layer": _recurrent_flops,
    "mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent_flops(args),
    "_scaled_dot_product_flash_attention_for_cpu": lambda args: _attention_flops(args[:2], 2),
    # One of the forward's two products is recomputed, and each has two gradients: torch's counter
    # also counts 5 for the backward.
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda args: _attention_flops(
        args[1:3], 5
    ),
}


def _size(tensor: Tensor) -> int:
    """Return the bytes of memory of a tensor; an expanded one refers to some of them repeatedly."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _bytes(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Return the bytes that an op reads and writes."""
    written = sum(_size(tensor) for tensor in outputs)
    if name in _WRITE_ONLY:
        return float(written)
    distinct = {id(tensor): tensor for tensor in inputs}
    read = sum(_size(tensor) for tensor in distinct.values())
    if name in _LOOK_UP and inputs:
        # Of the table only as many bytes as are returned.
        read += min(written - _size(inputs[0]), 0)
    return float(read * _PASSES.get(name, 1) + written)
