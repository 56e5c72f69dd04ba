"""Measure a model's profile on this device, layer by layer, at several micro-batch sizes."""

from __future__ import annotations

import copy
import platform
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.cluster.local import available_cores
from penstock.errors import LayerFailed, SettingError
from penstock.measure.concurrent import ConcurrentRanks
from penstock.measure.conditions import ConditionsMeter
from penstock.measure.device_kinds import (
    RankSpeed,
    find_unlike_pair,
    processor_name,
    refuse_unlike_pair,
)
from penstock.measure.example_samples import (
    bytes_per_sample,
    checked_tensors,
    example_to_trace,
    resize_example,
)
from penstock.measure.pass_rounds import PassSeries, Progress, run_in_turn
from penstock.measure.replicable import moving_layers, with_single_copy_reasons
from penstock.measure.saved_storages import ActivationBytes, activation_bytes
from penstock.measure.timed_passes import PHASES, Loss, TimedPasses, WithLoss
from penstock.measure.torch_threads import torch_threads
from penstock.measure.update import UpdateSeconds, measure_update
from penstock.modules.module_state import computed_tensors
from penstock.modules.randomness import drawing
from penstock.profile.conditions import RankConditions, combine_conditions
from penstock.profile.profile import LayerProfile, Phase, Profile, Timing
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import TracedChain, as_chain
from penstock.transport.host_memory import disable_memory_trimming, trim_memory

#: Number of measurements before ranks that seem to differ are reported.
_ROUNDS = 4

#: The phases of a layer whose launches are timed, with the fields of `LayerProfile`.
_HOST_FIELDS = {"forward": "host_forward", "backward": "host_backward"}


@dataclass(frozen=True)
class _LayerTimes:
    """One layer at one size: the times of each phase, its output bytes, and the host's times."""

    seconds: dict[Phase, list[float]]
    output_bytes: int
    host_seconds: dict[str, list[float]]


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
    together: bool | dist.ProcessGroup = False,
) -> Profile:
    """Time every layer on this device and count its bytes.

    The chain runs forward and backward as in training, and every layer is timed in its place: once
    to warm up, then `repeats` times (more for short chains), with the sizes in turn; medians and
    interquartile ranges are recorded. Copies of the model run, so that the model itself, and
    torch's random numbers, are left unchanged. From then on this process does not return freed
    memory to the system (see `penstock.transport.host_memory`).

    Ranks that share a host slow each other down. Called on all of them with `together`, each
    measures some of the layers while the others measure theirs (`ps.launch`, torchrun).

    Args:
        model: a chain, or anything that `chain` accepts; also on the meta device. A model that
            must be traced is traced on the example.
        example: inputs of the model, any number of samples in their first dimension; repeated to
            the sizes needed.
        batch: samples of a batch. By default the number in `example`.
        sizes: micro-batch sizes to measure; by default a batch divided by 1, 4 and 16, and a
            single sample if the model takes one.
        repeats: timed runs of each phase.
        threads: torch threads, as many as a rank will have; by default the current number.
        device: "cpu", "cuda", "cuda:1"; None or "auto" is a GPU if one is visible, else the CPU.
        progress: called after every timed pass through the layers with the passes done, their
            total, and their micro-batch size as text ("micro-batches of 4").
        loss, targets: as in training; the loss's cost is added to the last layer. As many targets
            as samples in the example.
        together: all ranks of a job, or of a group, call this with the same arguments, and get the
            same profile. Their devices must be of one kind.

    Raises:
        SettingError: batch, sizes, repeats or threads are below 1, the example has no samples, the
            device is not visible, or `together` on ranks whose devices are of different kinds.
        LayerFailed: a layer raised an error; the message names it.
        RunError: `together`, but this process was not started as a rank.

    Examples:
        >>> profile(nn.Sequential(nn.Linear(4, 2)), torch.ones(8, 4), batch=8).layers[0].kind
        'Linear'
    """
    tensors = checked_tensors(example)
    traced = as_chain(model, example_to_trace(example))
    batch = int(tensors[0].shape[0]) if batch is None else batch
    measured_sizes = _checked_sizes(batch, sizes, repeats, threads)
    concurrent = ConcurrentRanks(together)
    target = concurrent.device(device)
    modules = _copies(traced, target)
    if loss is not None:
        modules[-1] = WithLoss(modules[-1], loss, targets)
    disable_memory_trimming()
    with torch_threads(threads), torch.enable_grad(), drawing(target):
        benchmark = _ChainBenchmark(traced, modules, target, concurrent, progress)
        if not sizes and not benchmark.takes_single_sample(example):
            measured_sizes = tuple(size for size in measured_sizes if size > 1) or (1,)
        measured = benchmark.profile(example, batch, measured_sizes, repeats)
    del modules, benchmark  # `trim_memory` returns to the system what nothing refers to
    trim_memory()
    # Each rank has its own bytes and conditions: all take those of rank 0, to plan alike.
    return concurrent.gather(measured, Profile)[0]


def _checked_sizes(
    batch: int, sizes: Sequence[int] | None, repeats: int, threads: int | None
) -> tuple[int, ...]:
    """Return the sizes to measure, ascending.

    By default also 1, since the cost of a sample rises below the sizes at which matrix products
    fill a core: extrapolated from 2 samples, a GPT's backward of one took 0.64 of its time.

    Raises:
        SettingError: a number is below 1.
    """
    if not sizes:
        sizes = [1, *(max(min(2, batch), round(batch / parts)) for parts in (1, 4, 16))]
    ascending = tuple(sorted(set(sizes)))
    if min(ascending[0], batch, repeats) < 1 or (threads is not None and threads < 1):
        raise SettingError(
            f"batch {batch}, sizes {list(ascending)}, repeats {repeats} and threads {threads} "
            f"must be 1 or more"
        )
    return ascending


@dataclass
class _ChainBenchmark:
    """The layers of a chain, to be timed by all ranks that measure together."""

    traced: TracedChain
    modules: list[nn.Module]
    device: torch.device
    concurrent: ConcurrentRanks
    progress: Progress | None
    _rank_layers: range = range(0)

    def profile(self, example: Any, batch: int, sizes: tuple[int, ...], repeats: int) -> Profile:
        """Measure the whole profile."""
        meter = ConditionsMeter()
        runs = self.times(example, sizes, repeats)
        # Read at once: they are to be the conditions of the timed passes, not of what follows.
        rank_conditions = self.concurrent.gather(meter.conditions(), RankConditions)
        # What is saved whatever the size, such as a table of positions, counts per sample: it would
        # weigh most with a single one.
        size = next((size for size in sizes if size > 1), sizes[0])
        value = resize_example(example, size, self.device)
        self._set_targets(size)
        activations = activation_bytes(self.modules, value)
        update = self.update()
        machine = machine_facts(self.device)
        if self.concurrent.ranks > 1:
            machine["ranks"] = str(self.concurrent.ranks)
        layers = _layers(self.traced, sizes, runs, activations, size)
        measured = Profile(
            layers,
            self.traced.fingerprint,
            bytes_per_sample(checked_tensors(example)),
            batch,
            machine,
            torch.__version__,
            update.s_per_byte,
            device=device_name(self.device),
            update_fixed_s=update.fixed_s,
            accumulate_s_per_byte=update.accumulate_s_per_byte,
            step_ratios=update.step_ratios,
            busy_ranks=self.concurrent.ranks,
            conditions=combine_conditions(rank_conditions),
        )
        self._set_targets(size)
        value = resize_example(example, size, self.device)
        moving = moving_layers(self.traced, self.modules, value, self.device)
        return with_single_copy_reasons(measured, self.traced, moving)

    def takes_single_sample(self, example: Any) -> bool:
        """Return whether the layers run on one sample.

        Batch norm may have nothing to normalise.
        """
        self._set_targets(1)
        try:
            self._passes(range(len(self.modules))).output_for(
                resize_example(example, 1, self.device)
            )
        except LayerFailed:
            return False
        return True

    def times(self, example: Any, sizes: Sequence[int], repeats: int) -> list[list[_LayerTimes]]:
        """Return the measurements per layer, in the order of the sizes."""
        self._rank_layers = range(len(self.modules))
        if self.concurrent.ranks > 1:
            # One division of the layers for all sizes, by the seconds of the middle one.
            rough_seconds = self._rough_seconds(example, sizes[len(sizes) // 2])
            self._rank_layers = self.concurrent.share(rough_seconds)
        series = [self._series(self._rank_layers, example, size) for size in sizes]
        run_in_turn(series, repeats, self.concurrent, self.progress)
        rank_times: dict[int, list[_LayerTimes]] = {}
        for place, index in enumerate(self._rank_layers):
            rank_times[index] = [_layer_times(entry, place) for entry in series]
        by_layer: dict[int, list[_LayerTimes]] = {}
        for part in self.concurrent.gather(rank_times, dict[int, list[_LayerTimes]]):
            by_layer |= part
        return [by_layer[index] for index in range(len(self.modules))]

    def _series(self, layers: range, example: Any, size: int) -> PassSeries:
        """Return the passes of one size through some layers."""
        set_targets = self._targets_setter(size)
        set_targets()
        # Once: every timed pass starts from the input of this rank's first layer.
        layers_before = self._passes(range(layers.start))
        value = layers_before.output_for(resize_example(example, size, self.device))
        return PassSeries(size, self._passes(layers), value, set_targets)

    def _rough_seconds(self, example: Any, size: int) -> list[float]:
        """Return rough seconds of forward and backward per layer; check that all ranks agree.

        Other programs slow a rank down temporarily: ranks that seem to differ are measured again,
        and the minimum counts. Equal processors that still differ are measured with a warning.

        Raises:
            SettingError: the devices of the ranks are of different kinds.
        """
        least: list[float] = []
        model = machine_facts(self.device)["device"]
        for _ in range(_ROUNDS):
            rough = self._series(range(len(self.modules)), example, size)
            run_in_turn([rough], 1, self.concurrent)
            seconds = []
            for place in range(len(self.modules)):
                times = _layer_times(rough, place).seconds
                seconds.append(min(times["forward"]) + min(times["backward"]))
            # An interruption only lengthens a pass: the least of all rounds is nearest to the device.
            least = list(map(min, least, seconds)) if least else seconds
            speed = RankSpeed(socket.gethostname(), device_name(self.device), model, sum(least))
            ranks = self.concurrent.gather(speed, RankSpeed)
            pair = find_unlike_pair(ranks)
            if pair is None:
                return least
        assert pair is not None
        refuse_unlike_pair(ranks, pair, warns=self.concurrent.rank == 0)
        return least

    def update(self) -> UpdateSeconds:
        """Time accumulation and optimizer step, over the layers of all ranks."""
        self.concurrent.wait_for_all()
        modules = [self.modules[index] for index in self._rank_layers]
        parts = self.concurrent.gather(measure_update(modules, self.device), UpdateSeconds)
        return UpdateSeconds.combine(parts)

    def _set_targets(self, size: int) -> None:
        """Give the loss as many targets as there are samples."""
        self._targets_setter(size)()

    def _targets_setter(self, size: int) -> Callable[[], None]:
        """Return a function that gives the loss the targets of this many samples."""
        last = self.modules[-1]
        targets = (
            resize_example(last.targets, size, self.device) if isinstance(last, WithLoss) else None
        )

        def set_targets() -> None:
            """Set them."""
            if isinstance(last, WithLoss):
                last.current_targets = targets

        return set_targets

    def _passes(self, layers: range) -> TimedPasses:
        """Return the timed passes through some layers."""
        return TimedPasses(
            [self.modules[index] for index in layers],
            layers.start > 0,  # the first layer of the chain computes no gradient of its input
            self.device,
            [self.traced.layers[index].name for index in layers],
        )


def device_name(device: torch.device) -> str:
    """Return the name of a device in profiles: "cpu", or the GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return facts about this machine, for people who read a profile later."""
    name = device_name(device) if device.type == "cuda" else processor_name()
    cores, threads = available_cores(), torch.get_num_threads()
    return {
        "device": f"{device.type}: {name}",
        "cores": str(cores),
        "threads": str(threads),
        "system": platform.platform(),
    }


def _copies(traced: TracedChain, device: torch.device) -> list[nn.Module]:
    """Return copies of all layers in training mode, with memory on the device."""
    copied = TracedChain(
        traced.description,
        tuple(copy.deepcopy(nn.ModuleList(traced.modules), computed_tensors(traced.modules))),
        traced.aliases,
    )
    return [module.train() for module in materialise(copied, range(len(copied)), device, seed=0)]


def _layers(
    traced: TracedChain,
    sizes: tuple[int, ...],
    runs: list[list[_LayerTimes]],
    activations: Sequence[ActivationBytes],
    samples: int,
) -> tuple[LayerProfile, ...]:
    """Return the profiles of all layers.

    Args:
        traced: the chain.
        sizes: that were measured.
        runs: per layer and size.
        activations: per layer, for `samples` samples.
        samples: number of samples.
    """
    layers = []
    for layer, weights, measured, activation in zip(
        traced.layers, traced.description.weights, runs, activations, strict=True
    ):
        fields: dict[str, Any] = {
            **vars(weights),
            **{phase: _phase_times(sizes, measured, phase) for phase in PHASES},
            **host_timings(sizes, [run.host_seconds for run in measured]),
        }
        layers.append(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                activation_bytes_per_sample=activation.saved / samples,
                entry_bytes_per_sample=activation.entry / samples,
                # Of the largest size, where what comes once per micro-batch weighs least.
                output_bytes_per_sample=measured[-1].output_bytes / sizes[-1],
                **fields,
            )
        )
    return tuple(layers)


def _layer_times(series: PassSeries, place: int) -> _LayerTimes:
    """Return the times of the layer at one place of a series, in the order of the passes."""
    seconds: dict[Phase, list[float]] = {}
    for phase in PHASES:
        seconds[phase] = [row.by_phase[phase][place] for row in series.seconds]
    host_seconds: dict[str, list[float]] = {}
    for row in series.seconds:
        for name, host_s in row.host.items():
            host_seconds.setdefault(name, []).append(host_s[place])
    return _LayerTimes(seconds, series.output_bytes[place], host_seconds)


def host_timings(
    sizes: tuple[int, ...], runs: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, Timing]:
    """Return the medians of the host's seconds as fields of `LayerProfile`.

    Args:
        sizes: micro-batch sizes.
        runs: per size, by phase, the seconds of all passes; empty on a CPU.
    """
    timings: dict[str, Timing] = {}
    for phase, field in _HOST_FIELDS.items():
        if all(phase in run for run in runs):
            medians = tuple(statistics.median(run[phase]) for run in runs)
            timings[field] = Timing(sizes, medians)
    return timings


def _phase_times(sizes: tuple[int, ...], measured: Sequence[_LayerTimes], phase: Phase) -> Timing:
    """Return the medians and spreads of one phase of a layer."""
    times = [run.seconds[phase] for run in measured]
    return Timing(sizes, tuple(map(statistics.median, times)), tuple(map(_spread, times)))


def _spread(seconds: list[float]) -> float:
    """Return the interquartile range."""
    if len(seconds) < 2:  # `quantiles` needs two
        return 0.0
    quarters = statistics.quantiles(seconds, n=4)
    return quarters[2] - quarters[0]
