"""Count the work of a model, layer by layer, without computing it, on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import SettingError
from penstock.grad.saved_version import observing_saved_tensors
from penstock.grad.split import input_grad, weight_grad
from penstock.measure.example_samples import checked_tensors, tensors_in
from penstock.measure.op_work import OpWork, op_work
from penstock.measure.saved_storages import SavedStorages
from penstock.measure.timed_passes import Loss, WithLoss, bytes_of, named_failure
from penstock.profile.counts import LayerCounts, ModelCounts, Work
from penstock.tracing.traced_chain import TracedChain, chain

#: Micro-batch sizes at which ops are counted, to fit a line. Not 1: with a single sample, batch
#: norm may have nothing to normalise.
_SIZES = (2, 4)
_PHASES = ("forward", "backward", "input_grad", "weight_grad")
_Phases = dict[str, list[OpWork]]

#: A hashable key of a value or a layer; see `_signature`.
_Signature = object


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
        signatures = [_module_signature(module) for module in modules]
        runs = [_count_size(traced, modules, signatures, example, size) for size in _SIZES]
        value = _fake_inputs(modules, example, _SIZES[-1])
        saved_bytes, entry_bytes = _activation_bytes(modules, signatures, value)
    layers = []
    for index, ((small, _), (large, output_bytes)) in enumerate(zip(*runs, strict=True)):
        layer_bytes = (saved_bytes[index], output_bytes, entry_bytes[index])
        layers.append(_layer_counts(traced, index, (small, large), layer_bytes))
    floats = [leaf for leaf in tensors if leaf.is_floating_point()]
    return ModelCounts(
        tuple(layers),
        traced.fingerprint,
        _bytes_per_sample(tensors),
        _bytes_per_sample(floats),
        batch,
        _weight_width(traced),
        torch.__version__,
    )


def _count_size(
    traced: TracedChain,
    modules: Sequence[nn.Module],
    signatures: Sequence[_Signature],
    example: Any,
    size: int,
) -> list[tuple[_Phases, int]]:
    """Return the phases and the output bytes of every layer for `size` samples.

    Equal layers with equal inputs are counted once.
    """
    value = _fake_inputs(modules, example, size)
    counted: dict[object, tuple[_Phases, Any]] = {}
    layers = []
    for index, module in enumerate(modules):
        key = index > 0, signatures[index], _signature(value)
        if key not in counted:
            with named_failure(traced.layers[index].name):
                counted[key] = _count_layer(module, value, inner=index > 0)
        phases, value = counted[key]
        if isinstance(module, WithLoss):
            output_bytes = module.output_bytes
        else:
            output_bytes = bytes_of(tensors_in(value))
        layers.append((phases, output_bytes))
    return layers


def _bytes_per_sample(tensors: Sequence[Tensor]) -> float:
    """Return the bytes of tensors for one sample of their first dimension."""
    return sum(leaf.numel() * leaf.element_size() / leaf.shape[0] for leaf in tensors)


def _weight_width(traced: TracedChain) -> int:
    """Return the bytes of a number of the weights, of the widest."""
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


def _count_layer(module: nn.Module, value: Any, *, inner: bool) -> tuple[_Phases, Any]:
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


def _signature(value: Any) -> _Signature:
    """Return a key that is equal for values that a layer cannot distinguish by shapes.

    Values of unknown types get a key of their own.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_signature, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_signature, value))
    if isinstance(value, dict):
        return type(value), tuple((key, _signature(entry)) for key, entry in value.items())
    if isinstance(value, (bool, int, float, str, torch.dtype, type(None))):
        return value
    return "only", id(value)


def _module_signature(module: nn.Module) -> _Signature:
    """Return a key that is equal for layers that do the same.

    With it a transformer's blocks are counted once.
    """
    # Which of its tensors are identical is part of what a layer is: number them by identity.
    numbers: dict[int, int] = {}
    parts = []
    for name, part in module.named_modules(remove_duplicate=False):
        tensors = []
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                number = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
                tensors.append((key, _signature(tensor), number))
        settings = tuple(
            (key, _signature(value))
            for key, value in vars(part).items()
            if key not in ("_parameters", "_buffers", "_modules")
        )
        parts.append((name, type(part), tuple(tensors), settings))
    return tuple(parts)


def _activation_bytes(
    modules: Sequence[nn.Module], signatures: Sequence[_Signature], value: Any
) -> tuple[list[int], list[int]]:
    """Return per layer the bytes saved for its backward, and those it saves as a first layer.

    Each storage counts at the first layer that saves it. A stage that begins with a layer also
    saves its input, unless that counts at this layer or a later one.
    """
    # Fake tensors have no memory whose address could identify them.
    saved = SavedStorages(modules, lambda tensor: tensor.untyped_storage()._cdata)
    inputs: list[list[Tensor]] = []
    keys: list[object] = []
    repeated: dict[int, int] = {}
    with observing_saved_tensors(saved.add):
        for index, module in enumerate(modules):
            keys.append((signatures[index], _signature(value)))
            if len(keys) > 2 and keys[-1] == keys[-2] == keys[-3]:
                # The input is the output of an equal layer, which itself followed an equal one: so
                # this layer saves as much as that one.
                saved.counts[index], repeated[index] = saved.counts[index - 1], index - 1
                inputs.append([])
                continue
            saved.layer = index
            inputs.append(tensors_in(value))
            value = module(value)
    entries = [saved.entry_bytes(index, row) for index, row in enumerate(inputs)]
    for index, previous in repeated.items():
        entries[index] = entries[previous]
    return saved.counts, entries


def _lines(small: list[OpWork], large: list[OpWork]) -> tuple[Work, ...]:
    """Fit a line through both sizes for every op, and merge equal ops."""
    if [work.op for work in small] != [work.op for work in large]:
        # The layer runs different code for different sizes: add its ops up by name.
        names = dict.fromkeys(work.op for work in (*small, *large))
        small = [_sum_of(name, small) for name in names]
        large = [_sum_of(name, large) for name in names]
    low, high = _SIZES
    repeats: dict[Work, int] = {}
    for at_low, at_high in zip(small, large, strict=True):
        flops_per_sample = max((at_high.flops - at_low.flops) / (high - low), 0.0)
        bytes_per_sample = max((at_high.bytes - at_low.bytes) / (high - low), 0.0)
        line = Work(
            at_high.op,
            at_high.family,
            at_high.launches,
            at_high.flops - high * flops_per_sample,
            flops_per_sample,
            at_high.bytes - high * bytes_per_sample,
            bytes_per_sample,
        )
        repeats[line] = repeats.get(line, 0) + 1
    return tuple(_multiply(work, count) for work, count in repeats.items())


def _multiply(work: Work, count: int) -> Work:
    """Return `count` equal ops as one."""
    return replace(
        work,
        launches=count * work.launches,
        flops=count * work.flops,
        flops_per_sample=count * work.flops_per_sample,
        bytes=count * work.bytes,
        bytes_per_sample=count * work.bytes_per_sample,
    )


def _sum_of(name: str, run: list[OpWork]) -> OpWork:
    """Return the work of all calls of one op in a run, as one."""
    works = [work for work in run if work.op == name]
    family = works[0].family if works else "other"
    return OpWork(
        name,
        family,
        max(sum(work.launches for work in works), 1),
        sum(work.flops for work in works),
        sum(work.bytes for work in works),
    )


def _layer_counts(
    traced: TracedChain,
    index: int,
    phases: tuple[_Phases, _Phases],
    layer_bytes: tuple[int, int, int],
) -> LayerCounts:
    """Return the counts of one layer.

    Args:
        traced: the chain.
        index: of the layer.
        phases: its ops by phase, at both sizes.
        layer_bytes: its activations, output and entry at the larger size.
    """
    layer, weights = traced.layers[index], traced.description.weights[index]
    small, large = phases
    saved_bytes, output_bytes, entry_bytes = layer_bytes
    saved_bytes += sum(work.reserve_bytes for work in large["forward"])
    works = {phase: _lines(small[phase], large[phase]) for phase in _PHASES}
    return LayerCounts(
        name=layer.name,
        kind=layer.kind,
        parameters=weights.parameters,
        parameter_bytes=weights.parameter_bytes,
        buffer_bytes=weights.buffer_bytes,
        tensor_bytes=weights.tensor_bytes,
        tied_tensors=weights.tied_tensors,
        activation_bytes_per_sample=saved_bytes / _SIZES[-1],
        output_bytes_per_sample=output_bytes / _SIZES[-1],
        entry_bytes_per_sample=entry_bytes / _SIZES[-1],
        **works,
    )
