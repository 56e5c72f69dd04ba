"""Split backward: first the gradients of the inputs, later those of the weights.

Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 2.

The input part traverses the graph once. At every node on a path from the outputs to the inputs that
also leads to weights, it captures the gradients that arrive. The weight part starts from these
nodes, each for its own weights, so that only these nodes run twice, and only for the weights. The
user's hooks on tensors produced by such a node run twice as well; their effect on gradients is that
of one run, but `retain_grad` counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = list[Tensor | None]


@dataclass(frozen=True)
class _Group:
    """Weights, the graph edges that lead to them, and the gradients that arrive there.

    Attributes:
        edges: where the weight part starts.
        grads: one gradient for each edge.
        weights: the leaves whose `.grad` is accumulated.
        node: the node at which the gradients were captured; None if the edges are the outputs.
    """

    edges: list[GradientEdge]
    grads: list[Tensor]
    weights: list[Tensor]
    node: Node | None = None

    def run(self, keep_graph: bool) -> None:
        """Add the gradients of the weights to their `.grad`."""
        if self.node is None:
            self._backward(keep_graph)
            return
        captured = {edge.output_nr: grad for edge, grad in zip(self.edges, self.grads, strict=True)}

        # The user's hooks on the tensor ran before the capture and run again now. This prehook is
        # the last one and restores the captured gradients, so that the hooks take effect once.
        def restore(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(captured.get(i) for i in range(len(grads)))

        hook = self.node.register_prehook(restore)
        try:
            self._backward(keep_graph)
        finally:
            hook.remove()

    def _backward(self, keep_graph: bool) -> None:
        torch.autograd.backward(
            self.edges, self.grads, retain_graph=keep_graph, inputs=self.weights
        )


@dataclass
class PendingWeights:
    """State between `input_grad` and `weight_grad`: groups of weights without gradients yet."""

    groups: list[_Group] = field(default_factory=list)


def input_grad(
    outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Grads, PendingWeights]:
    """Compute the gradients of `inputs`, and prepare those of the weights.

    Args:
        outputs: tensors that require grad.
        output_grads: one for each output, of its shape; None for no gradient. A single output
            without dimensions is a loss, and None stands for 1.
        inputs: leaves that require grad. If there are none, all work is left for the weights.

    Returns:
        One gradient for each input (None if no output depends on it), and the argument of
        `weight_grad`.
    """
    live_outputs, live_grads = _live_outputs(outputs, output_grads)
    edges = [get_gradient_edge(output) for output in live_outputs]
    roots = [edge.node for edge in edges]
    on_path = _nodes_reaching(roots, {get_gradient_edge(leaf).node for leaf in inputs})
    # The weight part of the backward leaves the path at these nodes. The gradients that arrive there
    # are all that it needs: from there it does not repeat what the input gradients have computed.
    weights_of = {node: list(graph_leaves(_off_path_successors(node, on_path))) for node in on_path}
    captured: dict[Node, dict[int, Tensor]] = {}
    hooks = [
        node.register_prehook(_capture_into(captured, node))
        for node, weights in weights_of.items()
        if weights
    ]
    try:
        grads: Grads = [None] * len(inputs)
        if on_path:
            grads = list(
                torch.autograd.grad(
                    live_outputs, list(inputs), live_grads, retain_graph=True, allow_unused=True
                )
            )
    finally:
        for hook in hooks:
            hook.remove()
    from_outputs, by_node = _partition_weights(weights_of, roots)
    groups = [_Group(edges, live_grads, from_outputs)] if from_outputs else []
    groups += _captured_groups(captured, by_node)
    return grads, PendingWeights(groups)


def _live_outputs(
    outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that have a gradient, and these gradients."""
    is_loss = len(outputs) == 1 and outputs[0].dim() == 0
    live_outputs: list[Tensor] = []
    live_grads: list[Tensor] = []
    for output, grad in zip(outputs, output_grads, strict=True):
        if grad is not None:
            live_outputs.append(output)
            live_grads.append(grad)
        elif is_loss:
            live_outputs.append(output)
            live_grads.append(torch.ones_like(output))
    return live_outputs, live_grads


def _off_path_successors(node: Node, on_path: Container[Node]) -> list[Node]:
    """Return the nodes that a node leads to and that are not on the path."""
    return [
        successor
        for successor, _ in node.next_functions
        if successor is not None and successor not in on_path
    ]


def _capture_into(
    captured: dict[Node, dict[int, Tensor]], node: Node
) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Return a prehook for `node` that stores the gradients that arrive there, by output number."""

    def capture(grads: tuple[Tensor | None, ...]) -> None:
        captured[node] = {i: grad.detach() for i, grad in enumerate(grads) if grad is not None}

    return capture


def _partition_weights(
    weights_of: Mapping[Node, Sequence[Tensor]], roots: Sequence[Node]
) -> tuple[list[Tensor], dict[Node, list[Tensor]]]:
    """Return the weights whose backward starts at the outputs, and the others by captured node.

    A weight that is reached from several nodes, or from an output without passing the path, starts
    at the outputs: started at the first of its nodes, it would receive the gradients of the later
    ones twice.
    """
    from_outputs: set[Tensor] = set()
    for root in roots:
        if root not in weights_of:
            from_outputs.update(graph_leaves([root]))
    nodes_of: dict[Tensor, list[Node]] = {}
    for node, weights in weights_of.items():
        for weight in weights:
            nodes_of.setdefault(weight, []).append(node)
    by_node: dict[Node, list[Tensor]] = {}
    whole = list(from_outputs | {weight for weight, nodes in nodes_of.items() if len(nodes) > 1})
    for weight, nodes in nodes_of.items():
        if len(nodes) == 1 and weight not in from_outputs:
            by_node.setdefault(nodes[0], []).append(weight)
    return whole, by_node


def _captured_groups(
    captured: Mapping[Node, Mapping[int, Tensor]], by_node: Mapping[Node, list[Tensor]]
) -> list[_Group]:
    """Return the nodes with weights, with the gradients that have arrived at their outputs."""
    groups = []
    for node, weights in by_node.items():
        grads = captured.get(node)
        # A user's autograd.Function may have returned None as gradient. Then no gradient arrives
        # at the node, and its weights get none.
        if grads:
            edges = [GradientEdge(node, output_number) for output_number in grads]
            groups.append(_Group(edges, list(grads.values()), weights, node))
    return groups


def weight_grad(pending: PendingWeights) -> None:
    """Add the gradients of all weights to their `.grad`, as a full backward would have.

    Args:
        pending: result of `input_grad`; it is empty afterwards.
    """
    while pending.groups:
        pending.groups.pop().run(keep_graph=bool(pending.groups))


def graph_leaves(roots: Iterable[Node], ends: Iterable[Node] = ()) -> Iterator[Tensor]:
    """Yield the leaves to which the gradients at `roots` are propagated, except through the nodes
    `ends`.
    """
    visited = set(ends)
    stack = [root for root in roots if root not in visited]
    visited.update(stack)
    while stack:
        node = stack.pop()
        # Only the nodes that accumulate the gradient of a leaf have this attribute.
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        successors = {successor for successor, _ in node.next_functions if successor is not None}
        successors -= visited
        visited |= successors
        stack += successors


def _nodes_reaching(roots: list[Node], targets: set[Node]) -> dict[Node, None]:
    """Return the nodes under `roots` that lead to a target, in a deterministic order."""
    reaches: dict[Node, bool] = {}
    # Depth-first search in post-order; a node is visited again once its successors are decided.
    stack = [(root, False) for root in roots]
    while stack:
        node, successors_decided = stack.pop()
        successors = [successor for successor, _ in node.next_functions if successor is not None]
        if successors_decided:
            reaches[node] = node in targets or any(reaches[after] for after in successors)
        elif node not in reaches:
            reaches[node] = False
            stack.append((node, True))
            stack += [(successor, False) for successor in successors if successor not in reaches]
    return {node: None for node, is_reaching in reaches.items() if is_reaching}
