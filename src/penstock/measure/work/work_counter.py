"""Count the work of a model, layer by layer, without computing it, on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import SettingError
from penstock.grad.split import input_grad, weight_grad
from penstock.measure.example_samples import bytes_per_sample, checked_tensors, tensors_in
from penstock.measure.saved_storages import ActivationBytes, activation_bytes
from penstock.measure.timed_passes import Loss, WithLoss, bytes_of, named_failure
from penstock.measure.work.layer_signature import Signature, layer_signature, value_signature
from penstock.measure.work.op_work import OpWork, op_work
from penstock.measure.work.work_lines import SIZES, fit_lines
from penstock.profile.counts import LayerCounts, ModelCounts
from penstock.tracing.traced_chain import TracedChain, chain

_PHASES = ("forward", "backward", "input_grad", "weight_grad")


@final
@dataclass(frozen=True)
class _CountedLayer:
    """The ops of a layer by phase, and the bytes of its output, for one number of samples."""

    phases: dict[str, list[OpWork]]
    output_bytes: int


def count(
    model: TracedChain | nn.Module | Sequence[nn.Module],
    example: Any,
    batch: int | None = None,
    *,
    loss: Loss | None = None,
    targets: Any = None,
) -> ModelCounts:
    """Count the work of every layer in each phase (operations, bytes and launches), and its bytes.

    All layers run on fake CPU tensors: no number is computed and no memory allocated, so that a
    model of any size is counted in seconds. Phases and bytes are those of `penstock.profile`,
    except for what recurrent layers save internally (see `op_work`). The model is left unchanged.

    Args:
        model: a chain, or anything that `chain` accepts; also on the meta device.
        example: inputs of the model, any number of samples in their first dimension, on any device.
        batch: samples of a batch. By default the number in `example`.
        loss, targets: as in training; the loss's cost is added to the last layer. Any number of
            targets.

    Raises:
        SettingError: the batch is below 1, or the example has no samples.
        LayerFailed: a layer raised an error, for example because it reads values.
    """
    traced = model if isinstance(model, TracedChain) else chain(model)
    tensors = checked_tensors(example)
    batch = int(tensors[0].shape[0]) if batch is None else batch
    if batch < 1:
        raise SettingError(f"batch {batch} must be 1 or more")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    modules = _fake_copies(traced, mode)
    if loss is not None:
        modules[-1] = WithLoss(modules[-1], loss, targets)
    with mode, torch.enable_grad():
        signatures = [layer_signature(module) for module in modules]
        small_layers, large_layers = (
            _count_size(traced, modules, signatures, example, size) for size in SIZES
        )
        inputs = _fake_inputs(modules, example, SIZES[-1])
        activations = activation_bytes(
            modules,
            inputs,
            # Fake tensors have no memory whose address could identify them.
            lambda tensor: tensor.untyped_storage()._cdata,
            lambda index, value: (signatures[index], value_signature(value)),
        )
    layers = []
    for index, (small, large) in enumerate(zip(small_layers, large_layers, strict=True)):
        layers.append(_layer_counts(traced, index, small, large, activations[index]))
    floats = [leaf for leaf in tensors if leaf.is_floating_point()]
    return ModelCounts(
        tuple(layers),
        traced.fingerprint,
        bytes_per_sample(tensors),
        bytes_per_sample(floats),
        batch,
        _weight_width(traced),
        torch.__version__,
    )


def _count_size(
    traced: TracedChain,
    modules: Sequence[nn.Module],
    signatures: Sequence[Signature],
    example: Any,
    size: int,
) -> list[_CountedLayer]:
    """Return the counts of every layer for `size` samples.

    Equal layers with equal inputs are counted once.
    """
    value = _fake_inputs(modules, example, size)
    counted: dict[object, tuple[dict[str, list[OpWork]], Any]] = {}
    layers = []
    for index, module in enumerate(modules):
        key = index > 0, signatures[index], value_signature(value)
        if key not in counted:
            with named_failure(traced.layers[index].name):
                counted[key] = _count_layer(module, value, inner=index > 0)
        phases, value = counted[key]
        if isinstance(module, WithLoss):
            output_bytes = module.output_bytes
        else:
            output_bytes = bytes_of(tensors_in(value))
        layers.append(_CountedLayer(phases, output_bytes))
    return layers


def _weight_width(traced: TracedChain) -> int:
    """Return the bytes per element of the trainable weights with the widest type."""
    widths = (
        fact.bytes // max(torch.Size(fact.shape).numel(), 1)
        for fact in traced.description.tensors
        if fact.trainable
    )
    return max(widths, default=4)


@final
class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Records the cost of every op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[OpWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and record its cost."""
        out = func(*args, **(kwargs or {}))
        self.works += op_work(func, args, kwargs or {}, out)
        return out


def _count_ops(run: Callable[[], Any]) -> tuple[Any, list[OpWork]]:
    """Return the result of a function and the cost of its ops."""
    with _Counter() as counter:
        result = run()
    return result, counter.works


def _fake_copies(traced: TracedChain, mode: FakeTensorMode) -> list[nn.Module]:
    """Return copies of all layers in training mode, with fake weights.

    Tensors that are shared by several layers remain shared.
    """
    tensors: list[Tensor] = []
    for module in traced.modules:
        tensors += (*module.parameters(), *module.buffers())
    for module in traced.modules:
        for part in module.modules():
            tensors += (value for value in vars(part).values() if isinstance(value, Tensor))
    # `deepcopy` takes what its memo has for a tensor, so that nothing is copied.
    fakes: dict[int, object] = {}
    with mode:
        for tensor in tensors:
            if id(tensor) in fakes:
                continue
            fake: Tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            fakes[id(tensor)] = fake
    return [module.train() for module in copy.deepcopy(nn.ModuleList(traced.modules), fakes)]


def _fake_samples(example: Any, size: int) -> Any:
    """Return fake tensors like the example, with `size` samples."""

    def resize(leaf: Tensor) -> Tensor:
        """Return a fake tensor with `size` samples."""
        return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device="cpu")

    return pytree.tree_map_only(Tensor, resize, example)


def _fake_inputs(modules: Sequence[nn.Module], example: Any, size: int) -> Any:
    """Return fake samples; if there is a loss, give it as many targets."""
    if isinstance(modules[-1], WithLoss):
        modules[-1].current_targets = _fake_samples(modules[-1].targets, size)
    return _fake_samples(example, size)


def _count_layer(
    module: nn.Module, value: Any, *, inner: bool
) -> tuple[dict[str, list[OpWork]], Any]:
    """Return one layer's phases and its output; the first layer needs no input gradient.

    Args:
        module: the layer.
        value: its input.
        inner: whether a layer comes before it.
    """
    inputs, _ = _detached_inputs(value, needs_grad=inner)
    output, forward = _count_ops(lambda: module(inputs))
    roots = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
    grads: list[Tensor | None] = [torch.ones_like(root) for root in roots]
    _, backward = _count_ops(lambda: torch.autograd.backward(roots, grads) if roots else None)
    # The backward has freed the graph: the split one is counted on another.
    inputs, leaves = _detached_inputs(value, needs_grad=inner)
    roots = [leaf for leaf in tensors_in(module(inputs)) if leaf.requires_grad]
    (_, pending), input_ops = _count_ops(lambda: input_grad(roots, grads, leaves))
    _, weight_ops = _count_ops(lambda: weight_grad(pending))
    for parameter in module.parameters():
        parameter.grad = None
    detached = pytree.tree_map_only(Tensor, Tensor.detach, output)
    phases = {
        "forward": forward,
        "backward": backward,
        "input_grad": input_ops,
        "weight_grad": weight_ops,
    }
    return phases, detached


def _detached_inputs(value: Any, *, needs_grad: bool) -> tuple[Any, list[Tensor]]:
    """Return a copy of a layer's input, and its tensors that need a gradient as leaves."""
    leaves: list[Tensor] = []

    def detach(leaf: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        detached = leaf.detach()
        if needs_grad and detached.is_floating_point():
            leaves.append(detached.requires_grad_())
        return detached.clone()  # layers may work in place, which autograd forbids on a leaf

    return pytree.tree_map_only(Tensor, detach, value), leaves


def _layer_counts(
    traced: TracedChain,
    index: int,
    small: _CountedLayer,
    large: _CountedLayer,
    activations: ActivationBytes,
) -> LayerCounts:
    """Return the counts of one layer.

    Args:
        traced: the chain.
        index: of the layer.
        small, large: its counts at either of `SIZES`.
        activations: its bytes at the larger size.
    """
    layer, weights = traced.layers[index], traced.description.weights[index]
    reserve_bytes = sum(work.reserve_bytes for work in large.phases["forward"])
    fields: dict[str, Any] = dict(vars(weights))
    for phase in _PHASES:
        fields[phase] = fit_lines(small.phases[phase], large.phases[phase])
    samples = SIZES[-1]
    return LayerCounts(
        name=layer.name,
        kind=layer.kind,
        activation_bytes_per_sample=(activations.saved + reserve_bytes) / samples,
        output_bytes_per_sample=large.output_bytes / samples,
        entry_bytes_per_sample=activations.entry / samples,
        **fields,
    )
