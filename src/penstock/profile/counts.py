"""Device-independent counts of a model's layers, as plain data: operations, bytes and launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from penstock.errors import FileError, SettingError
from penstock.files.read import read_json
from penstock.files.text import shorten
from penstock.model.chain import check_fingerprint
from penstock.profile.profile import LayerDescription, Phase, check_fields, check_tensors
from penstock.store import write_json

SCHEMA = 1

#: Families of ops; each reaches its own share of a device's peak. `convolution_3x3` has stride and
#: dilation 1, so that Winograd's algorithm applies. `other` are all ops that only stream through
#: memory.
Family = Literal[
    "matrix",
    "convolution_3x3",
    "convolution",
    "grouped_convolution",
    "attention",
    "recurrent",
    "other",
]


@final
@dataclass(frozen=True)
class Work:
    """One launched op, or `launches` equal ones: a fixed part, and a part per sample.

    `flops` and `bytes` are of all launches together. A multiply-add counts as two operations. Bytes
    are the minimum that the op reads and writes; savings by caches, or repeated passes, belong to
    the device's efficiency.
    """

    op: str
    family: Family
    launches: int
    flops: float
    flops_per_sample: float
    bytes: float
    bytes_per_sample: float

    def flops_at(self, samples: float) -> float:
        """Return the operations for `samples` samples."""
        return max(self.flops + self.flops_per_sample * samples, 0.0)

    def bytes_at(self, samples: float) -> float:
        """Return the bytes read and written for `samples` samples."""
        return max(self.bytes + self.bytes_per_sample * samples, 0.0)


@final
@dataclass(frozen=True)
class LayerCounts(LayerDescription):
    """The work of one layer in each phase, and its bytes."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    input_grad: tuple[Work, ...]
    weight_grad: tuple[Work, ...]

    def work(self, phase: Phase) -> tuple[Work, ...]:
        """Return the ops of one phase."""
        ops: tuple[Work, ...] = getattr(self, phase)
        return ops

    def flops(self, phase: Phase, samples: float) -> float:
        """Return the operations of one phase for `samples` samples."""
        return sum(work.flops_at(samples) for work in self.work(phase))

    def launches(self, phase: Phase) -> int:
        """Return the number of ops that one phase launches."""
        return sum(work.launches for work in self.work(phase))


@final
@dataclass(frozen=True)
class ModelCounts:
    """A model's layers with their work.

    `dtype_bytes` is the width of the weights that were counted. `float_input_bytes_per_sample` is
    the part of `input_bytes_per_sample` that shrinks with a narrower dtype: tokens do not.
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
        """Number of all parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    def flops(self, phase: Phase, samples: float) -> float:
        """Return the operations of one phase of the whole model for `samples` samples."""
        return sum(layer.flops(phase, samples) for layer in self.layers)

    def save(self, path: str | Path) -> None:
        """Write JSON with a schema version."""
        write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> ModelCounts:
        """Read what `save` wrote, and validate it.

        Raises:
            FileError: the file is missing, does not contain model counts, has a different schema
                version, or contains an invalid count.
        """
        counts = read_json(path, cls, SCHEMA)
        try:
            check_counts(counts, str(path))
        except SettingError as error:
            raise FileError(str(error)) from error
        return counts


def check_counts(counts: ModelCounts, where: str) -> None:
    """Raise an error if counts are impossible: negative, or an op without launches.

    The fixed part of an op may be negative: no op costs less for each further sample than for the
    first, but two sizes that run different code can fit such a line. Its value for one sample may
    not be negative.

    Raises:
        SettingError: the counts are impossible; `where` begins the message.
    """
    check_fields(counts, where)
    check_fingerprint(counts.fingerprint, where)
    for index, layer in enumerate(counts.layers):
        check_fields(layer, f"{where}: layer {shorten(layer.name)}")
        check_tensors(counts.layers, index, f"{where}: layer {shorten(layer.name)}")
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
                    f"{where}: layer {shorten(layer.name)}: {work.op} has {work.launches} launches "
                    f"and a count of {least}: launches are 1 or more, counts 0 or more"
                )
