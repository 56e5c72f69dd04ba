"""A backward in two parts: first for the inputs, so that the stage before can go on, later for the
weights.

Source: Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 2. The graph is walked once; where
the path from the outputs to the inputs passes a node that also leads to weights, the gradient that
arrives at that node is caught. The weight part starts from those nodes, each for its own weights
alone, so that nothing but these nodes runs twice, and they only for what was left out. Hooks of the
user's on tensors that such a node made run twice as well, with effect once on gradients
(`retain_grad` counts twice).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = list[Tensor | None]


@dataclass(frozen=True)
class _Group:
    """Weights, the edges that lead to them, and the gradients that arrive there; `node` is where
    they were caught, if they were.
    """

    edges: list[GradientEdge]
    grads: list[Tensor]
    weights: list[Tensor]
    node: Node | None = None

    def run(self, keep_graph: bool) -> None:
        """Add to the weights' `.grad`."""
        if self.node is None:
            torch.autograd.backward(
                self.edges, self.grads, retain_graph=keep_graph, inputs=self.weights
            )
            return
        arrived = {edge.output_nr: grad for edge, grad in zip(self.edges, self.grads, strict=True)}

        # Hooks of the user's on a tensor have changed what was caught, and now run again: the last
        # hook puts it back.
        def put_back(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(arrived.get(i) for i in range(len(grads)))

        hook = self.node.register_prehook(put_back)
        try:
            torch.autograd.backward(
                self.edges, self.grads, retain_graph=keep_graph, inputs=self.weights
            )
        finally:
            hook.remove()


@dataclass
class PendingWeights:
    """What the weight part needs, group by group."""

    groups: list[_Group] = field(default_factory=list)


def input_grad(
    outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Grads, PendingWeights]:
    """The gradients of `inputs`, and what is left for `weight_grad`.

    Args:
        outputs: tensors that require grad.
        output_grads: one for each output, of its shape; None stands for no gradient. A single
        output of no dimensions is taken
            for a loss, and None for 1.
        inputs: leaves that require grad. Without any, all work is left for the weights.

    Returns:
        One gradient for each input (None where nothing depends on it), and the pending weight part.
    """
    loss = len(outputs) == 1 and outputs[0].dim() == 0
    live = [
        (out, grad)
        for out, grad in zip(outputs, output_grads, strict=True)
        if grad is not None or loss
    ]
    edges = [get_gradient_edge(out) for out, _ in live]
    filled = [torch.ones_like(out) if grad is None else grad for out, grad in live]
    roots = [edge.node for edge in edges]
    on_path = _reaching(roots, {get_gradient_edge(leaf).node for leaf in inputs})
    caught: dict[Node, dict[int, Tensor]] = {}
    owners: dict[Tensor, list[Node]] = {}
    hooks = []
    for node in on_path:
        weights = _weights(
            [
                after
                for after, _ in node.next_functions
                if after is not None and after not in on_path
            ]
        )
        for weight in weights:
            owners.setdefault(weight, []).append(node)
        if weights:

            def catch(grads: tuple[Tensor | None, ...], node: Node = node) -> None:
                caught[node] = {
                    i: grad.detach() for i, grad in enumerate(grads) if grad is not None
                }

            hooks.append(node.register_prehook(catch))
    try:
        found: Grads = [None] * len(inputs)
        if on_path:
            live_outputs = [out for out, _ in live]
            found = list(
                torch.autograd.grad(
                    live_outputs, list(inputs), filled, retain_graph=True, allow_unused=True
                )
            )
    finally:
        for hook in hooks:
            hook.remove()
    apart = {weight for root in roots if root not in on_path for weight in _weights([root])}
    # A weight that several nodes lead to would be met more than once on the way from the first: it
    # takes the whole way, once.
    whole = list(apart | {weight for weight, nodes in owners.items() if len(nodes) > 1})
    pending = PendingWeights([_Group(edges, filled, whole)] if whole else [])
    single: dict[Node, list[Tensor]] = {}
    for weight, nodes in owners.items():
        if len(nodes) == 1 and weight not in apart:
            single.setdefault(nodes[0], []).append(weight)
    for node, weights in single.items():
        arrived = caught.get(node)
        # a function of the user's may have returned None for a gradient: then there is none for
        # these either
        if arrived:
            pending.groups.append(
                _Group(
                    [GradientEdge(node, i) for i in arrived], list(arrived.values()), weights, node
                )
            )
    return found, pending


def weight_grad(pending: PendingWeights) -> None:
    """Add the gradients of all weights to their `.grad`, as a whole backward would have. `pending`
    is used up.
    """
    while pending.groups:
        pending.groups.pop().run(keep_graph=bool(pending.groups))


def _weights(roots: list[Node]) -> list[Tensor]:
    """The leaves that gradients from `roots` are added to."""
    found: list[Tensor] = []
    seen = set(roots)
    stack = list(roots)
    while stack:
        node = stack.pop()
        variable = getattr(
            node, "variable", None
        )  # only nodes that add to a leaf's gradient have one
        if variable is not None:
            found.append(variable)
        after = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= after
        stack += after
    return found


def _reaching(roots: list[Node], targets: set[Node]) -> dict[Node, None]:
    """All nodes under `roots` from which a target can be reached, in an order that is always the
    same.
    """
    reaches: dict[Node, bool] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        following = [after for after, _ in node.next_functions if after is not None]
        if done:
            reaches[node] = node in targets or any(reaches[after] for after in following)
        elif node not in reaches:
            reaches[node] = False
            stack.append((node, True))
            stack += [(after, False) for after in following if after not in reaches]
    return {node: None for node, reached in reaches.items() if reached}
