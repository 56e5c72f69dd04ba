"""Layers of a traced model: modules with the model's tensors that run a part of its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from penstock.errors import ChainError
from penstock.tracing.form import Form
from penstock.tracing.variants import Variant, Variants, held_elsewhere
from penstock.values.constants import Whole

#: Key of the micro-batch's inputs in the value between two layers. They are not sent to other
#: stages. No value of a graph has such a name.
INPUTS = "inputs."


@final
class StageInputs(Whole):
    """The inputs of a micro-batch on a stage, and the values recomputed from them.

    Args:
        variants: the model's graphs.
        inputs: the inputs.
        device: where they are copied to; by default they stay on the device of the first tensor.
    """

    def __init__(self, variants: Variants, inputs: Any, device: torch.device | None = None) -> None:
        form = Form.of(inputs)
        tensors = form.tensors
        self.device = device or next((tensor.device for tensor in tensors), torch.device("cpu"))
        self._tensors = [tensor.to(self.device) for tensor in tensors]
        self._variants, self._form, self._inputs = variants, form, inputs
        self._values: dict[bool, tuple[Variant, dict[fx.Node, Any]]] = {}
        self._copies: dict[torch.device, StageInputs] = {}

    def on(self, device: torch.device) -> StageInputs:
        """Return the same inputs on another device; they are copied there once."""
        if device == self.device:
            return self
        if device not in self._copies:
            self._copies[device] = StageInputs(self._variants, self._inputs, device)
        return self._copies[device]

    def variant(self, training: bool) -> Variant:
        """Return the graph for these inputs."""
        return self._of(training)[0]

    def recompute(self, training: bool, nodes: Sequence[fx.Node]) -> list[Any]:
        """Return values that depend on the inputs alone; each is computed once."""
        variant, values = self._of(training)
        for node in nodes:
            if node in variant.flow.constants:
                values[node] = variant.value_on(node, self.device)
        missing = tuple(node for node in nodes if node not in values)
        if missing:
            function, sources = variant.recomputation_function(missing)
            arguments = [
                values[node] if node in values else variant.value_on(node, self.device)
                for node in sources
            ]
            values.update(zip(missing, function(self.device, *arguments), strict=True))
        return [values[node] for node in nodes]

    def _of(self, training: bool) -> tuple[Variant, dict[fx.Node, Any]]:
        """Return the graph for a mode, and the values of its inputs."""
        entry = self._values.get(training)
        if entry is None:
            variant = self._variants.find(self._form, training)
            values = dict(zip(variant.flow.inputs, self._tensors, strict=True))
            entry = self._values[training] = (variant, values)
        return entry


@final
class TracedLayer(nn.Module):
    """A layer of a traced model, with the model's own tensors under their names in the model.

    In training mode, the model's parts run in their own modes; in evaluation mode all run in
    evaluation mode.

    The value between two layers is a dict: values of earlier layers that later layers use, by their
    names in the graph, and the micro-batch's inputs under `INPUTS`. The first layer takes the
    inputs, and the last returns the model's output.
    """

    #: See `penstock.modules.state_names`.
    whole_names = True

    def __init__(
        self,
        index: int,
        variants: Variants,
        tensors: Mapping[str, tuple[str, bool]],
    ) -> None:
        """Create a layer.

        Args:
            index: index of the layer.
            variants: the model's graphs.
            tensors: by every name of a tensor in this layer, its first name in the model, and
                whether it is part of the `state_dict`.
        """
        super().__init__()
        self._index, self._variants = index, variants
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for name, (first, persistent) in tensors.items():
            self._hold(name, first, persistent)

    def _hold(self, name: str, first: str, persistent: bool) -> None:
        """Add a tensor of the model under a name."""
        holder: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            # Written into the dict directly, since a module of the model may have the name of an
            # attribute of nn.Module or of this class.
            holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        tensor = self._variants.tensors[first]
        if isinstance(tensor, nn.Parameter):
            holder._parameters[key] = tensor
            members: dict[str, Any] = holder._parameters
        else:
            holder._buffers[key] = tensor
            members = holder._buffers
            if not persistent:
                holder._non_persistent_buffers_set.add(key)
        self._places.setdefault(first, (members, key))

    @property
    def draws(self) -> bool:
        """Whether the layer may draw random numbers, in any graph captured so far."""
        return self._index in self._variants.drawing

    @property
    def index(self) -> int:
        """Index of the layer in its chain."""
        return self._index

    @property
    def variants(self) -> Variants:
        """The model's graphs."""
        return self._variants

    @property
    def places(self) -> dict[str, tuple[dict[str, Any], str]]:
        """By a tensor's first name in the model, the dict that contains it and its key there."""
        return self._places

    def weight(self, first: str) -> Tensor:
        """Return the tensor with this first name in the model.

        Raises:
            ChainError: another layer has it.
        """
        place = self._places.get(first)
        if place is None:
            raise ChainError(held_elsewhere(self._index, first))
        members, key = place
        tensor: Tensor = members[key]
        return tensor

    def forward(self, value: Any) -> Any:
        """Run the layer."""
        # The inputs of the model, which the first layer takes, may be a dict as well.
        if type(value) is dict and INPUTS in value:
            inputs = value[INPUTS]
        else:
            inputs = StageInputs(self._variants, value, self._device())
        variant = inputs.variant(self.training)
        segment = variant.segments[self._index]
        outputs = segment.run(
            inputs.device,
            *[self.weight(variant.flow.weights[node]) for node in segment.weights],
            *[value[node.name] for node in segment.arriving],
            *inputs.recompute(self.training, segment.recomputed),
        )
        if segment.is_last:
            return variant.output(outputs)
        leaving = {name: value[name] for name in segment.forwarded}
        leaving.update(zip(segment.leaving_names, outputs, strict=True))
        leaving[INPUTS] = inputs
        return leaving

    def _device(self) -> torch.device | None:
        """Return the device of the weights; None without weights."""
        return next((members[key].device for members, key in self._places.values()), None)

    def extra_repr(self) -> str:
        """Return index and model of the layer."""
        return f"layer {self._index} of {self._variants.model_name}"


@final
class Entry(nn.Module):
    """First step of a stage that begins inside a traced model: adds the micro-batch's inputs."""

    def __init__(self, variants: Variants) -> None:
        super().__init__()
        self._variants = variants

    def forward(self, crossed: Any, inputs: Any) -> Any:
        """Return the input of the stage's first layer.

        Args:
            crossed: the value that was sent over the boundary.
            inputs: the micro-batch's inputs.
        """
        device = next(
            (tensor.device for tensor in crossed.values() if isinstance(tensor, Tensor)), None
        )
        return {**crossed, INPUTS: StageInputs(self._variants, inputs, device)}


def with_inputs_on(value: Any, device: torch.device) -> Any:
    """Return the value between two layers with the micro-batch's inputs on a device.

    Where a value goes from one device to another in one process, its tensors have been moved, and
    the inputs have not: they cross as a constant. Values of models that are not traced are returned
    as they are.
    """
    inputs = value.get(INPUTS) if type(value) is dict else None
    if not isinstance(inputs, StageInputs):
        return value
    return {**value, INPUTS: inputs.on(device)}


def leave(output: Any) -> Any:
    """Return the value that is sent over a boundary: a layer's output without the inputs."""
    return {name: value for name, value in output.items() if name != INPUTS}
