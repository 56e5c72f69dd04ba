"""What flows through a captured graph: where each value is made and last used, what it weighs, and
what the inputs alone decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from penstock.errors import ChainError
from penstock.tracing.capture import Capture, constant
from penstock.tracing.interception import custom_function

#: Not made again from the inputs on every rank, though it could be: what such an op takes is more
#: than sending what it makes.
_DEAR = frozenset(
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
#: Products of matrices are, if so few numbers are added up for each that they make: rotary angles
#: are of one.
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "einsum", "baddbmm"})
_FEW = 16
#: What a layer is worth having for, even if its weights belong to no module of their own.
_HEAVY = (
    _DEAR
    | _PRODUCTS
    | {
        "einsum",
        "bilinear",
        "embedding",
        "conv_transpose2d",
        "conv_transpose1d",
        "conv_transpose3d",
        "baddbmm",
        "batch_norm",
    }
)


def op_name(node: fx.Node) -> str:
    """The name of an op without its namespace and overload."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", str(target))


@dataclass(frozen=True, eq=False)
class Flow:
    """A graph's ops in the order of running, and what is known of its values.

    Attributes:
        order: ops, without placeholders, constants and the output.
        inputs: placeholders.
        outputs: what the model returns, in order: nodes, or None.
        weights: by get_attr node, the name of the parameter or buffer.
        constants: by get_attr node, what else it stands for: a tensor, or a graph of its own.
        again: what depends on the inputs and on constants alone, changes nothing, and takes little
        to make. last_use: index in `order` of the last op that uses a value; `len(order)` for what
        is returned. size: bytes of a value at the example. alike: a number for each value, the same
        for those that share memory. changes: by index in `order`, those of what the op changes.
        crossing: by index in `order`, what crosses a cut before that op: bytes, and a byte for each
        value, so that of equals fewer cross.
    """

    order: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    weights: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Any]
    again: frozenset[fx.Node]
    last_use: Mapping[fx.Node, int]
    size: Mapping[fx.Node, int]
    alike: Mapping[fx.Node, int]
    changes: Mapping[int, frozenset[int]]
    crossing: tuple[int, ...]

    def live(self, cut: int) -> Iterator[fx.Node]:
        """What is made before the op at `cut`, needed from there on, and not made again."""
        for node in self.order[:cut]:
            if self.last_use.get(node, -1) >= cut and node not in self.again:
                yield node
        if cut > 0:
            for node in self.inputs:
                if self.last_use.get(node, -1) >= cut and node not in self.again:
                    yield node


def clean(capture: Capture) -> None:
    """Take out of a graph what torch.export has put in, and what nobody uses."""
    _clean(capture.graph, capture.holder, capture.functions)


def changed_tensors(capture: Capture, names: Mapping[str, str]) -> set[str]:
    """The buffers that a clean graph changes, by their first names."""
    nodes = list(capture.graph.nodes)
    alike = _alike(nodes)
    memory = {
        alike[each] for node in nodes if node.op == "call_function" for each in _changed(node)
    }
    found = {
        str(node.target).removeprefix("model.")
        for node in capture.graph.find_nodes(op="get_attr")
        if alike[node] in memory
    }
    return {names[name] for name in found if name in names}


def flow_of(capture: Capture, names: Mapping[str, str], steady: Collection[str]) -> Flow:
    """Say what is known of a clean graph.

    Args:
        capture: the graph.
        names: of every parameter and buffer of the model, the first of the names that it has.
        steady: buffers that no graph of the model changes.
    """
    graph = capture.graph
    weights: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target).removeprefix("model.")
        if name in names:
            weights[node] = names[name]
        else:
            constants[node] = constant(capture.holder, node.target)
    order = _ordered(graph, weights)
    output = graph.output_node().args[0]
    assert isinstance(output, (tuple, list))
    outputs = tuple(each if isinstance(each, fx.Node) else None for each in output)
    inputs = tuple(graph.find_nodes(op="placeholder"))
    last_use = {used: index for index, node in enumerate(order) for used in node.all_input_nodes}
    last_use |= {each: len(order) for each in outputs if each is not None}
    alike = _alike([*inputs, *weights, *constants, *order])
    changes = {
        index: frozenset(alike[each] for each in found)
        for index, node in enumerate(order)
        if (found := _changed(node))
    }
    _check_changes(changes, constants, alike)
    again = _again(
        order,
        inputs,
        [*constants, *(node for node in weights if weights[node] in steady)],
        (_memory(changes), alike),
    )
    size = {node: _bytes(node) for node in (*inputs, *order)}
    return Flow(
        order,
        inputs,
        outputs,
        weights,
        constants,
        frozenset(again),
        last_use,
        size,
        alike,
        changes,
        _crossing(order, inputs, again, (last_use, size)),
    )


def _crossing(
    order: tuple[fx.Node, ...],
    inputs: tuple[fx.Node, ...],
    again: set[fx.Node],
    found: tuple[Mapping[fx.Node, int], Mapping[fx.Node, int]],
) -> tuple[int, ...]:
    last_use, size = found
    steps = [0] * (len(order) + 2)
    for made, node in [*((0, node) for node in inputs), *enumerate(order)]:
        if node not in again and last_use.get(node, -1) > made:
            steps[made + 1] += size[node] + 1
            steps[last_use[node] + 1] -= size[node] + 1
    return tuple(accumulate(steps))


def _clean(graph: fx.Graph, holder: nn.Module, functions: Mapping[str, Any]) -> None:
    """Take out checks that torch.export has put in, and put functions with their own backward back."""
    for node in list(graph.nodes):
        if node.op == "get_attr":
            inner = constant(holder, node.target)
            if isinstance(inner, fx.GraphModule):
                _clean(inner.graph, inner, functions)
                inner.recompile()
        elif node.op == "call_function" and op_name(node) == "_assert_tensor_metadata":
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is custom_function():
            called = functions[node.args[0]]
            node.target = applied(called) if isinstance(called, type) else called
            node.args = node.args[1:]
    graph.eliminate_dead_code(_stays)


def _stays(node: fx.Node) -> bool:
    """Whether an op does something even if nobody uses what it makes."""
    return (
        node.op in ("placeholder", "output")
        or draws(node)
        or bool(_changed(node))
        or _is_check(node)
    )


def _is_check(node: fx.Node) -> bool:
    """Whether an op makes nothing and may fail: it runs once, in the layer where it stands."""
    return op_name(node).startswith("_assert")


def _ordered(graph: fx.Graph, weights: Mapping[fx.Node, str]) -> tuple[fx.Node, ...]:
    """Ops as they ran; but parts of a result stand right behind it, and a buffer gets its new
    values as soon as these are there.
    """
    ops = [node for node in graph.nodes if node.op == "call_function"]
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    late = {
        node
        for node in ops
        if op_name(node) == "copy_" and node.args[0] in weights and not node.users
    }

    def place(node: fx.Node) -> None:
        if node in placed:
            return
        placed.add(node)
        order.append(node)
        for user in node.users:
            if op_name(user) == "getitem":
                place(user)

    for node in ops:
        if node not in late:
            place(node)
    for node in (each for each in ops if each in late):
        kept, made = node.args[0], node.args[1]
        users = set(kept.users) | ({made} if isinstance(made, fx.Node) else set())
        at = max((order.index(user) for user in users if user in placed), default=len(order) - 1)
        order.insert(at + 1, node)
        placed.add(node)
    return tuple(order)


def _tensors(node: fx.Node) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def _alike(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """Numbers by memory: values of one storage in the trace, and what an op's schema calls views."""
    found: dict[int, int] = {}
    alike: dict[fx.Node, int] = {}
    parent: list[int] = []

    def root(number: int) -> int:
        while parent[number] != number:
            number = parent[number]
        return number

    for node in nodes:
        number = len(parent)
        parent.append(number)
        alike[node] = number
        same = [
            found.setdefault(tensor.untyped_storage()._cdata, number) for tensor in _tensors(node)
        ]
        same += [alike[viewed] for viewed in _viewed(node) if viewed in alike]
        for other in same:
            parent[root(other)] = root(number)
    return {node: root(number) for node, number in alike.items()}


def _given(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Arguments of an op as its schema has them, with what was given."""
    if isinstance(node.target, OpOverload):
        for index, argument in enumerate(node.target._schema.arguments):
            yield (
                argument,
                node.args[index] if index < len(node.args) else node.kwargs.get(argument.name),
            )


def _viewed(node: fx.Node) -> list[fx.Node]:
    if op_name(node) == "getitem":
        return list(node.all_input_nodes)
    return [
        given
        for argument, given in _given(node)
        if argument.alias_info is not None and isinstance(given, fx.Node)
    ]


def _changed(node: fx.Node) -> list[fx.Node]:
    """What an op writes into: by its schema; statistics of norms are written without its saying so."""
    inner = _inner(node)
    if inner is not None:
        given = node.args[node.args.index(inner[0]) + 1 :]
        places = dict(zip(inner[1].graph.find_nodes(op="placeholder"), given, strict=True))
        # Of a view in there that is written into, what it is a view of.
        alike = _alike(list(inner[1].graph.nodes))
        memory = {
            alike[each]
            for op in inner[1].graph.nodes
            if op.op == "call_function"
            for each in _changed(op)
        }
        return [
            each
            for place, each in places.items()
            if alike[place] in memory and isinstance(each, fx.Node)
        ]
    written = [
        given
        for argument, given in _given(node)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if op_name(node) in ("batch_norm", "instance_norm") and node.args[5]:
        written += node.args[3:5]
    return [each for each in pytree.tree_leaves(written) if isinstance(each, fx.Node)]


def _inner(node: fx.Node) -> tuple[fx.Node, fx.GraphModule] | None:
    """The graph that an op runs, as a region without gradients or with another autocast has one;
    and the node that stands for it.
    """
    if isinstance(node.target, HigherOrderOperator):
        for used in node.all_input_nodes:
            module = used.graph.owning_module
            found = (
                constant(module, used.target)
                if used.op == "get_attr" and module is not None
                else None
            )
            if isinstance(found, fx.GraphModule):
                return used, found
    return None


def _check_changes(
    changes: Mapping[int, frozenset[int]],
    constants: Mapping[fx.Node, Any],
    alike: Mapping[fx.Node, int],
) -> None:
    """A tensor that a model changes as it runs must be one of its buffers.

    Raises:
        ChainError: it is not.
    """
    changed = _memory(changes)
    for node in constants:
        if alike[node] in changed and not str(node.target).rpartition(".")[2].startswith(
            ("lifted_tensor", "_tensor_constant")
        ):
            raise ChainError(
                f"the model changes {str(node.target).removeprefix('model.')} as it runs, a tensor that is no buffer, so that "
                "checkpoints would not have it: make it one by register_buffer"
            )


def _memory(changes: Mapping[int, frozenset[int]]) -> set[int]:
    return {memory for each in changes.values() for memory in each}


def _again(
    order: tuple[fx.Node, ...],
    inputs: tuple[fx.Node, ...],
    steady: Sequence[fx.Node],
    changed: tuple[set[int], Mapping[fx.Node, int]],
) -> set[fx.Node]:
    """What is made again: of inputs, constants, and buffers that stay as they are."""
    written, alike = changed
    found = {node for node in (*inputs, *steady) if alike[node] not in written}
    for node in order:
        if (
            all(used in found for used in node.all_input_nodes)
            and alike[node] not in written
            and not draws(node)
            and not _dear(node)
            and not _is_check(node)
        ):
            found.add(node)
    return found


def _dear(node: fx.Node) -> bool:
    name = op_name(node)
    if name in _PRODUCTS:
        first = next((tensor for used in node.all_input_nodes for tensor in _tensors(used)), None)
        return first is None or first.dim() == 0 or _number(first.shape[-1]) > _FEW
    return name in _DEAR or _is_custom(node)


def applied(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """A function that calls an autograd.Function, for Python that is written from a graph."""

    def apply(*args: Any) -> Any:
        return kind.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types for it

    apply.__name__ = apply.__qualname__ = f"apply_{kind.__name__}"
    apply.custom = True  # type: ignore[attr-defined]
    return apply


def _is_custom(node: fx.Node) -> bool:
    return getattr(node.target, "custom", False)


def draws(node: fx.Node) -> bool:
    """Whether an op could draw random numbers."""
    if _is_custom(node):
        return True
    inner = _inner(node)
    if inner is not None:
        return any(draws(each) for each in inner[1].graph.nodes if each.op == "call_function")
    if (
        not isinstance(node.target, OpOverload)
        or torch.Tag.nondeterministic_seeded not in node.target.tags
    ):
        return False
    given = {argument.name: each for argument, each in _given(node)}
    if given.get("train") is False or given.get("training") is False:
        return False
    return all(given.get(name, 1) not in (0, 0.0) for name in ("p", "dropout_p", "dropout"))


def is_heavy(node: fx.Node) -> bool:
    """Whether an op with weights is worth a layer of its own, whosever the weights are."""
    return (
        op_name(node) in _HEAVY or isinstance(node.target, HigherOrderOperator) or _is_custom(node)
    )


def _bytes(node: fx.Node) -> int:
    total = 0
    for tensor in _tensors(node):
        count = tensor.element_size()
        for size in tensor.shape:
            count *= _number(size)
        total += count
    return total


def _number(size: int | SymInt) -> int:
    """A size at the example."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 64
