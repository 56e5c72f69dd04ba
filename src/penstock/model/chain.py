"""Layer and Chain: the description of a model that everything up to the plan works on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from penstock.errors import ChainError


@dataclass(frozen=True)
class TensorFacts:
    """A parameter or buffer: its name in the model's own `state_dict`, shape and dtype
    (`"float32"`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trainable: bool = False


@dataclass(frozen=True)
class Layer:
    """The smallest piece that is never cut.

    `name` is the module's qualified name in the model, `kind` its class name. `parameters` and
    `buffers` are the qualified names of all tensors that the layer uses; one that several layers
    use is listed by each of them.
    """

    name: str
    kind: str
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weights:
    """What a layer holds that no layer before it does: numbers in parameters, and bytes."""

    parameters: int
    parameter_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Chain:
    """Layers in the order in which they run, and the facts of every tensor they use, each once."""

    layers: tuple[Layer, ...]
    tensors: tuple[TensorFacts, ...] = ()
    _by_name: dict[str, TensorFacts] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {tensor.name: tensor for tensor in self.tensors})

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Layer:
        return self.layers[index]

    def tensor(self, name: str) -> TensorFacts:
        """The facts of one parameter or buffer."""
        return self._by_name[name]

    @property
    def weights(self) -> tuple[Weights, ...]:
        """Per layer, what it holds; tensors that several layers use count at the first."""
        counted: set[str] = set()
        found = []
        for layer in self.layers:
            own, kept = (
                [self._by_name[name] for name in dict.fromkeys(names) if name not in counted]
                for names in (layer.parameters, layer.buffers)
            )
            counted.update(layer.parameters, layer.buffers)
            found.append(
                Weights(
                    sum(prod(each.shape) for each in own),
                    sum(each.bytes for each in own),
                    sum(each.bytes for each in kept),
                )
            )
        return tuple(found)

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters, each parameter once however often it is used."""
        return sum(each.parameters for each in self.weights)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters and buffers that more than one layer uses, with the indices of those layers."""
        users: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for name in dict.fromkeys(layer.parameters + layer.buffers):
                users.setdefault(name, []).append(index)
        return {name: tuple(indices) for name, indices in users.items() if len(indices) > 1}

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that differ when layers, parameter names or shapes differ."""
        text = repr(
            [(layer.name, layer.kind, layer.parameters, layer.buffers) for layer in self.layers]
        )
        text += repr([(tensor.name, tensor.shape, tensor.dtype) for tensor in self.tensors])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def stage_bounds(self, lengths: tuple[int, ...] | list[int]) -> list[tuple[int, int]]:
        """First layer and one past the last layer of every stage.

        Raises:
            ChainError: a stage is empty, or the lengths do not add up to the chain.
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
