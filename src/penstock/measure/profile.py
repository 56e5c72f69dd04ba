"""Measure a model here, layer by layer, at several micro-batch sizes."""

from __future__ import annotations

import copy
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import LayerFailed, SettingError
from penstock.grad.split import input_grad, weight_grad
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.tracing.chain import TracedChain, chain
from penstock.tracing.materialise import materialise
from penstock.tracing.randomness import drawing

_PHASES = ("forward", "backward", "input_grad", "weight_grad")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Measured:
    """One layer at one size: repeats of each phase, and bytes."""

    seconds: dict[str, list[float]]
    output_bytes: int


def profile(
    model: TracedChain | nn.Module | Sequence[nn.Module],
    example: Any,
    batch: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = 5,
    threads: int | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Time every layer here and count its bytes.

    Each layer runs alone, on what the layers before it made of `example`: once or twice to warm up, then `repeats` times
    (more for very short layers); medians and interquartile ranges are kept. The model itself is left as it was: copies run. So are
    torch's random numbers.

    Args:
        model: a chain, or anything that `chain` takes; on the meta device too.
        example: inputs of the model, any number of samples in their first dimension; repeated to the sizes needed.
        batch: samples of a batch. By default as many as `example` has.
        sizes: micro-batch sizes to measure; by default a batch in 1, 4 and 16 parts, of 2 samples at least.
        repeats: timed runs of each phase.
        threads: torch threads meanwhile: what a rank will have. By default as many as now.
        device: where to measure, by default the CPU, or the GPU if there is one.
        progress: called with layers done, layers in all, and the layer's name.

    Raises:
        SettingError: batch, sizes, repeats or threads are below 1, or the example has no samples.
        LayerFailed: a layer raised; the message names it.
    """
    traced = model if isinstance(model, TracedChain) else chain(model)
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dim() == 0 or tensor.shape[0] == 0 for tensor in tensors):
        raise SettingError("the example must be tensors with at least one sample in their first dimension")
    batch = int(tensors[0].shape[0]) if batch is None else batch
    # Of one sample, batch norm may have nothing to normalise.
    measured_sizes = tuple(sorted(set(sizes or (max(min(2, batch), round(batch / parts)) for parts in (1, 4, 16)))))
    if measured_sizes[0] < 1 or batch < 1 or repeats < 1 or (threads is not None and threads < 1):
        raise SettingError(
            f"batch {batch}, sizes {list(measured_sizes)}, repeats {repeats} and threads {threads} must be 1 or more"
        )
    modules = _copies(traced, place)
    runs: list[list[_Measured]] = [[] for _ in modules]
    with _threads(threads), torch.enable_grad(), drawing(place):
        for number, size in enumerate(measured_sizes):
            value = _samples(example, size, place)
            for index, module in enumerate(modules):
                with _named_failure(traced, index):
                    measured, value = _measure_layer(module, value, index > 0, repeats, place)
                runs[index].append(measured)
                if progress is not None:
                    progress(number * len(modules) + index + 1, len(measured_sizes) * len(modules), traced.layers[index].name)
        kept = _activation_bytes(modules, _samples(example, measured_sizes[0], place))
        update = _update_seconds_per_byte(place)
        machine = machine_facts(place)
    layers = _layers(traced, measured_sizes, runs, [count / measured_sizes[0] for count in kept])
    input_bytes = sum(leaf.numel() * leaf.element_size() / leaf.shape[0] for leaf in tensors)
    return Profile(layers, traced.fingerprint, input_bytes, batch, machine, torch.__version__, update, device_name(place))


def device_name(device: torch.device) -> str:
    """What a profile calls the device: "cpu", or a GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_facts(device: torch.device) -> dict[str, str]:
    """What this machine is, for people who read a profile later."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    if device.type == "cuda":
        name = device_name(device)
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    return {"device": f"{device.type}: {name}", "cores": str(cores), "threads": str(threads), "system": platform.platform()}


def _copies(traced: TracedChain, device: torch.device) -> list[nn.Module]:
    """All layers with memory on the device, apart from the user's own, in training mode."""
    copied = TracedChain(traced.description, tuple(copy.deepcopy(nn.ModuleList(traced.modules))), traced.aliases)
    return [module.train() for module in materialise(copied, range(len(copied)), device, seed=0)]


def _samples(example: Any, size: int, device: torch.device) -> Any:
    """`example` repeated or cut to `size` samples."""

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf[torch.arange(size) % leaf.shape[0]].to(device)

    return pytree.tree_map(fit, example)


def _leaves(value: Any, wants_grad: bool) -> tuple[Any, list[Tensor]]:
    """A copy of `value`; and the leaves that its float tensors are copies of, if they want gradients."""
    flat, spec = pytree.tree_flatten(value)
    leaves: list[Tensor] = []
    made = []
    for item in flat:
        if isinstance(item, Tensor):
            leaf = item.detach()
            if wants_grad and leaf.is_floating_point():
                leaves.append(leaf.requires_grad_())
            made.append(leaf.clone())  # layers may work in place, which autograd forbids on a leaf
        else:
            made.append(item)
    return pytree.tree_unflatten(made, spec), leaves


def _roots(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _measure_layer(module: nn.Module, value: Any, inner: bool, repeats: int,
                   device: torch.device) -> tuple[_Measured, Any]:  # fmt: skip
    """Time one layer's phases; returns what it makes too. The first layer of the chain needs no input gradient."""
    seconds: dict[str, list[float]] = {phase: [] for phase in _PHASES}
    wanted, done, started = repeats, -1, time.perf_counter()
    output: Any = None
    while done < wanted:
        done += 1
        once = _run_once(module, value, inner, device)
        output = once.pop("output")
        if done == 0:
            # Short layers are noisy and cheap to repeat.
            wanted = repeats if time.perf_counter() - started > 0.01 else 3 * repeats
            continue
        for phase in _PHASES:
            seconds[phase].append(once[phase])
    detached = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
    counted = sum(t.numel() * t.element_size() for t in pytree.tree_leaves(detached) if isinstance(t, Tensor))
    return _Measured(seconds, counted), detached


def _run_once(module: nn.Module, value: Any, inner: bool, device: torch.device) -> dict[str, Any]:
    """Forward and whole backward; then forward again and the backward in two parts."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    times: dict[str, Any] = {}
    given, leaves = _leaves(value, inner)
    start = _now(device)
    output = module(given)
    times["forward"] = _now(device) - start
    roots = _roots(output)
    grads: list[Tensor | None] = [torch.ones_like(root) for root in roots]
    start = _now(device)
    if roots:
        torch.autograd.backward(roots, grads)
    times["backward"] = _now(device) - start
    given, leaves = _leaves(value, inner)
    roots = _roots(module(given))
    start = _now(device)
    _, pending = input_grad(roots, grads, leaves)
    times["input_grad"] = _now(device) - start
    start = _now(device)
    weight_grad(pending)
    times["weight_grad"] = _now(device) - start
    for parameter in parameters:
        parameter.grad = None
    return {**times, "output": output}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _activation_bytes(modules: Sequence[nn.Module], value: Any) -> list[int]:
    """Per layer, bytes that autograd keeps for its backward, each storage at the first layer that keeps it."""
    # Storages are told apart by address, so all that were met stay alive meanwhile: a freed one's address would be given again.
    own = [t.untyped_storage() for module in modules for t in (*module.parameters(), *module.buffers())]
    met = {storage.data_ptr(): storage for storage in own}
    counts = [0] * len(modules)
    layer = 0

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in met:
            met[storage.data_ptr()] = storage
            counts[layer] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for index, module in enumerate(modules):
            layer = index
            value = module(value)
    return counts


def _update_seconds_per_byte(device: torch.device) -> float:
    """What an optimizer step costs per byte of parameters: SGD with momentum on 16 MiB."""
    parameter = nn.Parameter(torch.zeros(4 * 2**20, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    times = []
    for _ in range(6):
        start = _now(device)
        optimizer.step()
        times.append(_now(device) - start)
    return statistics.median(times[1:]) / (parameter.numel() * parameter.element_size())


def _layers(traced: TracedChain, sizes: tuple[int, ...], runs: list[list[_Measured]],
            activations: list[float]) -> tuple[LayerProfile, ...]:  # fmt: skip
    counted: set[str] = set()
    layers = []
    for index, (layer, measured) in enumerate(zip(traced.layers, runs, strict=True)):
        timings = {
            phase: Timing(
                sizes,
                tuple(statistics.median(run.seconds[phase]) for run in measured),
                tuple(_spread(run.seconds[phase]) for run in measured),
            )
            for phase in _PHASES
        }
        parameters = [traced.description.tensor(name) for name in layer.parameters if name not in counted]
        buffers = [traced.description.tensor(name) for name in layer.buffers if name not in counted]
        counted.update(layer.parameters, layer.buffers)
        layers.append(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                parameters=sum(torch.Size(fact.shape).numel() for fact in parameters),
                parameter_bytes=sum(fact.bytes for fact in parameters),
                buffer_bytes=sum(fact.bytes for fact in buffers),
                activation_bytes_per_sample=activations[index],
                output_bytes_per_sample=measured[-1].output_bytes / sizes[-1],
                **timings,
            )
        )
    return tuple(layers)


def _spread(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    quarters = statistics.quantiles(seconds, n=4)
    return quarters[2] - quarters[0]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _named_failure(traced: TracedChain, index: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name = traced.layers[index].name
        raise LayerFailed(name, f"{type(error).__name__}: {error}") from error
