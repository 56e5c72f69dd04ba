"""Functions that run ranges of ops of a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from penstock.tracing.flow import Flow
from penstock.tracing.ops import draws


@dataclass(frozen=True, eq=False)
class Segment:
    """The part of a graph that one layer runs.

    Attributes:
        flow: the graph.
        ops: indices of the layer's ops in the order.
        arriving: values of earlier layers that it uses.
        forwarded: names of values of earlier layers that later layers use.
        leaving: its own values that later layers use.
        recomputed: values that it uses and that are recomputed from the inputs.
        weights: parameters and buffers that it uses, without recomputed ones.
    """

    flow: Flow
    ops: range
    arriving: tuple[fx.Node, ...]
    forwarded: tuple[str, ...]
    leaving: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]

    @classmethod
    def of(cls, flow: Flow, ops: range) -> Segment:
        """Return the segment of a range of ops."""
        is_last = ops.stop == len(flow.order)
        nodes = _segment_nodes(flow, ops)
        # An input that the model changes in place is not recomputed: the first layer sends it on
        # like a value that it has computed.
        inputs: list[fx.Node] = []
        if ops.start == 0:
            inputs = [node for node in flow.inputs if node not in flow.recomputed]
        used = _used_values(flow, nodes, is_last=is_last)
        weights, recomputed = [], []
        for node in used:
            if node in flow.recomputed:
                recomputed.append(node)
            elif node in flow.weights:
                weights.append(node)
        earlier = dict.fromkeys(flow.live(ops.start))
        forwarded, leaving = [], []
        # The last segment returns the outputs of the model, and nothing behind it takes values.
        for node in () if is_last else flow.live(ops.stop):
            if node in earlier:
                forwarded.append(node.name)
            if node in nodes or node in inputs:
                leaving.append(node)
        return cls(
            flow,
            ops,
            tuple(node for node in earlier if node in used),
            tuple(forwarded),
            tuple(leaving),
            (*recomputed, *inputs),
            tuple(weights),
        )

    @property
    def is_last(self) -> bool:
        """Whether it returns the model's outputs."""
        return self.ops.stop == len(self.flow.order)

    @cached_property
    def leaving_names(self) -> tuple[str, ...]:
        """The names of `leaving`."""
        return tuple(node.name for node in self.leaving)

    @cached_property
    def draws(self) -> bool:
        """Whether an op may draw random numbers."""
        return any(draws(self.flow.order[index]) for index in self.ops)

    @cached_property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The function that runs the ops.

        It takes the device, and then the values of `weights`, `arriving` and `recomputed`. It
        returns the values of `leaving`; for the last segment, the outputs.
        """
        returned = list(self.leaving)
        if self.is_last:
            returned = [node for node in self.flow.outputs if node is not None]
        nodes = _segment_nodes(self.flow, self.ops)
        return function_of(nodes, [*self.weights, *self.arriving, *self.recomputed], returned)


def _segment_nodes(flow: Flow, ops: range) -> list[fx.Node]:
    """Return the ops of a segment, without those that are recomputed on every rank."""
    return [flow.order[index] for index in ops if flow.order[index] not in flow.recomputed]


def _used_values(flow: Flow, nodes: Sequence[fx.Node], *, is_last: bool) -> list[fx.Node]:
    """Return the values that ops use, each once; with `is_last` also the model's outputs."""
    used: dict[fx.Node, None] = {}
    for node in nodes:
        used.update(dict.fromkeys(node.all_input_nodes))
    if is_last:
        used.update(dict.fromkeys(node for node in flow.outputs if node is not None))
    return list(used)


def recomputation(
    flow: Flow, targets: Sequence[fx.Node]
) -> tuple[Callable[..., tuple[Any, ...]], list[fx.Node]]:
    """Return a function that recomputes values from inputs, constants and steady buffers.

    Args:
        flow: the graph.
        targets: the values to recompute.

    Returns:
        The function, and its arguments after the device.
    """
    needed: set[fx.Node] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    nodes = [node for node in flow.order if node in needed]
    sources = [node for node in (*flow.inputs, *flow.weights, *flow.constants) if node in needed]
    return function_of(nodes, sources, targets), sources


def function_of(
    nodes: Iterable[fx.Node], arguments: Sequence[fx.Node], results: Sequence[fx.Node]
) -> Callable[..., tuple[Any, ...]]:
    """Return a Python function that runs some ops.

    It takes a device and the values of `arguments`, and returns those of `results`.
    """
    graph = fx.Graph()
    device = graph.placeholder("device")
    copies = {node: graph.placeholder(node.name) for node in dict.fromkeys(arguments)}
    for node in nodes:
        copied = graph.node_copy(node, lambda source: copies[source])
        copied.args, copied.kwargs = _on(copied.args, device), _on(copied.kwargs, device)
        copied.meta = {}
        copies[node] = copied
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(nn.Module(), graph, class_name="Layer").forward


def _on(value: Any, device: fx.Node) -> Any:
    """Replace the CPU, on which the model was traced, by the device of the layer."""
    if isinstance(value, torch.device):
        return device if value.type == "cpu" else value
    if isinstance(value, (tuple, list)):
        return type(value)(_on(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    return value
