"""Count what a model does, layer by layer, without doing it: fake tensors have shapes and no
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import SettingError
from penstock.grad.saved import looking_at_saved
from penstock.grad.split import input_grad, weight_grad
from penstock.measure.op_work import OpWork, op_work
from penstock.measure.passes import Loss, WithLoss, bytes_of, named_failure
from penstock.profile.counts import LayerCounts, ModelCounts, Work
from penstock.tracing.chain import TracedChain, chain

#: Samples at which everything is counted: two points make a line. Of one sample, batch norm may
#: have nothing to normalise.
_SIZES = (2, 4)
_PHASES = ("forward", "backward", "input_grad", "weight_grad")
_Phases = dict[str, list[OpWork]]


def count(
    model: TracedChain | nn.Module | Sequence[nn.Module],
    example: Any,
    batch: int | None = None,
    *,
    loss: Loss | None = None,
    targets: Any = None,
) -> ModelCounts:
    """Count the work of every layer in each phase: operations, bytes and launches; and its bytes.

    Everything runs on fake tensors of the CPU: no number is computed and no memory taken, so that a
    model of any size is counted in seconds. Phases and bytes are those of `penstock.profile`, but
    for what recurrent layers keep inside (see `op_work`). The model is left as it was.

    Args:
        model: a chain, or anything that `chain` takes; on the meta device too.
        example: inputs of the model, any number of samples in their first dimension, on any device.
        batch: samples of a batch. By default as many as `example` has.
        loss, targets: as training has them; what the loss takes then counts with the last layer.
        Targets of any number of samples.

    Raises:
        SettingError: the batch is below 1, or the example has no samples.
        LayerFailed: a layer raised, for example because it looks at values.
    """
    traced = model if isinstance(model, TracedChain) else chain(model)
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dim() == 0 or tensor.shape[0] == 0 for tensor in tensors):
        raise SettingError(
            "the example must be tensors with at least one sample in their first dimension"
        )
    batch = int(tensors[0].shape[0]) if batch is None else batch
    if batch < 1:
        raise SettingError(f"batch {batch} must be 1 or more")
    runs: list[list[_Phases]] = [[] for _ in traced.modules]
    outputs: list[int] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    modules = _fake_copies(traced, mode)
    if loss is not None:
        modules[-1] = WithLoss(modules[-1], loss, targets)
    with mode, torch.enable_grad():
        alike = [_likeness(module) for module in modules]
        for size in _SIZES:
            value = _aimed(modules, example, size)
            outputs, done = [], {}
            for index, module in enumerate(modules):
                same = index > 0, alike[index], _look(value)
                if same not in done:
                    with named_failure(traced.layers[index].name):
                        done[same] = _count_layer(module, value, inner=index > 0)
                phases, value = done[same]
                runs[index].append(phases)
                outputs.append(
                    module.output_bytes
                    if isinstance(module, WithLoss)
                    else bytes_of(_tensors(value))
                )
        kept, entries = _activation_bytes(modules, alike, _aimed(modules, example, _SIZES[-1]))
        kept = [
            each + sum(work.reserve_bytes for work in run[-1]["forward"])
            for each, run in zip(kept, runs, strict=True)
        ]
    works = [
        {phase: _lines(small[phase], large[phase]) for phase in _PHASES} for small, large in runs
    ]
    rows = ([held / _SIZES[-1] for held in row] for row in (kept, outputs, entries))
    layers = _layers(traced, works, *rows)
    all_bytes, float_bytes = (
        sum(leaf.numel() * leaf.element_size() / leaf.shape[0] for leaf in found)
        for found in (tensors, [leaf for leaf in tensors if leaf.is_floating_point()])
    )
    return ModelCounts(
        layers, traced.fingerprint, all_bytes, float_bytes, batch, _width(traced), torch.__version__
    )


def _width(traced: TracedChain) -> int:
    """Bytes of a number of the weights; of the widest."""
    widths = (
        fact.bytes // max(torch.Size(fact.shape).numel(), 1)
        for fact in traced.description.tensors
        if fact.trainable
    )
    return max(widths, default=4)


@final
class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Writes down what every op costs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[OpWork] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found += op_work(func, args, kwargs or {}, out)
        return out


def _counted(run: Callable[[], Any]) -> tuple[Any, list[OpWork]]:
    with _Counter() as counter:
        result = run()
    return result, counter.found


def _fake_copies(traced: TracedChain, mode: FakeTensorMode) -> list[nn.Module]:
    """All layers in training mode, apart from the user's own, with fake weights; what was shared is
    shared.
    """
    fakes: dict[int, object] = {}
    held = [
        tensor for module in traced.modules for tensor in (*module.parameters(), *module.buffers())
    ]
    parts = (part for module in traced.modules for part in module.modules())
    held += [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]
    with mode:
        for tensor in held:
            if id(tensor) not in fakes:
                fake: Tensor = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
                fakes[id(tensor)] = (
                    nn.Parameter(fake, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else fake
                )
    return [module.train() for module in copy.deepcopy(nn.ModuleList(traced.modules), fakes)]


def _fake_samples(example: Any, size: int) -> Any:
    return pytree.tree_map(
        lambda leaf: (
            torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device="cpu")
            if isinstance(leaf, Tensor)
            else leaf
        ),
        example,
    )


def _aimed(modules: Sequence[nn.Module], example: Any, size: int) -> Any:
    """Fake samples; the loss, if there is one, gets as many targets."""
    if isinstance(modules[-1], WithLoss):
        modules[-1].aimed = _fake_samples(modules[-1].targets, size)
    return _fake_samples(example, size)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _count_layer(module: nn.Module, value: Any, *, inner: bool) -> tuple[_Phases, Any]:
    """One layer's phases, and what it makes. The first layer of the chain needs no input gradient."""

    def given() -> tuple[Any, list[Tensor]]:
        leaves: list[Tensor] = []

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = leaf.detach()
            if inner and made.is_floating_point():
                leaves.append(made.requires_grad_())
            return made.clone()  # layers may work in place, which autograd forbids on a leaf

        return pytree.tree_map(copied, value), leaves

    inputs, _ = given()
    output, forward = _counted(lambda: module(inputs))
    roots = [leaf for leaf in _tensors(output) if leaf.requires_grad]
    grads: list[Tensor | None] = [torch.ones_like(root) for root in roots]
    _, backward = _counted(lambda: torch.autograd.backward(roots, grads) if roots else None)
    inputs, leaves = given()
    roots = [leaf for leaf in _tensors(module(inputs)) if leaf.requires_grad]
    (_, pending), first = _counted(lambda: input_grad(roots, grads, leaves))
    _, second = _counted(lambda: weight_grad(pending))
    for parameter in module.parameters():
        parameter.grad = None
    detached = pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output
    )
    return {
        "forward": forward,
        "backward": backward,
        "input_grad": first,
        "weight_grad": second,
    }, detached


def _look(value: Any) -> object:
    """What two values or settings have in common if a layer cannot tell them apart by shapes; its
    own object for what may differ.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_look(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_look(item) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, _look(item)) for key, item in value.items())
    return (
        value
        if isinstance(value, (bool, int, float, str, torch.dtype, type(None)))
        else ("only", id(value))
    )


def _likeness(module: nn.Module) -> object:
    """Equal for layers that do the same: a transformer's blocks are counted once."""
    places: dict[
        int, int
    ] = {}  # which of its tensors are one and the same is part of what a layer is
    parts = []
    for name, part in module.named_modules(remove_duplicate=False):
        own = vars(part)
        tensors = [
            (key, _look(held), None if held is None else places.setdefault(id(held), len(places)))
            for holder in (part._parameters, part._buffers)
            for key, held in holder.items()
        ]
        rest = tuple(
            (key, _look(value))
            for key, value in own.items()
            if key not in ("_parameters", "_buffers", "_modules")
        )
        parts.append((name, type(part), tuple(tensors), rest))
    return tuple(parts)


def _activation_bytes(
    modules: Sequence[nn.Module], alike: Sequence[object], value: Any
) -> tuple[list[int], list[int]]:
    """Per layer, bytes that autograd keeps for its backward, each storage at the first layer that
    keeps it; and what a stage that begins with the layer keeps besides: its input, unless it counts
    there or later.
    """
    # Storages are told apart by address, so all that were met stay alive meanwhile.
    own = [
        tensor.untyped_storage()
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    ]
    met = {storage._cdata: storage for storage in own}
    counted_at: dict[int, int] = {}
    inputs: list[list[Tensor]] = []
    counts = [0] * len(modules)
    same: list[object] = []
    repeated: dict[int, int] = {}
    layer = 0

    def add(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in met:
            met[storage._cdata] = storage
            counted_at[storage._cdata] = layer
            counts[layer] += storage.nbytes()

    with looking_at_saved(add):
        for index, module in enumerate(modules):
            same.append((alike[index], _look(value)))
            if len(same) > 2 and same[-1] == same[-2] == same[-3]:
                # What came in was made by a layer like this one, which came after another: this one
                # keeps what that kept.
                counts[index], repeated[index] = counts[index - 1], index - 1
                inputs.append([])
                continue
            layer = index
            inputs.append(_tensors(value))
            value = module(value)
    entries = [
        sum(
            tensor.nbytes
            for tensor in given
            if counted_at.get(tensor.untyped_storage()._cdata, -1) < index
        )
        for index, given in enumerate(inputs)
    ]
    for index, before in repeated.items():
        entries[index] = entries[before]
    return counts, entries


def _lines(small: list[OpWork], large: list[OpWork]) -> tuple[Work, ...]:
    """A straight line through both sizes for every op; equal ops in one."""
    if [work.op for work in small] != [work.op for work in large]:
        # The layer takes another way for another size: what it does most often is added up by the
        # op's name.
        names = dict.fromkeys(work.op for work in (*small, *large))
        small, large = ([_summed(name, run) for name in names] for run in (small, large))
    near, far = _SIZES
    lines: dict[Work, int] = {}
    for one, other in zip(small, large, strict=True):
        flops = max((other.flops - one.flops) / (far - near), 0.0)
        moved = max((other.bytes - one.bytes) / (far - near), 0.0)
        line = Work(
            other.op,
            other.family,
            other.launches,
            other.flops - far * flops,
            flops,
            other.bytes - far * moved,
            moved,
        )
        lines[line] = lines.get(line, 0) + 1
    return tuple(
        Work(
            work.op,
            work.family,
            work.launches * times,
            times * work.flops,
            times * work.flops_per_sample,
            times * work.bytes,
            times * work.bytes_per_sample,
        )
        for work, times in lines.items()
    )


def _summed(name: str, run: list[OpWork]) -> OpWork:
    found = [work for work in run if work.op == name]
    family = found[0].family if found else "other"
    return OpWork(
        name,
        family,
        max(sum(work.launches for work in found), 1),
        sum(work.flops for work in found),
        sum(work.bytes for work in found),
    )


def _layers(
    traced: TracedChain,
    works: list[dict[str, tuple[Work, ...]]],
    kept: list[float],
    outputs: list[float],
    entries: list[float],
) -> tuple[LayerCounts, ...]:
    layers = []
    for index, (layer, weights) in enumerate(
        zip(traced.layers, traced.description.weights, strict=True)
    ):
        layers.append(
            LayerCounts(
                name=layer.name,
                kind=layer.kind,
                parameters=weights.parameters,
                parameter_bytes=weights.parameter_bytes,
                buffer_bytes=weights.buffer_bytes,
                activation_bytes_per_sample=kept[index],
                output_bytes_per_sample=outputs[index],
                entry_bytes_per_sample=entries[index],
                **works[index],
            )
        )
    return tuple(layers)
