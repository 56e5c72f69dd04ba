"""The layers of a traced model: modules that hold the model's own tensors, and run their part of
its graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from penstock.errors import ChainError
from penstock.tracing.capture import Form
from penstock.tracing.variants import Variant, Variants
from penstock.values.constants import Whole

#: In the value between two layers, what goes with it and never crosses: its name is none that a
#: graph has.
INPUTS = "inputs."


@final
class Given(Whole):
    """A micro-batch's inputs on a stage, and what its layers have made of them alone."""

    def __init__(self, variants: Variants, inputs: Any, device: torch.device | None = None) -> None:
        form = Form.of(inputs)
        tensors = form.tensors
        self.device = device or next((tensor.device for tensor in tensors), torch.device("cpu"))
        self._tensors = [tensor.to(self.device) for tensor in tensors]
        self._variants, self._form = variants, form
        self._found: dict[bool, tuple[Variant, dict[fx.Node, Any]]] = {}

    def variant(self, training: bool) -> Variant:
        """The graph for these inputs."""
        return self._of(training)[0]

    def again(self, training: bool, wanted: Sequence[fx.Node]) -> list[Any]:
        """Values that depend on the inputs alone, each made once."""
        variant, made = self._of(training)
        missing = tuple(node for node in wanted if node not in made)
        if missing:
            function, sources = variant.remaker(missing)
            given = [
                made[node] if node in made else variant.held(node, self.device) for node in sources
            ]
            made.update(zip(missing, function(self.device, *given), strict=True))
        return [made[node] for node in wanted]

    def _of(self, training: bool) -> tuple[Variant, dict[fx.Node, Any]]:
        found = self._found.get(training)
        if found is None:
            variant = self._variants.find(self._form, training)
            found = self._found[training] = (
                variant,
                dict(zip(variant.flow.inputs, self._tensors, strict=True)),
            )
        return found


@final
class TracedLayer(nn.Module):
    """A layer of a traced model. Its tensors are the model's own, and stand in it under the names
    they have in the model.

    In training mode it runs the model in the modes that the parts of this have; in evaluation mode,
    all of it in evaluation mode.

    Between layers goes a dict of what is made before and needed behind, by the names of the graph,
    and with it, under `INPUTS`, the micro-batch's inputs; the first takes these as they come, the
    last returns what the model returns.
    """

    #: See `penstock.tracing.names`.
    whole_names = True

    def __init__(
        self,
        index: int,
        variants: Variants,
        tensors: Mapping[str, tuple[str, bool]],
    ) -> None:
        """Make a layer.

        Args:
            index: of the layer.
            variants: the model's graphs.
            tensors: by every name that a tensor has here, the first of its names in the model, and
            whether it is part of the state.
        """
        super().__init__()
        self._index, self._variants = index, variants
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for name, (first, persistent) in tensors.items():
            self._hold(name, first, persistent)

    def _hold(self, name: str, first: str, persistent: bool) -> None:
        holder: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            # Written into the dict: a module of the model may have a name that nn.Module, or this
            # class, uses itself.
            holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        tensor = self._variants.tensors[first]
        if isinstance(tensor, nn.Parameter):
            holder._parameters[key] = tensor
            place: dict[str, Any] = holder._parameters
        else:
            holder._buffers[key] = tensor
            place = holder._buffers
            if not persistent:
                holder._non_persistent_buffers_set.add(key)
        self._places.setdefault(first, (place, key))

    @property
    def draws(self) -> bool:
        """Whether it could draw random numbers, in any graph known so far."""
        return self._variants.draws(self._index)

    @property
    def index(self) -> int:
        """Of the layer in its chain."""
        return self._index

    @property
    def variants(self) -> Variants:
        """The model's graphs."""
        return self._variants

    @property
    def places(self) -> dict[str, tuple[dict[str, Any], str]]:
        """By the first of its names in the model, where a tensor is held."""
        return self._places

    def weight(self, first: str) -> Tensor:
        """The tensor whose first name in the model this is.

        Raises:
            ChainError: another layer has it.
        """
        place = self._places.get(first)
        if place is None:
            raise ChainError(
                f"for inputs of this form, layer {self._index} uses {first}, which another layer holds: make the chain with an "
                "example of this form"
            )
        found: Tensor = place[0][place[1]]
        return found

    def forward(self, value: Any) -> Any:
        """Run the layer."""
        given = (
            value[INPUTS]
            if type(value) is dict and INPUTS in value
            else Given(self._variants, value, self._device())
        )
        variant = given.variant(self.training)
        segment = variant.segments[self._index]
        made = segment.run(
            given.device,
            *[self.weight(variant.flow.weights[node]) for node in segment.weights],
            *[value[node.name] for node in segment.taken],
            *given.again(self.training, segment.again),
        )
        if segment.is_last:
            return variant.output(made)
        handed = {name: value[name] for name in segment.kept}
        handed.update(zip(segment.made_names, made, strict=True))
        handed[INPUTS] = given
        return handed

    def _device(self) -> torch.device | None:
        return next((place[key].device for place, key in self._places.values()), None)

    def extra_repr(self) -> str:
        """Which layer it is."""
        return f"layer {self._index} of {self._variants.model_name}"


@final
class Entry(nn.Module):
    """What a stage that begins inside a traced model does first: the micro-batch's inputs join what
    came over the boundary.
    """

    def __init__(self, variants: Variants) -> None:
        super().__init__()
        self._variants = variants

    def forward(self, crossed: Any, inputs: Any) -> Any:
        """What the stage's first layer takes."""
        device = next((each.device for each in crossed.values() if isinstance(each, Tensor)), None)
        return {**crossed, INPUTS: Given(self._variants, inputs, device)}


def leave(made: Any) -> Any:
    """What crosses a boundary: all that a layer hands on but the inputs."""
    return {name: value for name, value in made.items() if name != INPUTS}
