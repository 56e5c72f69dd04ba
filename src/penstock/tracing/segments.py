"""From ops of a captured graph to functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from penstock.tracing.flow import Flow, draws


@dataclass(frozen=True, eq=False)
class Segment:
    """What one layer does, in one graph.

    Attributes:
        flow: the graph.
        ops: the layer's, by index in the order.
        taken: names of the values that it takes from layers before.
        kept: of those that it does not use, or not last, and that layers behind it take.
        made: of its own that layers behind it take.
        again: of what it takes that is made of the inputs alone.
        weights: of the tensors of its own that it uses.
    """

    flow: Flow
    ops: range
    taken: tuple[fx.Node, ...]
    kept: tuple[str, ...]
    made: tuple[fx.Node, ...]
    again: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]

    @classmethod
    def of(cls, flow: Flow, ops: range) -> Segment:
        """The segment of these ops."""
        nodes = [flow.order[index] for index in ops if flow.order[index] not in flow.again]
        inside = set(nodes)
        last = ops.stop == len(flow.order)
        used = list(
            dict.fromkeys(
                [each for node in nodes for each in node.all_input_nodes]
                + ([each for each in flow.outputs if each is not None] if last else [])
            )
        )
        arriving = list(flow.live(ops.start))
        leaving = [] if last else list(flow.live(ops.stop))
        # An input that the model changes in place goes from the first layer on like what the model
        # has made.
        given = [node for node in flow.inputs if node not in flow.again and ops.start == 0]
        return cls(
            flow,
            ops,
            tuple(node for node in arriving if node in used),
            tuple(node.name for node in leaving if node in arriving),
            tuple(node for node in leaving if node in inside or node in given),
            tuple(node for node in used if node in flow.again) + tuple(given),
            tuple(node for node in used if node in flow.weights and node not in flow.again),
        )

    @property
    def is_last(self) -> bool:
        """Whether it returns what the model returns."""
        return self.ops.stop == len(self.flow.order)

    @cached_property
    def made_names(self) -> tuple[str, ...]:
        """The names of what it makes."""
        return tuple(node.name for node in self.made)

    @cached_property
    def draws(self) -> bool:
        """Whether an op could draw random numbers."""
        return any(draws(self.flow.order[index]) for index in self.ops)

    @cached_property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """From device, weights, values taken, and those made again, in this order, to what is made;
        of the last, the outputs.
        """
        nodes = [
            self.flow.order[index]
            for index in self.ops
            if self.flow.order[index] not in self.flow.again
        ]
        made = (
            [each for each in self.flow.outputs if each is not None] if self.is_last else self.made
        )
        return function_of(nodes, [*self.weights, *self.taken, *self.again], made)


def remade(
    flow: Flow, wanted: Sequence[fx.Node]
) -> tuple[Callable[..., tuple[Any, ...]], list[fx.Node]]:
    """What makes these values of inputs, constants and buffers that stay as they are: from device
    and those, which come along.
    """
    needed: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    nodes = [node for node in flow.order if node in needed]
    sources = [node for node in (*flow.inputs, *flow.weights, *flow.constants) if node in needed]
    return function_of(nodes, sources, wanted), sources


def function_of(
    nodes: Iterable[fx.Node], given: Sequence[fx.Node], made: Sequence[fx.Node]
) -> Callable[..., tuple[Any, ...]]:
    """Python for some ops: takes a device and the values of `given`, returns those of `made`."""
    graph = fx.Graph()
    device = graph.placeholder("device")
    places = {node: graph.placeholder(node.name) for node in dict.fromkeys(given)}
    for node in nodes:
        copied = graph.node_copy(node, lambda used: places[used])
        copied.args, copied.kwargs = _on(copied.args, device), _on(copied.kwargs, device)
        copied.meta = {}
        places[node] = copied
    graph.output(tuple(places[node] for node in made))
    return fx.GraphModule(nn.Module(), graph, class_name="Layer").forward


def _on(value: Any, device: fx.Node) -> Any:
    """Arguments in which the device of the trace is the one where the layer is."""
    if isinstance(value, torch.device):
        return device if value.type == "cpu" else value
    if isinstance(value, (tuple, list)):
        return type(value)(_on(item, device) for item in value)
    return (
        {key: _on(item, device) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )
