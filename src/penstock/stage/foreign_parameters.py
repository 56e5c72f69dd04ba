"""Detection of gradients that would be lost, because they belong to parameters of other stages.

A layer may use another layer's weight without registering it, `self.head = [embedding]`, and a loss
may add a penalty on all weights of the model. On one device autograd sums their gradients. In a
pipeline the weight may be another stage's, on a rank that never receives the gradient. Therefore a
stage's graph must lead to the stage's own parameters alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.grad.split import graph_leaves
from penstock.modules.state_names import parameters_of
from penstock.tracing.traced_chain import TracedChain
from penstock.values.structure import tensors_of

#: Number of forms of micro-batches whose graphs are checked; further ones differ in length alone.
_MAX_FORMS = 64


@dataclass
class ModelParameters:
    """The names of a model's parameters by identity, without references that keep them alive.

    Attributes:
        named: by `id`, a weak reference to the parameter and its name.
    """

    named: Mapping[int, tuple[weakref.ref[nn.Parameter], str]]

    @classmethod
    def of(cls, traced: TracedChain) -> ModelParameters:
        """Return the names of a chain's parameters."""
        named = {
            id(parameter): (weakref.ref(parameter), name)
            for layer, module in zip(traced.layers, traced.modules, strict=True)
            for name, parameter in parameters_of(layer.name, module)
        }
        return cls(named)

    def name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter of the model; None for other tensors."""
        reference, name = self.named.get(id(tensor), (None, None))
        # After a parameter has been freed, another tensor may have its id.
        return name if reference is not None and reference() is tensor else None


@dataclass
class Reach:
    """Checks which parameters the graphs of one stage lead to.

    Attributes:
        stage: number of the stage.
        parameters: the parameters of the stage.
        model: the names of all parameters of the model.
        step: the last batch whose loss was checked.
    """

    stage: int
    parameters: Iterable[nn.Parameter]
    model: ModelParameters
    step: int = -1
    _checked_forms: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._parameter_ids = set(map(id, self.parameters))

    def check_output(self, form: str, value: Any) -> None:
        """Check the graph of the layers' output, once for each form of micro-batch.

        Args:
            form: a name that micro-batches of the same shapes share.
            value: the output of the stage's last layer.

        Raises:
            SettingError: the graph leads to a parameter of another stage.
        """
        if (
            form in self._checked_forms
            or len(self._checked_forms) >= _MAX_FORMS
            or not torch.is_grad_enabled()
        ):
            return
        self._checked_forms.add(form)
        for parameter in _parameters(_nodes_of(value)):
            name = self.model.name(parameter)
            if id(parameter) not in self._parameter_ids and name is not None:
                raise SettingError(
                    f"a layer of stage {self.stage} uses {name}, a parameter of another stage, "
                    "without having it as a parameter: its gradient would be lost. Assign the "
                    "parameter, or its module, to the layer itself, not in a list or a function, "
                    "so that the weight is tied; or move the cut so that both are in one stage"
                )

    def check_loss(self, batch: Batch, loss: Any, output: Any) -> None:
        """Check the part of the loss's graph above the model's output, once for each batch.

        Args:
            batch: the batch.
            loss: the loss of a micro-batch.
            output: the model's output.

        Raises:
            SettingError: it leads to a parameter that is not the stage's.
        """
        if not batch.training or batch.step == self.step:
            return
        root = loss.grad_fn if isinstance(loss, Tensor) else None
        if root is None:
            return
        self.step = batch.step
        if not torch.is_grad_enabled():
            return
        output_nodes = _nodes_of(output)
        foreign = self._foreign_parameters(root, output_nodes)
        if not foreign:
            return
        # A loss that changes the output in place leads to the layers' graph past its nodes.
        below_output = {id(parameter) for parameter in _parameters(output_nodes)}
        for parameter in foreign:
            if id(parameter) not in below_output:
                raise SettingError(self._loss_message(parameter))

    def _foreign_parameters(self, root: Node, ends: Iterable[Node]) -> list[nn.Parameter]:
        """Return the parameters that a graph leads to, except through `ends`, of other stages."""
        reachable = _parameters([root], ends)
        return [parameter for parameter in reachable if id(parameter) not in self._parameter_ids]

    def _loss_message(self, parameter: Tensor) -> str:
        """Return the message for a loss that uses a parameter of another stage or model."""
        name = self.model.name(parameter)
        if name is not None:
            return (
                f"the loss uses {name}, which is not a parameter of the last stage, {self.stage}, "
                "where the loss is computed, or not of this copy of it: its gradient would be lost "
                "or, on another rank, be that of old weights. For a penalty on weights use the "
                "optimizer's weight_decay, or ps.side_loss in the layer that has the weight"
            )
        return (
            f"the loss uses a trainable weight of shape {tuple(parameter.shape)} that is not the "
            "model's: optimizer= is called with the model's, so no stage would train it. Make it "
            "part of the model, in its last layer; or if it is not to be trained here, freeze it: "
            "requires_grad_(False)"
        )


def _nodes_of(value: Any) -> list[Node]:
    """Return the graph nodes of all tensors in a value."""
    tensors = [value] if isinstance(value, Tensor) else tensors_of(value)
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _parameters(roots: Iterable[Node], ends: Iterable[Node] = ()) -> list[nn.Parameter]:
    """Return the parameters that a graph leads to, except through the nodes `ends`."""
    return [leaf for leaf in graph_leaves(roots, ends) if isinstance(leaf, nn.Parameter)]
