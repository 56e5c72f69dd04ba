"""What a model's layers do, as plain data: operations, bytes moved and launches, whatever the
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, final

from penstock.errors import FileError, SettingError
from penstock.profile.profile import Phase
from penstock.store import read_json, write_json

SCHEMA = 1

#: What an op is to a device; each family reaches a share of the peak of its own. `convolution_3x3`
#: has stride and dilation 1: what
#: Winograd's algorithm can do as well. `other` is everything that only streams through memory.
Family = Literal[
    "matrix",
    "convolution_3x3",
    "convolution",
    "grouped_convolution",
    "attention",
    "recurrent",
    "other",
]
FAMILIES: tuple[Family, ...] = (
    "matrix",
    "convolution_3x3",
    "convolution",
    "grouped_convolution",
    "attention",
    "recurrent",
    "other",
)


@final
@dataclass(frozen=True)
class Work:
    """One launched op, or `launches` equal ones: a fixed part, and what each sample adds.

    `flops` and `bytes` are of all launches together. A multiplication with its addition counts two.
    Bytes are those that the op reads and writes at least; what caches save or passes repeat is a
    matter of the device's efficiency.
    """

    op: str
    family: Family
    launches: int
    flops: float
    flops_per_sample: float
    bytes: float
    bytes_per_sample: float

    def flops_at(self, samples: float) -> float:
        """Operations for `samples` samples."""
        return max(self.flops + self.flops_per_sample * samples, 0.0)

    def bytes_at(self, samples: float) -> float:
        """Bytes read and written for `samples` samples."""
        return max(self.bytes + self.bytes_per_sample * samples, 0.0)


@final
@dataclass(frozen=True)
class LayerCounts:
    """One layer's work in each phase; names and byte counts are those of `LayerProfile`."""

    name: str
    kind: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    input_grad: tuple[Work, ...]
    weight_grad: tuple[Work, ...]
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes_per_sample: float
    output_bytes_per_sample: float
    entry_bytes_per_sample: float = 0.0

    def work(self, phase: Phase) -> tuple[Work, ...]:
        """The ops of one phase."""
        found: tuple[Work, ...] = getattr(self, phase)
        return found

    def flops(self, phase: Phase, samples: float) -> float:
        """Operations of one phase for `samples` samples."""
        return sum(work.flops_at(samples) for work in self.work(phase))

    def bytes_moved(self, phase: Phase, samples: float) -> float:
        """Bytes that one phase reads and writes for `samples` samples."""
        return sum(work.bytes_at(samples) for work in self.work(phase))

    def launches(self, phase: Phase) -> int:
        """Ops that one phase launches."""
        return sum(work.launches for work in self.work(phase))


@final
@dataclass(frozen=True)
class ModelCounts:
    """A model's layers with what they do. `dtype_bytes`: of a number of the weights that were
    counted.

    `float_input_bytes_per_sample` is the part of `input_bytes_per_sample` that a narrower dtype
    makes smaller: tokens stay what they are.
    """

    layers: tuple[LayerCounts, ...]
    fingerprint: str
    input_bytes_per_sample: float
    float_input_bytes_per_sample: float
    batch: int
    dtype_bytes: int = 4
    torch_version: str = ""
    schema: int = SCHEMA

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerCounts]:
        return iter(self.layers)

    @property
    def parameters(self) -> int:
        """Numbers in all parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    def flops(self, phase: Phase, samples: float) -> float:
        """Operations of one phase of the whole model for `samples` samples."""
        return sum(layer.flops(phase, samples) for layer in self.layers)

    def save(self, path: str | Path) -> None:
        """Write JSON with a schema version."""
        write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> ModelCounts:
        """Read what `save` wrote, trusting nothing.

        Raises:
            FileError: the file is missing, is no model counts, has another schema version, or a
            count in it is below 0.
        """
        counts = read_json(path, cls, SCHEMA)
        try:
            check_counts(counts, str(path))
        except SettingError as error:
            raise FileError(str(error)) from error
        return counts


def check_counts(counts: ModelCounts, where: str) -> None:
    """Refuse counts that cannot be: below 0, or a launch of nothing.

    The fixed part of an op may be below 0 (an op that costs less for each further sample than for
    the first does not exist, but two sizes that take different ways do): what it is at one sample
    may not.

    Raises:
        SettingError: it is so; `where` begins the message.
    """
    _check_fields(counts, where)
    for layer in counts.layers:
        _check_fields(layer, f"{where}: layer {layer.name}")
        for work in (*layer.forward, *layer.backward, *layer.input_grad, *layer.weight_grad):
            least = min(
                work.launches,
                work.flops_per_sample,
                work.bytes_per_sample,
                work.flops + work.flops_per_sample,
                work.bytes + work.bytes_per_sample,
            )
            if least < 0 or not work.launches:
                raise SettingError(
                    f"{where}: layer {layer.name}: {work.op} has {work.launches} launches and a count of {least}: "
                    "launches are 1 or more, counts 0 or more"
                )


def _check_fields(value: ModelCounts | LayerCounts, where: str) -> None:
    for field in fields(value):
        number = getattr(value, field.name)
        if isinstance(number, (int, float)) and number < 0:
            raise SettingError(f"{where}: {field.name} is {number}, and cannot be below 0")
