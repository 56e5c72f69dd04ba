"""Gradients that go further than they are taken: a stage's graph must lead to the stage's own
parameters alone.

A layer may use another one's weight without registering it, `self.head = [embedding]`, and a loss
may add a penalty on the whole model's weights. On one device autograd adds their gradients up. Here
the weight is another stage's, whose rank never hears of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from penstock.errors import SettingError
from penstock.runtime.batch import Batch
from penstock.tracing.chain import TracedChain
from penstock.tracing.names import parameters_of
from penstock.values.structure import tensors_of

#: Graphs of so many forms of micro-batches are looked at. Later ones are those of other lengths.
_MOST_FORMS = 64


@dataclass
class ModelParameters:
    """The names of a model's parameters, by identity; it keeps none of them alive."""

    named: Mapping[int, tuple[weakref.ref[nn.Parameter], str]]

    @classmethod
    def of(cls, traced: TracedChain) -> ModelParameters:
        """Those of a chain."""
        named = {
            id(parameter): (weakref.ref(parameter), name)
            for layer, module in zip(traced.layers, traced.modules, strict=True)
            for name, parameter in parameters_of(layer.name, module)
        }
        return cls(named)

    def name(self, tensor: Tensor) -> str | None:
        """The name of one of them; None for other tensors."""
        reference, name = self.named.get(id(tensor), (None, None))
        return name if reference is not None and reference() is tensor else None


@dataclass
class Reach:
    """What the graphs of one stage may lead to.

    Attributes:
        stage: which one.
        own: its parameters.
        model: all of the model's.
        step: the last batch whose loss was looked at.
    """

    stage: int
    own: Iterable[nn.Parameter]
    model: ModelParameters
    step: int = -1
    _forms: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._known = set(map(id, self.own))

    def check_output(self, form: str, value: Any) -> None:
        """Look at the graph of what the layers made, once for every form.

        Raises:
            SettingError: it leads to a parameter of another stage.
        """
        if form in self._forms or len(self._forms) >= _MOST_FORMS or not torch.is_grad_enabled():
            return
        self._forms.add(form)
        for parameter in _parameters(_nodes_of(value), frozenset()):
            name = self.model.name(parameter)
            if id(parameter) not in self._known and name is not None:
                raise SettingError(
                    f"a layer of stage {self.stage} uses {name}, a parameter of another stage, without having it as a parameter: "
                    "its gradient would be lost. Assign the parameter, or its module, to the layer itself, not in a list or a "
                    "function, so that the weight is tied; or move the cut so that both are in one stage"
                )

    def check_loss(self, batch: Batch, loss: Any, output: Any) -> None:
        """Look at what the loss adds to the graph of the model's output, once for every batch.

        Raises:
            SettingError: it leads to a parameter that is none of the stage's.
        """
        if not batch.training or batch.step == self.step:
            return
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        self.step = batch.step
        if not torch.is_grad_enabled():
            return
        ends = frozenset(_nodes_of(output))
        foreign = [
            each for each in _parameters([loss.grad_fn], ends) if id(each) not in self._known
        ]
        if not foreign:
            return
        # A loss that changes the output in place leads to the layers' graph by another way.
        before = {id(each) for each in _parameters(ends, frozenset())}
        for parameter in foreign:
            if id(parameter) not in before:
                raise SettingError(self._loss_message(parameter))

    def _loss_message(self, parameter: Tensor) -> str:
        name = self.model.name(parameter)
        if name is not None:
            return (
                f"the loss uses {name}, which is not a parameter of the last stage, {self.stage}, where the loss is computed, or not "
                "of this copy of it: its gradient would be lost or, on another rank, of old weights. A penalty on weights is given by the optimizer's "
                "weight_decay, or by ps.side_loss in the layer that has the weight"
            )
        return (
            f"the loss uses a trainable weight of shape {tuple(parameter.shape)} that is not the model's: optimizer= is called "
            "with the model's, so no stage would train it. Make it part of the model, in its last layer; or if it is not to be "
            "trained here, freeze it: requires_grad_(False)"
        )


def _nodes_of(value: Any) -> list[Node]:
    tensors = [value] if isinstance(value, Tensor) else tensors_of(value)
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _parameters(roots: Iterable[Node], ends: frozenset[Node]) -> Iterator[nn.Parameter]:
    """The parameters that a graph leads to, without the part below `ends`."""
    stack = [root for root in roots if root not in ends]
    seen = {*ends, *stack}
    while stack:
        node = stack.pop()
        variable = getattr(
            node, "variable", None
        )  # only nodes that add to a leaf's gradient have one
        if isinstance(variable, nn.Parameter):
            yield variable
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        stack += following
