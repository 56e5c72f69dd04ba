"""Timed passes through a chain: forward layer by layer, then backward, as a rank runs its stage.

A layer that is run repeatedly by itself finds its input and its weights in the cache, and the
allocator returns the blocks that it has just freed. In training it does not: the other layers have
run in between. So layers are timed in their place in the chain. Gradients of weights are new
tensors, as those of a batch's first micro-batch; accumulation for the others is measured
separately.
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
from penstock.measure.example_samples import tensors_in
from penstock.measure.stopwatch import Stopwatch, stopwatch_for
from penstock.profile.profile import Phase

PHASES: tuple[Phase, ...] = ("forward", "backward", "input_grad", "weight_grad")

Loss = Callable[[Any, Any], Tensor]
#: Marks of a stopwatch before and after one layer's work.
Span = tuple[Any, Any]


@dataclass(frozen=True)
class PassSeconds:
    """What one pass took.

    Attributes:
        by_phase: per phase, the seconds of each layer.
        host: of forward and backward, the host's seconds of each layer; empty where the host does
            the work.
    """

    by_phase: dict[Phase, list[float]]
    host: dict[str, list[float]]


@dataclass
class _Step:
    """One layer's forward.

    inputs: its input tensors as leaves, None for those that get no gradient.
    outputs: its output tensors.
    pending: weight gradients to compute later.
    """

    inputs: list[Tensor | None]
    outputs: list[Tensor]
    pending: PendingWeights = field(default_factory=PendingWeights)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get an input gradient."""
        return [leaf for leaf in self.inputs if leaf is not None]


@contextmanager
def named_failure(layer: str) -> Iterator[None]:
    """Raise any error inside as a failure of that layer."""
    try:
        yield
    except Exception as error:
        raise LayerFailed(layer, f"{type(error).__name__}: {error}") from error


class WithLoss(nn.Module):
    """The last layer followed by the loss; `output_bytes` are those of the layer's output.

    Set `current_targets` before every forward.
    """

    def __init__(self, layer: nn.Module, loss: Loss, targets: Any) -> None:
        super().__init__()
        self.layer, self.loss, self.targets = layer, loss, targets
        self.current_targets: Any = None
        self.output_bytes = 0

    def forward(self, value: Any) -> Tensor:
        """Return the loss for the current targets."""
        output = self.layer(value)
        self.output_bytes = bytes_of(tensors_in(output))
        return self.loss(output, self.current_targets)


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the total bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class TimedPasses:
    """Times passes through some consecutive layers.

    Attributes:
        modules: the layers.
        inner: whether a layer before them needs an input gradient.
        device: of the layers.
        names: of the layers, for errors.
        stopwatch: of the device.
        output_bytes: per layer, of its last output.
    """

    modules: Sequence[nn.Module]
    inner: bool
    device: torch.device
    names: Sequence[str]
    stopwatch: Stopwatch | None = None
    output_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Measure the overhead of a call of autograd."""
        self._stopwatch = self.stopwatch or stopwatch_for(self.device)
        # On CUDA queued work continues during a call, so that events do not contain its overhead.
        has_queue = self.device.type == "cuda"
        self._call_s = 0.0 if has_queue else _backward_call_s(self._stopwatch)
        # Whether a layer changes its input in place, which autograd forbids on a leaf. Assumed
        # until it has run once.
        self._changes_input = [True] * len(self.modules)

    def output_for(self, value: Any) -> Any:
        """Return the output of the layers for `value`, untimed."""
        with torch.no_grad():
            for index, module in enumerate(self.modules):
                with named_failure(self.names[index]):
                    value = module(value)
        return value

    def run(self, value: Any) -> PassSeconds:
        """Run forward and whole backward; then forward again and the backward in two parts.

        The first run of an object also finds out which layers change their inputs: warm up.
        """
        forward: list[Span] = []
        self.drop_gradients()
        backward = self._backward(self._forward(value, forward), self._whole)
        self.drop_gradients()
        steps = self._forward(value, [])
        inputs = self._backward(steps, self._input_grad)
        weights = self._weight_grads(steps)
        seconds = self._stopwatch.seconds
        by_phase: dict[Phase, list[float]] = {
            "forward": seconds(forward),
            # A rank calls autograd once for all layers of a stage, not once for each.
            "backward": [max(whole - self._call_s, 0.0) for whole in seconds(backward)],
            "input_grad": seconds(inputs),
            "weight_grad": seconds(weights),
        }
        host_seconds = self._stopwatch.host_seconds
        host = {"forward": host_seconds(forward), "backward": host_seconds(backward)}
        return PassSeconds(by_phase, {phase: times for phase, times in host.items() if times})

    def drop_gradients(self) -> None:
        """Delete all gradients of weights, so that the next backward creates new ones."""
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None

    def _forward(self, value: Any, spans: list[Span]) -> list[_Step]:
        """Run all layers, append their marks to `spans`, and return the steps."""
        steps = []
        self.output_bytes = []
        for index, module in enumerate(self.modules):
            with named_failure(self.names[index]):
                needs_grad = self.inner or index > 0
                inputs, leaves, copies = _leaves(value, needs_grad, self._changes_input[index])
                start = self._stopwatch.mark()
                value = module(inputs)
                spans.append((start, self._stopwatch.mark()))
                # torch counts the changes in place of a tensor in `_version`.
                self._changes_input[index] = any(copy._version for copy in copies)
                outputs = tensors_in(value)
                # What leaves the layer is its output, not the loss.
                sent = module.output_bytes if isinstance(module, WithLoss) else bytes_of(outputs)
                self.output_bytes.append(sent)
                steps.append(_Step(leaves, outputs))
        return steps

    def _backward(
        self,
        steps: list[_Step],
        work: Callable[[_Step, list[Tensor], list[Tensor]], list[Tensor | None]],
    ) -> list[Span]:
        """Return the marks around one kind of work, layer by layer from the last.

        Each layer receives the gradients that the one behind it has computed.
        """
        spans: list[Span] = [(None, None)] * len(steps)
        received: Sequence[Tensor | None] = [None] * len(steps[-1].outputs) if steps else []
        for index in reversed(range(len(steps))):
            step = steps[index]
            with named_failure(self.names[index]):
                pairs = [
                    (root, grad)
                    for root, grad in zip(step.outputs, received, strict=True)
                    if root.requires_grad
                ]
                roots = [root for root, _ in pairs]
                grads = [torch.ones_like(root) if grad is None else grad for root, grad in pairs]
                start = self._stopwatch.mark()
                input_grads = iter(work(step, roots, grads))
                spans[index] = start, self._stopwatch.mark()
                received = [
                    None if leaf is None else next(input_grads, None) for leaf in step.inputs
                ]
                step.inputs.clear()
        return spans

    def _weight_grads(self, steps: list[_Step]) -> list[Span]:
        """Return the marks around the weight parts, which a rank runs after all input parts."""
        spans: list[Span] = [(None, None)] * len(steps)
        for index in reversed(range(len(steps))):
            with named_failure(self.names[index]):
                start = self._stopwatch.mark()
                weight_grad(steps[index].pending)
                spans[index] = start, self._stopwatch.mark()
        return spans

    @staticmethod
    def _whole(step: _Step, roots: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        """Run a layer's whole backward; return the gradients of its inputs."""
        if roots:
            torch.autograd.backward(roots, grads)
        step.outputs.clear()
        return [leaf.grad for leaf in step.leaves]

    @staticmethod
    def _input_grad(step: _Step, roots: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        """Run the input part of a layer's backward; return the gradients of its inputs."""
        input_grads, step.pending = input_grad(roots, grads, step.leaves)
        step.outputs.clear()
        return input_grads


def now(device: torch.device) -> float:
    """Return the clock's seconds, after the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _backward_call_s(stopwatch: Stopwatch) -> float:
    """Return the seconds of an empty backward on the CPU."""
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
    value: Any, needs_grad: bool, copy: bool
) -> tuple[Any, list[Tensor | None], list[Tensor]]:
    """Detach a layer's input from the layers before it.

    Args:
        value: the input.
        needs_grad: whether its floating-point tensors need a gradient.
        copy: whether the layer gets copies of its tensors.

    Returns:
        The input; its tensors as leaves, None for those without a gradient; and the copies.
    """
    flat, spec = pytree.tree_flatten(value)
    leaves: list[Tensor | None] = []
    inputs: list[Any] = []
    copies: list[Tensor] = []
    for entry in flat:
        if not isinstance(entry, Tensor):
            inputs.append(entry)
            continue
        tensor = entry.detach()
        if needs_grad and tensor.is_floating_point():
            leaves.append(tensor.requires_grad_())
        else:
            leaves.append(None)
        if copy:
            tensor = tensor.clone()
            copies.append(tensor)
        inputs.append(tensor)
    return pytree.tree_unflatten(inputs, spec), leaves, copies
