"""Layer and Chain: the description of a model that planning works on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from penstock.errors import ChainError, SettingError
from penstock.files.text import quote

#: Characters of the longest fingerprint in a file. `Chain.fingerprint` has twelve.
_MAX_FINGERPRINT = 64


def check_fingerprint(fingerprint: str, where: str) -> None:
    """Refuse the fingerprint of a damaged file: messages quote fingerprints as they are.

    Raises:
        SettingError: it is longer than any, or cannot be printed; `where` begins the message.
    """
    if len(fingerprint) > _MAX_FINGERPRINT or not fingerprint.isprintable():
        raise SettingError(
            f"{where}: the fingerprint {quote(fingerprint)} must be printable text of at most "
            f"{_MAX_FINGERPRINT} characters"
        )


@dataclass(frozen=True)
class TensorFacts:
    """A parameter or buffer.

    Attributes:
        name: its name in the model's `state_dict`.
        shape: its shape.
        dtype: its dtype as text, e.g. `"float32"`.
        bytes: its size in bytes.
        trainable: whether it is a parameter that requires a gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool = False


@dataclass(frozen=True)
class Layer:
    """The smallest unit of a partition; a layer is never split.

    Attributes:
        name: qualified name of the module in the model.
        kind: class name of the module.
        modules: qualified names of the modules that the layer runs.
        parameters, buffers: qualified names of all tensors that the layer uses. A tensor that
            several layers use is listed by each of them.
    """

    name: str
    kind: str
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weights:
    """Tensors that occur first in this layer: number of parameter elements, and sizes in bytes.

    `tensor_bytes` are those of each parameter. `tied_tensors` are the parameters of earlier layers
    that this layer uses too: the index of the layer, and the position there.
    """

    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    tensor_bytes: tuple[int, ...]
    tied_tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class Chain:
    """Layers in the order in which they run, and the facts of every tensor they use, each once.

    Examples:
        >>> from torch import nn
        >>> import penstock as ps
        >>> chain = ps.chain([nn.Linear(4, 8), nn.ReLU()]).description
        >>> len(chain), chain.stage_bounds([1, 1])
        (2, [(0, 1), (1, 2)])
    """

    layers: tuple[Layer, ...]
    tensors: tuple[TensorFacts, ...] = ()
    _by_name: dict[str, TensorFacts] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {tensor.name: tensor for tensor in self.tensors})

    def __repr__(self) -> str:
        return f"<Chain: {len(self)} layers, {self.parameter_count:,} parameters>"

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Layer:
        return self.layers[index]

    def tensor(self, name: str) -> TensorFacts:
        """Return the facts of a parameter or buffer."""
        return self._by_name[name]

    @property
    def weights(self) -> tuple[Weights, ...]:
        """Sizes per layer; a tensor that several layers use counts for the first of them."""
        counted: set[str] = set()
        first_uses: dict[str, tuple[int, int]] = {}
        weights = []
        for index, layer in enumerate(self.layers):
            parameters = self._uncounted(layer.parameters, counted)
            buffers = self._uncounted(layer.buffers, counted)
            counted.update(layer.parameters, layer.buffers)
            tied = [
                first_uses[name] for name in dict.fromkeys(layer.parameters) if name in first_uses
            ]
            for position, parameter in enumerate(parameters):
                first_uses[parameter.name] = (index, position)
            weights.append(
                Weights(
                    sum(prod(parameter.shape) for parameter in parameters),
                    sum(parameter.bytes for parameter in parameters),
                    sum(buffer.bytes for buffer in buffers),
                    tuple(parameter.bytes for parameter in parameters),
                    tuple(tied),
                )
            )
        return tuple(weights)

    def _uncounted(self, names: tuple[str, ...], counted: set[str]) -> list[TensorFacts]:
        """Return the tensors of these names that are not counted yet, each once."""
        # `dict.fromkeys` removes duplicates and keeps the order.
        return [self._by_name[name] for name in dict.fromkeys(names) if name not in counted]

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters, each parameter counted once."""
        return sum(layer.parameters for layer in self.weights)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters and buffers that several layers use, with the indices of these layers."""
        users: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for name in dict.fromkeys(layer.parameters + layer.buffers):
                users.setdefault(name, []).append(index)
        return {name: tuple(indices) for name, indices in users.items() if len(indices) > 1}

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that depend on layers, tensor names, shapes and dtypes."""
        text = repr(
            [(layer.name, layer.kind, layer.parameters, layer.buffers) for layer in self.layers]
        )
        text += repr([(tensor.name, tensor.shape, tensor.dtype) for tensor in self.tensors])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def stage_bounds(self, lengths: tuple[int, ...] | list[int]) -> list[tuple[int, int]]:
        """Return for every stage its first layer and the layer after its last.

        Args:
            lengths: number of layers of each stage.

        Raises:
            ChainError: a stage is empty, or the lengths do not add up to the number of layers.
        """
        if any(length < 1 for length in lengths) or sum(lengths) != len(self):
            raise ChainError(
                f"stage lengths {list(lengths)} sum to {sum(lengths)} and must be positive and "
                f"sum to {len(self)}, the number of layers"
            )
        bounds, start = [], 0
        for length in lengths:
            bounds.append((start, start + length))
            start += length
        return bounds
