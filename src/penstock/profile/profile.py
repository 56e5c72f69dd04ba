"""The `Profile` of a model: costs of every layer, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from penstock.errors import FileError, SettingError
from penstock.files.read import parse_json
from penstock.files.text import quote, read_text, shorten
from penstock.model.chain import check_fingerprint
from penstock.notebook import NotebookText
from penstock.profile.conditions import Conditions
from penstock.store import write_json
from penstock.units import MAX_BYTES, MAX_SECONDS

SCHEMA = 1
#: Shorter times than this are no measurements, and divisions by them overflow.
_SHORTEST_S = 1e-15
#: Longest step of an optimizer, in steps of SGD with momentum. The most that was measured is 32, of
#: Rprop on a CPU.
MAX_STEP_RATIO = 1e4

Phase = Literal["forward", "backward", "input_grad", "weight_grad"]
#: All phases in the order of ops F, B, I and W.
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Timing:
    """Seconds at several micro-batch sizes: medians, and spreads (interquartile range) of repeats.

    Small micro-batches cost more per sample because every call has a fixed cost; the fit separates
    it.
    """

    sizes: tuple[int, ...]
    median_s: tuple[float, ...]
    spread_s: tuple[float, ...] = ()

    @cached_property
    def _fit(self) -> tuple[float, float]:
        """The fixed cost of a call and the cost per sample, in seconds."""
        sizes, medians = np.asarray(self.sizes, float), np.asarray(self.median_s, float)
        # A difference of two measurements may be 0; with relative weights that one point would
        # dominate the fit.
        significant = medians > 1e-3 * medians.max()
        sizes, medians = sizes[significant], medians[significant]
        if len(sizes) <= 1:
            return 0.0, float((medians / sizes).sum())
        # Relative least squares: without the weights the largest size alone would determine the
        # fixed cost.
        weights = 1.0 / medians
        matrix = np.stack([weights, sizes * weights], axis=1)
        fixed, per_sample = np.linalg.lstsq(matrix, np.ones_like(sizes), rcond=None)[0]
        if fixed < 0:
            fixed, per_sample = 0.0, matrix[:, 1].sum() / np.dot(matrix[:, 1], matrix[:, 1])
        if per_sample < 0:
            fixed, per_sample = float(medians.mean()), 0.0
        return float(fixed), float(per_sample)

    @property
    def fixed_s(self) -> float:
        """Seconds of a call, whatever its size (fitted, at least 0)."""
        return self._fit[0]

    @property
    def per_sample_s(self) -> float:
        """Additional seconds per sample (fitted, at least 0)."""
        return self._fit[1]

    def at(self, samples: float) -> float:
        """Return the seconds for `samples` samples.

        Interpolates linearly between measured sizes, and extrapolates by the fitted cost per
        sample.
        """
        low, high = self.sizes[0], self.sizes[-1]
        if low <= samples <= high:
            return float(np.interp(samples, self.sizes, self.median_s))
        edge, nearest = (self.median_s[0], low) if samples < low else (self.median_s[-1], high)
        return max(edge + (samples - nearest) * self.per_sample_s, 0.0)


@dataclass(frozen=True)
class LayerDescription:
    """What `LayerProfile` and `LayerCounts` say of a layer: the costs of its phases, which are
    timings or counts, and its bytes. Byte counts named `…_per_sample` grow with the micro-batch.

    `parameter_bytes` counts a shared parameter only at the first layer that uses it;
    `activation_bytes_per_sample` (bytes saved for the backward) does so with saved tensors.
    `entry_bytes_per_sample` is what a stage that begins with this layer saves in addition: its
    input, if that is counted at an earlier layer or at none.

    `tensor_bytes` are the parts of `parameter_bytes`, one for each parameter; empty if unknown.
    `tied_tensors` are the parameters of earlier layers that this layer uses too: the index of the
    layer that counts it, and the position there.
    """

    name: str
    kind: str
    forward: Any
    backward: Any
    input_grad: Any
    weight_grad: Any
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes_per_sample: float
    output_bytes_per_sample: float
    entry_bytes_per_sample: float = 0.0
    tensor_bytes: tuple[int, ...] = ()
    tied_tensors: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LayerProfile(LayerDescription):
    """Costs of one layer in seconds and bytes.

    `single_copy_reason` says why the layer cannot be replicated on several ranks; empty if it can.

    `host_forward` and `host_backward`, where the device works through a queue, are the seconds in
    which the host launches the layer's work. Where they are longer than those of the device, the
    step takes the host's time. They are None on a CPU, and in older files.
    """

    forward: Timing
    backward: Timing
    input_grad: Timing
    weight_grad: Timing
    single_copy_reason: str = ""
    host_forward: Timing | None = None
    host_backward: Timing | None = None

    @property
    def host_s(self) -> float | None:
        """Seconds in which the host launches forward and backward of the largest micro-batch that
        was measured; None if unknown.
        """
        if self.host_forward is None or self.host_backward is None:
            return None
        return self.host_forward.median_s[-1] + self.host_backward.median_s[-1]

    def seconds(self, phase: Phase, samples: float) -> float:
        """Return the seconds of one phase for `samples` samples."""
        timing: Timing = getattr(self, phase)
        return timing.at(samples)

    def with_timings(self, change: Callable[[Timing], Timing]) -> LayerProfile:
        """Return this layer with changed timings of its phases on the device."""
        return replace(
            self,
            forward=change(self.forward),
            backward=change(self.backward),
            input_grad=change(self.input_grad),
            weight_grad=change(self.weight_grad),
        )


def step_key(optimizer: str, states: float, fused: bool = False) -> str:
    """Return the key of an optimizer in `Profile.step_ratios`.

    >>> step_key("SGD", 0.0), step_key("Adam", 2.0, fused=True)
    ('SGD, 0 states', 'Adam, 2 states, fused')
    """
    return f"{optimizer}, {states:g} states{', fused' if fused else ''}"


#: From this optimizer's step those of others are estimated: like theirs, and unlike that of SGD, it
#: is a sequence of kernels with intermediate results.
_REFERENCE_KEY = step_key("Adam", 2.0)


@dataclass(frozen=True, repr=False)
class Profile(NotebookText):
    """A model's layers with their costs, and the device on which they were measured.

    Attributes:
        layers: in order.
        fingerprint: of the model.
        input_bytes_per_sample: of the model's input.
        batch: samples per batch.
        machine: facts about the machine, for people.
        torch_version: with which it was measured.
        update_s_per_byte: seconds of an optimizer step per byte of parameters (SGD with momentum).
        device: the device's name, as in clusters: a preset's, `"cpu"`, or CUDA's name of the GPU;
            empty if unknown.
        update_fixed_s: seconds of an optimizer step in addition, whatever its size.
        step_ratios: of other optimizers, the seconds per byte over those of SGD with momentum, by
            `step_key`; empty if not measured.
        accumulate_s_per_byte: seconds of adding a micro-batch's gradients to the previous ones, per
            byte of them; `backward` and `weight_grad` of the layers are those of a first
            micro-batch.
        optimizer_states: optimizer state per parameter, which planners count as memory;
            `ps.plan(optimizer=)` sets it.
        busy_ranks: number of ranks of the host that were busy while it was measured; with more than
            one, its seconds are those of busy ranks.
        conditions: of the machine while it was measured; None if it was estimated.
        tensor_parallel: number of devices that share every layer; seconds and bytes are those of
            one of them.
        sequence_parallel: whether these devices also share what lies between the shared parts.
        boundary_replicas: bytes of a boundary that a device holds / bytes that it sends: above 1
            where all devices hold the whole boundary, and each sends its share.
        widths: profiles of the same model at other widths of tensor parallelism.
        schema: version of the file format.

    Examples:
        >>> Profile.load("docs/funnel.profile.json").layers[0].kind
        'Linear'
    """

    layers: tuple[LayerProfile, ...]
    fingerprint: str
    input_bytes_per_sample: float
    batch: int
    machine: dict[str, str] = field(default_factory=dict)
    torch_version: str = ""
    update_s_per_byte: float = 0.0
    device: str = ""
    update_fixed_s: float = 0.0
    accumulate_s_per_byte: float = 0.0
    optimizer_states: float = 1.0
    busy_ranks: int = 1
    conditions: Conditions | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    boundary_replicas: int = 1
    widths: tuple[Profile, ...] = ()
    step_ratios: dict[str, float] = field(default_factory=dict)
    schema: int = SCHEMA

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        device = self.device or "an unknown device"
        return f"<Profile: {len(self)} layers on {device}, for {sizes} samples, batch {self.batch}>"

    def __str__(self) -> str:
        from penstock.profile.description import describe  # imports this module

        return describe(self)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerProfile]:
        return iter(self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that were measured."""
        return self.layers[0].forward.sizes if self.layers else ()

    def seconds(self, phase: Phase, samples: float) -> list[float]:
        """Return per layer the seconds of one phase for `samples` samples."""
        # Cached, since planners ask for the same size thousands of times.
        cache: dict[tuple[Phase, float], list[float]] = self.__dict__.setdefault("_seconds", {})
        if (phase, samples) not in cache:
            cache[phase, samples] = [layer.seconds(phase, samples) for layer in self.layers]
        return list(cache[phase, samples])

    def step_ratio(self, optimizer: str, states: float, fused: bool = False) -> float:
        """Return an optimizer's seconds per byte over those of the one that was measured.

        An optimizer that was not measured is estimated from one that was, Adam, by the numbers that
        a step reads and writes per parameter: weight, gradient and states, of which all but the
        gradient are written too. A profile without `step_ratios` is scaled in the same way.

        Args:
            optimizer: name of its torch class; empty if only its states are known.
            states: numbers that it keeps per parameter.
            fused: whether its step is one kernel.
        """
        ratio = self.step_ratios.get(step_key(optimizer, states, fused))
        if ratio is not None:
            return ratio
        reference, reference_states = 1.0, self.optimizer_states
        measured = self.step_ratios.get(_REFERENCE_KEY)
        is_sgd = optimizer == "SGD" or (not optimizer and states <= 1)
        if measured is not None and not fused and not is_sgd:
            reference, reference_states = measured, 2.0
        return reference * (3 + 2 * states) / (3 + 2 * reference_states)

    def update_seconds(self, parameter_bytes: float) -> float:
        """Return the seconds of an optimizer step over `parameter_bytes` of weights; 0 if there are none."""
        if not parameter_bytes:
            return 0.0
        return self.update_fixed_s + parameter_bytes * self.update_s_per_byte

    def step_seconds(self, samples: float) -> list[float]:
        """Return per layer the seconds of forward and backward for `samples` samples."""
        return [
            forward + back
            for forward, back in zip(
                self.seconds("forward", samples), self.seconds("backward", samples), strict=True
            )
        ]

    def save(self, path: str | Path) -> None:
        """Write JSON with a schema version."""
        write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote, and validate it.

        Raises:
            FileError: the file is missing, is not a profile, has a different schema version, or
                contains an invalid number.
        """
        return cls.parse(read_text(path, "profile"), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Profile:
        """Return the profile in a text that `save` wrote, as `load` does for a file.

        Args:
            text: the JSON.
            source: place of the text, with which every message begins.

        Raises:
            FileError: see `load`.
        """
        profile = parse_json(text, cls, source, SCHEMA)
        try:
            check_fields(profile, source)
            check_fingerprint(profile.fingerprint, source)
            check_step_ratios(profile.step_ratios, source)
            for index, layer in enumerate(profile.layers):
                where = f"{source}: layer {shorten(layer.name)}"
                check_fields(layer, where)
                check_tensors(profile.layers, index, where)
                phases = (layer.forward, layer.backward, layer.input_grad, layer.weight_grad)
                host_phases = (layer.host_forward, layer.host_backward)
                for phase in (*phases, *filter(None, host_phases)):
                    check_timing(phase, where)
        except SettingError as error:
            raise FileError(str(error)) from error
        return profile


def check_fields(value: object, where: str) -> None:
    """Check the numbers of a dataclass, all of which are counts or bytes.

    Raises:
        SettingError: one is negative, or too large to be true; `where` begins the message.
    """
    for entry in fields(value):  # type: ignore[arg-type]
        number = getattr(value, entry.name)
        if not isinstance(number, (int, float)):
            continue
        if number < 0:
            raise SettingError(f"{where}: {entry.name} is {number}, and cannot be below 0")
        if number > MAX_BYTES:
            raise SettingError(
                f"{where}: {entry.name} is {number:.3g}, and cannot be above {MAX_BYTES:.3g}"
            )


def check_step_ratios(ratios: Mapping[str, float], where: str) -> None:
    """Check the seconds of optimizers' steps over those of SGD with momentum.

    Raises:
        SettingError: one is not above 0, or too large to be true; `where` begins the message.
    """
    for key, ratio in ratios.items():
        if not 0 < ratio <= MAX_STEP_RATIO:
            raise SettingError(
                f"{where}: step_ratios has {ratio:g} for {shorten(key)}; it is above 0, and at most "
                f"{MAX_STEP_RATIO:g}"
            )


def check_tensors(layers: Sequence[LayerDescription], index: int, where: str) -> None:
    """Check the parameters of a layer: their bytes add up, and tied ones are of earlier layers.

    Raises:
        SettingError: they do not, or are not; `where` begins the message.
    """
    layer = layers[index]
    if min(layer.tensor_bytes, default=0) < 0:
        raise SettingError(f"{where}: tensor_bytes are 0 or more")
    if layer.tensor_bytes and sum(layer.tensor_bytes) != layer.parameter_bytes:
        raise SettingError(
            f"{where}: tensor_bytes add up to {sum(layer.tensor_bytes)}, and parameter_bytes are "
            f"{layer.parameter_bytes}"
        )
    for first, position in layer.tied_tensors:
        if not 0 <= first < index or not 0 <= position < len(layers[first].tensor_bytes):
            raise SettingError(
                f"{where}: tied_tensors has [{first}, {position}], and there is no such parameter in "
                f"tensor_bytes of layers 0 to {index - 1}"
            )


def check_timing(timing: Timing, where: str) -> None:
    """Raise an error if a timing is invalid.

    Its sizes must ascend, with one time for each that a layer can take.

    Raises:
        SettingError: the timing is invalid; `where` begins the message.
    """
    sizes: Sequence[int] = timing.sizes
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise SettingError(f"{where}: sizes {quote(list(sizes))} must be 1 or more and ascend")
    if sizes[-1] > MAX_BYTES:
        raise SettingError(f"{where}: a batch of {sizes[-1]:.3g} samples is larger than any")
    if len(timing.median_s) != len(sizes) or not all(
        0 <= t < float("inf") for t in timing.median_s
    ):
        raise SettingError(f"{where}: needs {len(sizes)} times of 0 s or more, one for each size")
    for seconds in timing.median_s:
        if seconds > MAX_SECONDS or 0 < seconds < _SHORTEST_S:
            raise SettingError(
                f"{where}: takes {seconds:.3g} s; a layer takes 0 s, or {_SHORTEST_S:g} s to "
                f"{MAX_SECONDS:g} s"
            )
