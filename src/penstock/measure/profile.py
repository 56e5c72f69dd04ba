"""Measure a model here, layer by layer, at several micro-batch sizes."""

from __future__ import annotations

import copy
import os
import platform
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import SettingError
from penstock.grad.saved import looking_at_saved
from penstock.measure.alike import RankSpeed, refusal, unlike
from penstock.measure.company import Company
from penstock.measure.passes import PHASES, Loss, Passes, WithLoss
from penstock.measure.replicable import moving_layers, with_single_copy_reasons
from penstock.measure.update import UpdateSeconds, measure_update
from penstock.profile.profile import LayerProfile, Phase, Profile, Timing
from penstock.tracing.chain import TracedChain, chain
from penstock.tracing.materialise import materialise
from penstock.tracing.module_state import made_tensors
from penstock.tracing.randomness import drawing
from penstock.transport.card_facts import assign_device, local_device
from penstock.transport.host_memory import give_back_freed_memory, keep_freed_memory

Progress = Callable[[int, int, str], None]

#: How often ranks that seem unlike are measured before they are taken to be.
_ROUNDS = 4


@dataclass(frozen=True)
class _Measured:
    """One layer at one size: repeats of each phase, and bytes."""

    seconds: dict[Phase, list[float]]
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
    loss: Loss | None = None,
    targets: Any = None,
    together: bool = False,
) -> Profile:
    """Time every layer here and count its bytes.

    The chain runs forward and backward as in training, and every layer is timed where it stands:
    once to warm up, then `repeats` times (more for short chains); medians and interquartile ranges
    are kept. The model itself is left as it was: copies run. So are torch's random numbers. From
    then on this process keeps memory that it frees for itself (see
    `penstock.transport.host_memory`).

    Ranks that share a host slow each other down. Called on all of them with `together`, each
    measures some of the layers while the others measure theirs:

        profile = ps.launch(lambda: ps.profile(model, x, threads=1, together=True), ranks=2)[0]

    Args:
        model: a chain, or anything that `chain` takes; on the meta device too.
        example: inputs of the model, any number of samples in their first dimension; repeated to
        the sizes needed. batch: samples of a batch. By default as many as `example` has. sizes:
        micro-batch sizes to measure; by default a batch in 1, 4 and 16 parts, of 2 samples at
        least. repeats: timed runs of each phase. threads: torch threads meanwhile: what a rank will
        have. By default as many as now. device: "cpu", "cuda", "cuda:1"; None or "auto" is a GPU if
        one is visible, else the CPU. The profile records it. progress: called with layers done,
        layers in all, and the layer's name. loss, targets: as training has them; what the loss
        takes then counts with the last layer. As many targets as the example has. together: all
        ranks of a job call this with the same arguments, and get the same profile. Their devices
        are of one kind.

    Raises:
        SettingError: batch, sizes, repeats or threads are below 1, the example has no samples, the
        device is not visible, or
            `together` on ranks whose devices are of different kinds.
        LayerFailed: a layer raised; the message names it.
        RunError: `together`, and this process was not started as a rank.
    """
    traced = model if isinstance(model, TracedChain) else chain(model)
    tensors = _tensors_of(example)
    batch = int(tensors[0].shape[0]) if batch is None else batch
    measured_sizes = _checked_sizes(batch, sizes, repeats, threads)
    company = Company(together)
    place = _place(device, together=together)
    modules = _copies(traced, place)
    if loss is not None:
        modules[-1] = WithLoss(modules[-1], loss, targets)
    keep_freed_memory()
    with _threads(threads), torch.enable_grad(), drawing(place):
        measured = _Bench(traced, modules, place, company, progress).profile(
            example, batch, measured_sizes, repeats
        )
    del modules
    give_back_freed_memory()
    return company.gather(measured, Profile)[0]


def _place(request: str | torch.device | None, *, together: bool) -> torch.device:
    """The device to measure on."""
    asked = None if request == "auto" else request
    return torch.device(assign_device(asked).device) if together else local_device(asked)


def _tensors_of(example: Any) -> list[Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dim() == 0 or tensor.shape[0] == 0 for tensor in tensors):
        raise SettingError(
            "the example must be tensors with at least one sample in their first dimension"
        )
    return tensors


def _checked_sizes(
    batch: int, sizes: Sequence[int] | None, repeats: int, threads: int | None
) -> tuple[int, ...]:
    """The sizes to measure, ascending. Of one sample, batch norm may have nothing to normalise."""
    found = tuple(
        sorted(set(sizes or (max(min(2, batch), round(batch / parts)) for parts in (1, 4, 16))))
    )
    if found[0] < 1 or batch < 1 or repeats < 1 or (threads is not None and threads < 1):
        raise SettingError(
            f"batch {batch}, sizes {list(found)}, repeats {repeats} and threads {threads} must be 1 or more"
        )
    return found


@dataclass
class _Bench:
    """The layers of a chain, to be timed by all that are in company."""

    traced: TracedChain
    modules: list[nn.Module]
    device: torch.device
    company: Company
    progress: Progress | None
    _share: range = range(0)

    def profile(self, example: Any, batch: int, sizes: tuple[int, ...], repeats: int) -> Profile:
        """Measure all there is."""
        runs = self.times(example, sizes, repeats)
        kept = self.activation_bytes(_samples(example, sizes[0], self.device), sizes[0])
        update = self.update()
        machine = machine_facts(self.device)
        if self.company.ranks > 1:
            machine["ranks"] = str(self.company.ranks)
        layers = _layers(
            self.traced, sizes, runs, *([count / sizes[0] for count in row] for row in kept)
        )
        input_bytes = sum(
            leaf.numel() * leaf.element_size() / leaf.shape[0] for leaf in _tensors_of(example)
        )
        found = Profile(
            layers,
            self.traced.fingerprint,
            input_bytes,
            batch,
            machine,
            torch.__version__,
            update.s_per_byte,
            device=device_name(self.device),
            update_fixed_s=update.fixed_s,
            accumulate_s_per_byte=update.accumulate_s_per_byte,
        )
        self._aim(sizes[0])
        value = _samples(example, sizes[0], self.device)
        moving = moving_layers(self.traced, self.modules, value, self.device)
        return with_single_copy_reasons(found, self.traced, moving)

    def times(self, example: Any, sizes: Sequence[int], repeats: int) -> list[list[_Measured]]:
        """Per layer, and in the order of the sizes, what was measured."""
        self._share = range(len(self.modules))
        if self.company.ranks > 1:
            self._share = self.company.share(self._rough_seconds(example, sizes[len(sizes) // 2]))
        runs: list[list[_Measured]] = [[] for _ in self.modules]
        for number, size in enumerate(sizes):
            self._aim(size)
            before, passes = self._passes(range(self._share.start)), self._passes(self._share)
            passes.run(before.value_behind(_samples(example, size, self.device)), repeats)
            measured = map(_Measured, passes.seconds, passes.output_bytes)
            layers = dict(zip(self._share, measured, strict=True))
            by_layer: dict[int, _Measured] = {}
            for part in self.company.gather(layers, dict[int, _Measured]):
                by_layer |= part
            for index, layer in enumerate(self.traced.layers):
                runs[index].append(by_layer[index])
                if self.progress is not None:
                    self.progress(
                        number * len(self.modules) + index + 1,
                        len(sizes) * len(self.modules),
                        layer.name,
                    )
        return runs

    def _rough_seconds(self, example: Any, size: int) -> list[float]:
        """Per layer, seconds of forward and backward here, once it is clear that the other ranks
        take as long.

        What else runs on a host slows a rank down for a while: who seems unlike is measured again,
        and the least counts.

        Raises:
            SettingError: the devices of the ranks are of different kinds.
        """
        self._aim(size)
        least: list[float] = []
        model = machine_facts(self.device)["device"]
        for _ in range(_ROUNDS):
            rough = self._passes(range(len(self.modules)))
            rough.run(_samples(example, size, self.device), 1)
            seconds = [min(row["forward"]) + min(row["backward"]) for row in rough.seconds]
            least = list(map(min, least, seconds)) if least else seconds
            speed = RankSpeed(socket.gethostname(), device_name(self.device), model, sum(least))
            ranks = self.company.gather(speed, RankSpeed)
            pair = unlike(ranks)
            if pair is None:
                return least
        assert pair is not None
        raise refusal(ranks, pair)

    def activation_bytes(self, value: Any, size: int) -> tuple[list[int], list[int]]:
        """See `_activation_bytes`; of `size` samples."""
        self._aim(size)
        return _activation_bytes(self.modules, value)

    def update(self) -> UpdateSeconds:
        """What happens to the gradients, of all ranks' layers."""
        self.company.begin()
        seconds = measure_update([self.modules[index] for index in self._share], self.device)
        return UpdateSeconds.together(self.company.gather(seconds, UpdateSeconds))

    def _aim(self, size: int) -> None:
        """Give the loss as many targets as there are samples."""
        last = self.modules[-1]
        if isinstance(last, WithLoss):
            last.aimed = _samples(last.targets, size, self.device)

    def _passes(self, share: range) -> Passes:
        names = [self.traced.layers[index].name for index in share]
        return Passes(
            [self.modules[index] for index in share],
            share.start > 0,
            self.device,
            names,
            self.company,
        )


def device_name(device: torch.device) -> str:
    """What a profile calls the device: "cpu", or a GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_facts(device: torch.device) -> dict[str, str]:
    """What this machine is, for people who read a profile later."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        name = models[0] if models else name
    if device.type == "cuda":
        name = device_name(device)
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    return {
        "device": f"{device.type}: {name}",
        "cores": str(cores),
        "threads": str(threads),
        "system": platform.platform(),
    }


def _copies(traced: TracedChain, device: torch.device) -> list[nn.Module]:
    """All layers with memory on the device, apart from the user's own, in training mode."""
    copied = TracedChain(
        traced.description,
        tuple(copy.deepcopy(nn.ModuleList(traced.modules), made_tensors(traced.modules))),
        traced.aliases,
    )
    return [module.train() for module in materialise(copied, range(len(copied)), device, seed=0)]


def _samples(example: Any, size: int, device: torch.device) -> Any:
    """`example` repeated or cut to `size` samples."""

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf[torch.arange(size) % leaf.shape[0]].to(device)

    return pytree.tree_map(fit, example)


def _activation_bytes(modules: Sequence[nn.Module], value: Any) -> tuple[list[int], list[int]]:
    """Per layer, bytes that autograd keeps for its backward, each storage at the first layer that
    keeps it; and what a stage that begins with the layer keeps besides: its input, unless it counts
    there or later.
    """
    # Storages are told apart by address, so all that were met stay alive meanwhile: a freed one's
    # address would be given again.
    own = [
        t.untyped_storage() for module in modules for t in (*module.parameters(), *module.buffers())
    ]
    met = {storage.data_ptr(): storage for storage in own}
    counted_at: dict[int, int] = {}
    counts = [0] * len(modules)
    inputs: list[list[Tensor]] = []
    layer = 0

    def count(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in met:
            met[storage.data_ptr()] = storage
            counted_at[storage.data_ptr()] = layer
            counts[layer] += storage.nbytes()

    with looking_at_saved(count):
        for index, module in enumerate(modules):
            layer = index
            inputs.append([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)])
            value = module(value)
    entries = [
        sum(
            tensor.nbytes
            for tensor in given
            if counted_at.get(tensor.untyped_storage().data_ptr(), -1) < index
        )
        for index, given in enumerate(inputs)
    ]
    return counts, entries


def _layers(
    traced: TracedChain,
    sizes: tuple[int, ...],
    runs: list[list[_Measured]],
    activations: list[float],
    entries: list[float],
) -> tuple[LayerProfile, ...]:
    layers = []
    for index, (layer, weights, measured) in enumerate(
        zip(traced.layers, traced.description.weights, runs, strict=True)
    ):
        timings = {
            phase: Timing(
                sizes,
                tuple(statistics.median(run.seconds[phase]) for run in measured),
                tuple(_spread(run.seconds[phase]) for run in measured),
            )
            for phase in PHASES
        }
        layers.append(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                parameters=weights.parameters,
                parameter_bytes=weights.parameter_bytes,
                buffer_bytes=weights.buffer_bytes,
                activation_bytes_per_sample=activations[index],
                entry_bytes_per_sample=entries[index],
                output_bytes_per_sample=measured[-1].output_bytes / sizes[-1],
                single_copy_reason="",
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
