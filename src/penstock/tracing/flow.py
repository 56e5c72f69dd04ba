"""Data flow through a captured graph: lifetimes, sizes, shared memory and changes of its values.

It also determines which values depend on the inputs alone, so that every rank can compute them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx, nn

from penstock.errors import ChainError
from penstock.tracing.graph_export import Capture, constant
from penstock.tracing.interception import custom_function
from penstock.tracing.ops import (
    apply_function,
    bytes_at_example,
    draws,
    is_check,
    is_expensive,
    memory_ids,
    op_name,
    written_values,
)


@dataclass(frozen=True, eq=False)
class Flow:
    """A graph's ops in the order in which they run, and facts about its values.

    Attributes:
        order: ops, without placeholders, constants and the output.
        inputs: placeholders.
        outputs: what the model returns, in order: nodes, or None.
        weights: by get_attr node, the name of the parameter or buffer.
        constants: by get_attr node, its other values: a tensor, or a graph of its own.
        recomputed: values that every rank recomputes from the inputs: they depend on inputs and
            constants alone, are not changed, and are cheap to compute.
        last_use: index in `order` of the last op that uses a value; `len(order)` for outputs.
        size: bytes of a value for the example.
        memory_of: a number for each value, equal for those that share memory.
        changes: by index in `order`, the numbers of the memory that the op changes.
        crossing: by index in `order`, the cost of a cut before that op: the bytes of the values
            that cross, plus one for each value, so that of equal cuts one with fewer values wins.
    """

    order: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    weights: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Any]
    recomputed: frozenset[fx.Node]
    last_use: Mapping[fx.Node, int]
    size: Mapping[fx.Node, int]
    memory_of: Mapping[fx.Node, int]
    changes: Mapping[int, frozenset[int]]
    crossing: tuple[int, ...]

    def live(self, cut: int) -> Iterator[fx.Node]:
        """Yield the values that cross a cut before op `cut`, without those recomputed."""
        values = [*self.order[:cut], *(self.inputs if cut > 0 else ())]
        for node in values:
            if self.last_use.get(node, -1) >= cut and node not in self.recomputed:
                yield node


def clean(capture: Capture) -> None:
    """Remove the checks that torch.export has added to a graph, and ops without effect."""
    _clean(capture.graph, capture.holder, capture.functions)


def changed_tensors(capture: Capture, names: Mapping[str, str]) -> set[str]:
    """Return the buffers that a clean graph changes, by their first names."""
    nodes = list(capture.graph.nodes)
    memory_of = memory_ids(nodes)
    changed: set[int] = set()
    for node in nodes:
        if node.op == "call_function":
            changed.update(memory_of[target] for target in written_values(node))
    attributes = {
        str(node.target).removeprefix("model.")
        for node in capture.graph.find_nodes(op="get_attr")
        if memory_of[node] in changed
    }
    return {names[name] for name in attributes if name in names}


def flow_of(capture: Capture, names: Mapping[str, str], steady: Collection[str]) -> Flow:
    """Analyse a clean graph.

    Args:
        capture: the graph.
        names: for every name of a parameter or buffer of the model, the first name of that tensor.
        steady: buffers that no graph of the model changes.

    Raises:
        ChainError: the model changes a tensor that is not a buffer.
    """
    graph = capture.graph
    weights, constants = _attributes(capture, names)
    order = _run_order(graph, weights)
    inputs = tuple(graph.find_nodes(op="placeholder"))
    output = graph.output_node().args[0]
    assert isinstance(output, (tuple, list))
    outputs = tuple(value if isinstance(value, fx.Node) else None for value in output)
    last_use = _last_uses(order, outputs)
    memory_of = memory_ids([*inputs, *weights, *constants, *order])
    changes = _changes(order, memory_of)
    _check_changes(changes, constants, memory_of)
    steady_nodes = [*constants, *(node for node in weights if weights[node] in steady)]
    recomputed = _recomputed_values(
        order, [*inputs, *steady_nodes], _changed_memory(changes), memory_of
    )
    size = {node: bytes_at_example(node) for node in (*inputs, *order)}
    sent = {node: last for node, last in last_use.items() if node not in recomputed}
    return Flow(
        order,
        inputs,
        outputs,
        weights,
        constants,
        frozenset(recomputed),
        last_use,
        size,
        memory_of,
        changes,
        _crossing_costs(order, inputs, sent, size),
    )


def _attributes(
    capture: Capture, names: Mapping[str, str]
) -> tuple[dict[fx.Node, str], dict[fx.Node, Any]]:
    """Return the names of parameters and buffers, and the values of other attributes, by node."""
    weights: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Any] = {}
    for node in capture.graph.find_nodes(op="get_attr"):
        name = str(node.target).removeprefix("model.")
        if name in names:
            weights[node] = names[name]
        else:
            constants[node] = constant(capture.holder, node.target)
    return weights, constants


def _last_uses(order: Sequence[fx.Node], outputs: Sequence[fx.Node | None]) -> dict[fx.Node, int]:
    """Return `Flow.last_use`."""
    last_use: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        last_use.update(dict.fromkeys(node.all_input_nodes, index))
    last_use.update({node: len(order) for node in outputs if node is not None})
    return last_use


def _changes(
    order: Sequence[fx.Node], memory_of: Mapping[fx.Node, int]
) -> dict[int, frozenset[int]]:
    """Return `Flow.changes`."""
    changes: dict[int, frozenset[int]] = {}
    for index, node in enumerate(order):
        targets = written_values(node)
        if targets:
            changes[index] = frozenset(memory_of[target] for target in targets)
    return changes


def _crossing_costs(
    order: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    last_use: Mapping[fx.Node, int],
    size: Mapping[fx.Node, int],
) -> tuple[int, ...]:
    """Return `Flow.crossing`, where `last_use` is without values that are recomputed."""
    differences = [0] * (len(order) + 2)
    for index, node in [*((0, node) for node in inputs), *enumerate(order)]:
        last = last_use.get(node, -1)
        if last > index:
            # It crosses the cuts from behind the op that computes it to before its last use.
            differences[index + 1] += size[node] + 1
            differences[last + 1] -= size[node] + 1
    return tuple(accumulate(differences))


def _clean(graph: fx.Graph, holder: nn.Module, functions: Mapping[str, Any]) -> None:
    """Clean a graph and its subgraphs, and restore the calls of autograd.Functions."""
    for node in list(graph.nodes):
        if node.op == "get_attr":
            subgraph = constant(holder, node.target)
            if isinstance(subgraph, fx.GraphModule):
                _clean(subgraph.graph, subgraph, functions)
                subgraph.recompile()
        elif node.op == "call_function" and op_name(node) == "_assert_tensor_metadata":
            graph.erase_node(node)
        elif node.op == "call_function" and _is_detached_literal(node):
            # It has no graph, and in-place ops keep a value from being recomputed.
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is custom_function():
            function = functions[node.args[0]]
            node.target = apply_function(function) if isinstance(function, type) else function
            node.args = node.args[1:]
    graph.eliminate_dead_code(_has_effect)


def _is_detached_literal(node: fx.Node) -> bool:
    """Return whether an op detaches a fresh copy of a literal, as `torch.tensor` does."""
    source = node.args[0] if node.args else None
    return (
        op_name(node) == "detach_"
        and isinstance(source, fx.Node)
        and op_name(source) == "lift_fresh_copy"
    )


def _has_effect(node: fx.Node) -> bool:
    """Return whether an op must run even if its output is not used."""
    return (
        node.op in ("placeholder", "output")
        or draws(node)
        or bool(written_values(node))
        or is_check(node)
    )


def _run_order(graph: fx.Graph, weights: Mapping[fx.Node, str]) -> tuple[fx.Node, ...]:
    """Return the ops in the order in which they ran, with two exceptions.

    The parts of a result directly follow it, and a buffer is updated as soon as its new value is
    available and its old value is not used any more.
    """
    ops = [node for node in graph.nodes if node.op == "call_function"]
    updates = [
        node
        for node in ops
        if op_name(node) == "copy_" and node.args[0] in weights and not node.users
    ]
    order: list[fx.Node] = []
    # Updates count as placed while the other ops are ordered, and are inserted afterwards.
    placed: set[fx.Node] = set(updates)
    for node in ops:
        _place(node, order, placed)
    placed.difference_update(updates)
    for node in updates:
        order.insert(_update_position(node, order, placed), node)
        placed.add(node)
    return tuple(order)


def _update_position(node: fx.Node, order: Sequence[fx.Node], placed: Collection[fx.Node]) -> int:
    """Return the position behind the last user of a buffer's old value and its new value."""
    buffer, value = node.args[0], node.args[1]
    assert isinstance(buffer, fx.Node)
    users = set(buffer.users)
    if isinstance(value, fx.Node):
        users.add(value)
    positions = [order.index(user) for user in users if user in placed]
    return max(positions, default=len(order) - 1) + 1


def _place(node: fx.Node, order: list[fx.Node], placed: set[fx.Node]) -> None:
    """Append an op and the parts of its result to `order`."""
    if node in placed:
        return
    placed.add(node)
    order.append(node)
    for user in node.users:
        if op_name(user) == "getitem":
            _place(user, order, placed)


def _check_changes(
    changes: Mapping[int, frozenset[int]],
    constants: Mapping[fx.Node, Any],
    memory_of: Mapping[fx.Node, int],
) -> None:
    """Raise an error if the model changes a tensor that is not one of its buffers.

    Raises:
        ChainError: there is such a tensor.
    """
    changed = _changed_memory(changes)
    # Names of tensors that torch.export has created from literals in the forward.
    literals = ("lifted_tensor", "_tensor_constant")
    for node in constants:
        name = str(node.target)
        if memory_of[node] in changed and not name.rpartition(".")[2].startswith(literals):
            raise ChainError(
                f"the model changes {name.removeprefix('model.')} as it runs, a tensor that is no "
                "buffer, so that checkpoints would not have it: make it one by register_buffer"
            )


def _changed_memory(changes: Mapping[int, frozenset[int]]) -> set[int]:
    """Return all memory that some op changes."""
    memory: set[int] = set()
    for changed in changes.values():
        memory |= changed
    return memory


def _recomputed_values(
    order: Sequence[fx.Node],
    sources: Sequence[fx.Node],
    changed: Collection[int],
    memory_of: Mapping[fx.Node, int],
) -> set[fx.Node]:
    """Return the values that every rank recomputes, including unchanged ones of `sources`."""
    recomputed = {node for node in sources if memory_of[node] not in changed}
    for node in order:
        if (
            all(source in recomputed for source in node.all_input_nodes)
            and memory_of[node] not in changed
            and not draws(node)
            and not is_expensive(node)
            and not is_check(node)
        ):
            recomputed.add(node)
    return recomputed
