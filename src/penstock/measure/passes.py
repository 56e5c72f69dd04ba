"""Timed passes through a chain: forward layer by layer, then backward layer by layer, as a rank
runs its stage.

A layer that is run again and again by itself finds its input and its weights in the cache, and the
allocator hands it the blocks that it has just freed. In training it does neither: the other layers
have run in between. So layers are timed where they stand. Gradients of weights are fresh, as those
of a batch's first micro-batch; what adding up those of the others takes is measured by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import LayerFailed
from penstock.grad.split import PendingWeights, input_grad, weight_grad
from penstock.measure.company import Company
from penstock.measure.stopwatch import Stopwatch, stopwatch_for
from penstock.profile.profile import Phase

PHASES: tuple[Phase, ...] = ("forward", "backward", "input_grad", "weight_grad")

Loss = Callable[[Any, Any], Tensor]
#: Marks of a stopwatch before and after one layer's work.
Span = tuple[Any, Any]

#: Passes that take less than so many seconds are noisy, and cheap to repeat: three times as often.
_SHORT_S = 0.1


@dataclass
class _Step:
    """One layer's forward: the tensors that came in, None for those that get no gradient, and those
    that went out.
    """

    given: list[Tensor | None]
    made: list[Tensor]
    pending: PendingWeights = field(default_factory=PendingWeights)

    @property
    def leaves(self) -> list[Tensor]:
        """What an input gradient is wanted of."""
        return [leaf for leaf in self.given if leaf is not None]


@contextmanager
def named_failure(layer: str) -> Iterator[None]:
    """Whatever is raised in here is raised as that layer's failure."""
    try:
        yield
    except Exception as error:
        raise LayerFailed(layer, f"{type(error).__name__}: {error}") from error


class WithLoss(nn.Module):
    """The last layer and the loss of what it makes; `output_bytes` are of the layer's output."""

    def __init__(self, layer: nn.Module, loss: Loss, targets: Any) -> None:
        super().__init__()
        self.layer, self.loss, self.targets = layer, loss, targets
        self.aimed: Any = None
        self.output_bytes = 0

    def forward(self, value: Any) -> Tensor:
        """The loss, by the targets that it is aimed at."""
        made = self.layer(value)
        self.output_bytes = bytes_of(
            [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        )
        return self.loss(made, self.aimed)


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Of their numbers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class Passes:
    """Times passes through some layers that follow each other.

    Attributes:
        modules: the layers.
        inner: whether something stands before them that wants a gradient.
        device: where they are.
        names: of the layers, for errors.
        company: who measures at the same time.
        stopwatch: of the device.
    """

    modules: Sequence[nn.Module]
    inner: bool
    device: torch.device
    names: Sequence[str]
    company: Company
    stopwatch: Stopwatch | None = None
    seconds: list[dict[Phase, list[float]]] = field(default_factory=list)
    output_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopwatch = self.stopwatch or stopwatch_for(self.device)
        # Work that is queued goes on during a call, so that events do not see how long it takes.
        queued = self.device.type == "cuda"
        self._call_s = 0.0 if queued else _backward_call_s(self._stopwatch)
        # Whether a layer changes what it is given, which autograd forbids on a leaf. Not known
        # before it has run once.
        self._changes = [True] * len(self.modules)

    def run(self, value: Any, repeats: int) -> Any:
        """Warm up, then time `repeats` passes, more of short ones; returns what the layers make of
        `value`.
        """
        started = time.perf_counter()
        _, made = self._pass(value)
        wanted = repeats if time.perf_counter() - started > _SHORT_S else 3 * repeats
        self.company.begin()
        rows = [self._pass(value)[0] for _ in range(wanted)]
        while not self.company.done():
            self._pass(value)
        self.seconds = [
            {phase: [row[phase][i] for row in rows] for phase in PHASES}
            for i in range(len(self.modules))
        ]
        return made

    def value_behind(self, value: Any) -> Any:
        """What the layers make of `value`, untimed."""
        with torch.no_grad():
            for index, module in enumerate(self.modules):
                with named_failure(self.names[index]):
                    value = module(value)
        return value

    def _pass(self, value: Any) -> tuple[dict[Phase, list[float]], Any]:
        """Forward and whole backward; then forward again and the backward in two parts."""
        forward: list[Span] = []
        self.drop_gradients()
        steps, made = self._forward(value, forward)
        backward = self._backward(steps, self._whole)
        self.drop_gradients()
        steps, _ = self._forward(value, [])
        inputs = self._backward(steps, self._input_grad)
        weights = self._weight_grads(steps)
        seconds = self._stopwatch.seconds
        return {
            "forward": seconds(forward),
            # A rank calls autograd once for all layers of a stage, not once for each.
            "backward": [max(whole - self._call_s, 0.0) for whole in seconds(backward)],
            "input_grad": seconds(inputs),
            "weight_grad": seconds(weights),
        }, made

    def drop_gradients(self) -> None:
        """Let the next backward make all gradients of weights anew."""
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None

    def _forward(self, value: Any, spans: list[Span]) -> tuple[list[_Step], Any]:
        steps = []
        self.output_bytes = []
        for index, module in enumerate(self.modules):
            with named_failure(self.names[index]):
                given, leaves, copies = _leaves(
                    value, self.inner or index > 0, self._changes[index]
                )
                start = self._stopwatch.mark()
                value = module(given)
                spans.append((start, self._stopwatch.mark()))
                self._changes[index] = any(copy._version for copy in copies)
                made = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
                sent = module.output_bytes if isinstance(module, WithLoss) else bytes_of(made)
                self.output_bytes.append(sent)
                steps.append(_Step(leaves, made))
        return steps, pytree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value
        )

    def _backward(
        self,
        steps: list[_Step],
        work: Callable[[_Step, list[Tensor], list[Tensor]], list[Tensor | None]],
    ) -> list[Span]:
        """Marks around one kind of work, layer by layer from the last; each is given what the one
        behind it has made.
        """
        spans: list[Span] = [(None, None)] * len(steps)
        arriving: Sequence[Tensor | None] = [None] * len(steps[-1].made) if steps else []
        for index in reversed(range(len(steps))):
            step = steps[index]
            with named_failure(self.names[index]):
                pairs = [
                    (root, grad)
                    for root, grad in zip(step.made, arriving, strict=True)
                    if root.requires_grad
                ]
                roots = [root for root, _ in pairs]
                grads = [torch.ones_like(root) if grad is None else grad for root, grad in pairs]
                start = self._stopwatch.mark()
                found = iter(work(step, roots, grads))
                spans[index] = start, self._stopwatch.mark()
                arriving = [None if leaf is None else next(found, None) for leaf in step.given]
                step.given.clear()
        return spans

    def _weight_grads(self, steps: list[_Step]) -> list[Span]:
        """Marks around the weight part, after the input part of all layers, as a rank has it."""
        spans: list[Span] = [(None, None)] * len(steps)
        for index in reversed(range(len(steps))):
            with named_failure(self.names[index]):
                start = self._stopwatch.mark()
                weight_grad(steps[index].pending)
                spans[index] = start, self._stopwatch.mark()
        return spans

    @staticmethod
    def _whole(step: _Step, roots: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        if roots:
            torch.autograd.backward(roots, grads)
        step.made.clear()
        return [leaf.grad for leaf in step.leaves]

    @staticmethod
    def _input_grad(step: _Step, roots: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        found, step.pending = input_grad(roots, grads, step.leaves)
        step.made.clear()
        return found


def now(device: torch.device) -> float:
    """Seconds on the clock when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _backward_call_s(stopwatch: Stopwatch) -> float:
    """Seconds of a backward through nothing, on the CPU."""
    leaf = torch.zeros(1, requires_grad=True)
    grad, spans = torch.ones_like(leaf), []
    for _ in range(20):
        root = leaf.view_as(leaf)
        start = stopwatch.mark()
        torch.autograd.backward([root], [grad])
        spans.append((start, stopwatch.mark()))
        leaf.grad = None
    return statistics.median(stopwatch.seconds(spans))


def _leaves(
    value: Any, wants_grad: bool, copied: bool
) -> tuple[Any, list[Tensor | None], list[Tensor]]:
    """`value` cut off from what made it: itself, copied if asked; its tensors as leaves, None for
    those that want no gradient; and the copies.
    """
    flat, spec = pytree.tree_flatten(value)
    leaves: list[Tensor | None] = []
    made: list[Any] = []
    copies: list[Tensor] = []
    for item in flat:
        if not isinstance(item, Tensor):
            made.append(item)
            continue
        leaf = item.detach()
        wanted = wants_grad and leaf.is_floating_point()
        leaves.append(leaf.requires_grad_() if wanted else None)
        if copied:
            leaf = leaf.clone()
            copies.append(leaf)
        made.append(leaf)
    return pytree.tree_unflatten(made, spec), leaves, copies
