"""Properties of single ops of a captured graph: what they write, view, draw and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from penstock.tracing.graph_export import constant

#: Ops that are not recomputed from the inputs on every rank, although they could be: they cost more
#: than sending their outputs.
_EXPENSIVE = frozenset(
    {
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "scaled_dot_product_attention",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "stft",
        "_fft_r2c",
        "_fft_c2c",
        "linear",
        "addmm",
    }
)
#: Matrix products are recomputed if few numbers are added up for each element of the output. Those
#: of rotary angles, for instance, have an inner dimension of 1.
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "einsum", "baddbmm"})
_CHEAP_INNER_SIZE = 16
#: Ops that justify a layer even if their weights belong to no module without children.
_HEAVY = (
    _EXPENSIVE
    | _PRODUCTS
    | {
        "bilinear",
        "embedding",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "batch_norm",
    }
)
#: Ops whose result depends on the shape of what they take, and not on its contents.
SHAPE_ALONE = frozenset(
    {
        "sym_size",
        "sym_numel",
        "size",
        "arange",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "empty_like",
    }
)
#: Assumed for a size that is unknown even for the example, because it depends on values of tensors.
_UNKNOWN_SIZE = 64


def op_name(node: fx.Node) -> str:
    """Return the name of an op without its namespace and overload."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", str(target))


def argument(node: fx.Node, name: str, default: Any) -> Any:
    """Return an argument of an op by its name in the schema."""
    if name in node.kwargs:
        return node.kwargs[name]
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = arguments.index(name) if name in arguments else len(node.args)
    return node.args[place] if place < len(node.args) else default


def output_tensors(node: fx.Node) -> list[Tensor]:
    """Return the tensors that an op returned in the trace."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def memory_ids(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return for each value a number that is equal for values that share memory.

    Values share memory if they have one storage in the trace, or if an op is a view by its schema.
    A literal of the forward has memory of its own: the model works on copies of it, which have its
    storage in the trace.
    """
    by_storage: dict[int, int] = {}
    number_of: dict[fx.Node, int] = {}
    parent: list[int] = []  # a union-find structure

    def root(number: int) -> int:
        """Return the number that represents the set of a value."""
        while parent[number] != number:
            number = parent[number]
        return number

    for node in nodes:
        number = len(parent)
        parent.append(number)
        number_of[node] = number
        if is_literal(node):
            continue
        shared = [
            # The address of the storage object: fake tensors have no address of data.
            by_storage.setdefault(tensor.untyped_storage()._cdata, number)
            for tensor in output_tensors(node)
        ]
        shared += [number_of[viewed] for viewed in _view_sources(node) if viewed in number_of]
        for other in shared:
            parent[root(other)] = root(number)
    return {node: root(number) for node, number in number_of.items()}


def is_literal(node: fx.Node) -> bool:
    """Return whether a constant is copied at each use, as `torch.tensor([1.0])` in a forward is."""
    copies = [op_name(user) == "lift_fresh_copy" for user in node.users]
    return node.op == "get_attr" and bool(copies) and all(copies)


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an op as its schema declares them, with their values."""
    if isinstance(node.target, OpOverload):
        for index, argument in enumerate(node.target._schema.arguments):
            is_positional = index < len(node.args)
            yield argument, node.args[index] if is_positional else node.kwargs.get(argument.name)


def _view_sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory the result of a node may share."""
    if op_name(node) == "getitem":
        return list(node.all_input_nodes)
    return [
        value
        for argument, value in _arguments(node)
        if argument.alias_info is not None and isinstance(value, fx.Node)
    ]


def written_values(node: fx.Node) -> list[fx.Node]:
    """Return the values that an op writes to.

    They follow from its schema, but for the statistics of norms, which the schema does not declare.
    """
    subgraph = _subgraph(node)
    if subgraph is not None:
        return _written_by_subgraph(node, *subgraph)
    targets = [
        value
        for argument, value in _arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    # Arguments 3 and 4 are mean and variance; argument 5 tells whether they are updated.
    if op_name(node) in ("batch_norm", "instance_norm") and node.args[5]:
        targets += node.args[3:5]
    return [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, fx.Node)]


def _written_by_subgraph(
    node: fx.Node, subgraph_node: fx.Node, module: fx.GraphModule
) -> list[fx.Node]:
    """Return the operands of an op that its subgraph changes in place."""
    operands = node.args[node.args.index(subgraph_node) + 1 :]
    placeholders = module.graph.find_nodes(op="placeholder")
    # The subgraph may write to a view of an operand, so compare memory and not values.
    memory_of = memory_ids(list(module.graph.nodes))
    changed: set[int] = set()
    for op in module.graph.nodes:
        if op.op == "call_function":
            changed.update(memory_of[target] for target in written_values(op))
    return [
        operand
        for placeholder, operand in zip(placeholders, operands, strict=True)
        if memory_of[placeholder] in changed and isinstance(operand, fx.Node)
    ]


def _subgraph(node: fx.Node) -> tuple[fx.Node, fx.GraphModule] | None:
    """Return the graph that an op runs, and the node that stands for it.

    Regions without gradients, or with another autocast, have a graph of their own.
    """
    if isinstance(node.target, HigherOrderOperator):
        for source in node.all_input_nodes:
            module = source.graph.owning_module
            if source.op == "get_attr" and module is not None:
                value = constant(module, source.target)
                if isinstance(value, fx.GraphModule):
                    return source, value
    return None


def is_check(node: fx.Node) -> bool:
    """Return whether an op only checks a condition: it runs once, in the layer where it is."""
    return op_name(node).startswith("_assert")


def is_expensive(node: fx.Node) -> bool:
    """Return whether recomputing an op on every rank would cost more than sending its output."""
    name = op_name(node)
    if name in _PRODUCTS:
        operands = [tensor for source in node.all_input_nodes for tensor in output_tensors(source)]
        if not operands or operands[0].dim() == 0:
            return True
        return size_at_example(operands[0].shape[-1]) > _CHEAP_INNER_SIZE
    return name in _EXPENSIVE or _is_custom(node)


def is_heavy(node: fx.Node) -> bool:
    """Return whether an op with weights justifies a layer, whichever module has the weights."""
    return (
        op_name(node) in _HEAVY or isinstance(node.target, HigherOrderOperator) or _is_custom(node)
    )


def apply_function(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function that calls an autograd.Function, for use in generated Python code."""

    def apply(*args: Any) -> Any:
        return kind.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types for it

    apply.__name__ = apply.__qualname__ = f"apply_{kind.__name__}"
    apply.custom = True  # type: ignore[attr-defined]
    return apply


def _is_custom(node: fx.Node) -> bool:
    """Return whether an op is a user's autograd.Function, see `apply_function`."""
    return getattr(node.target, "custom", False)


def draws(node: fx.Node) -> bool:
    """Return whether an op may draw random numbers."""
    if _is_custom(node):
        return True
    subgraph = _subgraph(node)
    if subgraph is not None:
        return any(draws(op) for op in subgraph[1].graph.nodes if op.op == "call_function")
    if not is_seeded(node.target):
        return False
    # Dropout, RNNs and attention draw only in training, and with a rate above 0.
    values = {argument.name: value for argument, value in _arguments(node)}
    if values.get("train") is False or values.get("training") is False:
        return False
    return all(values.get(name, 1) not in (0, 0.0) for name in ("p", "dropout_p", "dropout"))


def is_seeded(target: Any) -> bool:
    """Return whether an op draws random numbers, whatever its arguments."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def bytes_at_example(node: fx.Node) -> int:
    """Return the size in bytes of an op's output for the example."""
    total = 0
    for tensor in output_tensors(node):
        size_in_bytes = tensor.element_size()
        for size in tensor.shape:
            size_in_bytes *= size_at_example(size)
        total += size_in_bytes
    return total


def size_at_example(size: int | SymInt) -> int:
    """Return a symbolic size as a number, for the example."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else _UNKNOWN_SIZE
