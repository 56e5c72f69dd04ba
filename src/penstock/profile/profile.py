"""The `Profile` of a model: costs of every layer, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.errors import FileError, SettingError
from penstock.files.read import read_json
from penstock.store import write_json

SCHEMA = 1

Phase = Literal["forward", "backward", "input_grad", "weight_grad"]


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
class LayerProfile:
    """Costs of one layer. Byte counts named `…_per_sample` grow with the micro-batch.

    `parameter_bytes` counts a shared parameter only at the first layer that uses it;
    `activation_bytes_per_sample` (bytes saved for the backward) does so with saved tensors.
    `entry_bytes_per_sample` is what a stage that begins with this layer saves in addition: its
    input, if that is counted at an earlier layer or at none. `single_copy_reason` says why the
    layer cannot be replicated on several ranks; empty if it can.
    """

    name: str
    kind: str
    forward: Timing
    backward: Timing
    input_grad: Timing
    weight_grad: Timing
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes_per_sample: float
    output_bytes_per_sample: float
    entry_bytes_per_sample: float = 0.0
    single_copy_reason: str = ""

    def seconds(self, phase: Phase, samples: float) -> float:
        """Return the seconds of one phase for `samples` samples."""
        timing: Timing = getattr(self, phase)
        return timing.at(samples)


@dataclass(frozen=True)
class Profile:
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
        accumulate_s_per_byte: seconds of adding a micro-batch's gradients to the previous ones, per
            byte of them; `backward` and `weight_grad` of the layers are those of a first
            micro-batch.
        optimizer_states: optimizer state per parameter, which planners count as memory;
            `ps.plan(optimizer=)` sets it.
        schema: version of the file format.
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
    schema: int = SCHEMA

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerProfile]:
        return iter(self.layers)

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
        profile = read_json(path, cls, SCHEMA)
        try:
            _check_counts(profile, str(path))
            for layer in profile.layers:
                _check_counts(layer, f"{path}: layer {layer.name}")
                for phase in (layer.forward, layer.backward, layer.input_grad, layer.weight_grad):
                    check_timing(phase, f"{path}: layer {layer.name}")
        except SettingError as error:
            raise FileError(str(error)) from error
        return profile


def _check_counts(value: Profile | LayerProfile, where: str) -> None:
    """Raise an error if a count is negative; `where` begins the message."""
    for field_ in fields(value):
        number = getattr(value, field_.name)
        if isinstance(number, (int, float)) and number < 0:
            raise SettingError(f"{where}: {field_.name} is {number}, and cannot be below 0")


def check_timing(timing: Timing, where: str) -> None:
    """Raise an error if a timing is invalid.

    Its sizes must ascend, with one finite time of 0 s or more for each.

    Raises:
        SettingError: the timing is invalid; `where` begins the message.
    """
    sizes: Sequence[int] = timing.sizes
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise SettingError(f"{where}: sizes {list(sizes)} must be 1 or more and ascend")
    if len(timing.median_s) != len(sizes) or not all(
        0 <= t < float("inf") for t in timing.median_s
    ):
        raise SettingError(f"{where}: needs {len(sizes)} times of 0 s or more, one for each size")
