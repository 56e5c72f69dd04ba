"""The divisor of a loss that a traced model computes itself.

Models of `transformers` do so from labels among their inputs. The graph of a traced model shows the
divisor. The labels depend on the inputs alone, which every rank has, so that the counts of all
micro-batches are known before their forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.batches.batch import Batch
from penstock.batches.device_batch import micro_batch_inputs, whole_inputs
from penstock.losses.sample_mixing import check_single_samples
from penstock.losses.terms import MEAN, SUM, UnknownForm, class_count, same
from penstock.tracing.form import Form
from penstock.tracing.ops import SHAPE_ALONE, argument, op_name
from penstock.tracing.traced_layer import StageInputs, TracedLayer
from penstock.tracing.variants import Variant
from penstock.values.structure import tensors_of

_SAME_VALUE = frozenset(
    {
        "alias",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "to",
        "_to_copy",
        "clone",
        "contiguous",
        "neg",
        "float",
        "detach_",
    }
)
_NLL = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
#: Where a graph's ctc_loss, which `tracing.interception` writes down, has its reduction.
_CTC_REDUCTION = 5
_ELEMENTWISE = frozenset(
    {
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "soft_margin_loss",
    }
)


@dataclass(frozen=True)
class Count:
    """What a micro-batch, or the batch, counts in one term of a loss.

    Attributes:
        value: the count; None for a sum.
        elements: number of elements that the term reduces; None if it is not known before.
    """

    value: float | None
    elements: int | None = None


@dataclass
class ModelLoss:
    """The last layer of a traced model, which computes the loss.

    Attributes:
        layer: the layer.
        device: where it computes.
    """

    layer: TracedLayer
    device: torch.device
    # Graphs, and places of the loss in their outputs, in which samples were not found to interact.
    _checked: set[tuple[Variant, int]] = field(default_factory=set)

    @classmethod
    def of(cls, layers: Sequence[nn.Module], device: torch.device) -> ModelLoss | None:
        """Return that of a stage's layers; None if the model is not traced."""
        last = layers[-1] if layers else None
        return cls(last, device) if isinstance(last, TracedLayer) else None

    def weights(self, batch: Batch, place: int) -> list[list[float]]:
        """Return the weights of the micro-batches, one list per term of the loss.

        Args:
            batch: the batch.
            place: index of the loss among the leaves of the model's output.

        Raises:
            UnknownForm: the loss is not a sum divided by a number, or samples interact in it.
        """
        rows = []
        for number, share in zip(batch.numbers, batch.shares, strict=True):
            part = self._reading(micro_batch_inputs(batch, number, self.device), share)
            rows.append(part.terms_of_output(place))
        # Not the sum of the counts of micro-batches: `count + 1` or `count.clamp(min=1)` of the
        # batch is less than that.
        reading = self._reading(whole_inputs(batch, self.device), 1.0)
        whole = reading.terms_of_output(place)
        if (reading.variant, place) not in self._checked:
            check_single_samples(reading.variant, reading.reductions)
            self._checked.add((reading.variant, place))
        if any(len(row) != len(whole) for row in rows):
            raise UnknownForm("terms that come and go")
        columns = zip(*rows, strict=True)
        return [
            _column(counts, total, batch.shares)
            for counts, total in zip(columns, whole, strict=True)
        ]

    def _reading(self, value: Any, share: float) -> _Reading:
        """Return what reads the graph with the inputs of a micro-batch, or of the batch.

        Args:
            value: the inputs.
            share: their share of the samples.
        """
        inputs = StageInputs(self.layer.variants, value, self.device)
        variant = inputs.variant(self.layer.training)
        return _Reading(inputs, variant, self.layer, share, Form.of(value).tensors)


def _column(counts: Sequence[Count], whole: Count, shares: list[float]) -> list[float]:
    """Return the weights of the micro-batches in one term.

    Args:
        counts: by micro-batch, its count.
        whole: the count of the batch.
        shares: by micro-batch, its share of the samples.

    Raises:
        UnknownForm: the term is a sum for some of them and a mean for others, or it does not reduce
            values of single samples.
    """
    if any((count.value is None) != (whole.value is None) for count in counts):
        raise UnknownForm("terms that come and go")
    for count, share in zip(counts, shares, strict=True):
        if count.elements is None or not whole.elements:
            continue
        # Such as the mean of several means, or of a matrix of pairs of samples.
        if not same(count.elements / whole.elements, share):
            raise UnknownForm("a sum or mean over values that are not those of single samples")
    if whole.value is None:
        return [1.0] * len(counts)
    return [(count.value or 0.0) / whole.value for count in counts] if whole.value else shares


def _output(variant: Variant, place: int) -> fx.Node:
    """Return the node of a leaf of the model's output."""
    nodes = [node for node in variant.flow.outputs if node is not None]
    # Placeholders in the structure of the output show which node is its leaf of this index.
    places = [torch.empty(0, device="meta") for _ in nodes]
    chosen = tensors_of(variant.output(places))[place]
    for node, tensor in zip(nodes, places, strict=True):
        if tensor is chosen:
            return node
    raise UnknownForm("a constant loss")


@dataclass
class _Reading:
    """Reads one graph with the inputs of one micro-batch, or of the batch.

    Attributes:
        inputs: the inputs of the stage.
        variant: the graph.
        layer: the layer that it belongs to.
        share: the share of these inputs in the samples of the batch.
        tensors: the tensors among these inputs.
        reductions: the ops that reduce to the terms which have been read.
    """

    inputs: StageInputs
    variant: Variant
    layer: TracedLayer
    share: float
    tensors: Sequence[Tensor]
    reductions: list[fx.Node] = field(default_factory=list)

    def terms_of_output(self, place: int) -> list[Count]:
        """Return the count of these inputs in each term of a leaf of the model's output."""
        return self.terms(_output(self.variant, place))

    def terms(self, node: fx.Node) -> list[Count]:
        """Return the count of these inputs in each term of a node."""
        name = op_name(node)
        if name in _SAME_VALUE or (name in ("mean", "sum") and _is_number(node.args[0])):
            return self.terms(_node(node.args[0]))
        if name in ("mean", "sum") and _stacked(node.args[0]):
            return [term for part in _stacked(node.args[0]) for term in self._parts(part)]
        if name in ("div", "true_divide", "mul"):
            return self._product(node, times=name == "mul")
        if name in ("add", "sub", "add_", "sub_"):
            return self._sum(node)
        return [self._reduction(node, name)]

    def _product(self, node: fx.Node, *, times: bool) -> list[Count]:
        """Return the terms of a product or quotient of terms with a number."""
        if node.kwargs.get("rounding_mode") is not None:
            raise UnknownForm("a quotient that is rounded")
        first, second = node.args[0], node.args[1]
        if times and (not isinstance(first, fx.Node) or self._is_computable(first)):
            first, second = second, first
        return self._scale_terms(self.terms(_node(first)), second, times)

    def _sum(self, node: fx.Node) -> list[Count]:
        """Return the terms of both operands; a value that depends on no output is a constant."""
        return [term for part in node.args[:2] for term in self._parts(part)]

    def _parts(self, operand: Any) -> list[Count]:
        """Return the terms of an operand of a sum; none of a constant."""
        if not isinstance(operand, fx.Node) or self._is_computable(operand):
            return []
        return self.terms(operand)

    def _reduction(self, node: fx.Node, name: str) -> Count:
        """Return the count of these inputs in a reduction to one number.

        Raises:
            UnknownForm: it is no reduction, or its count is not known before.
        """
        self.reductions.append(node)
        if name in _NLL:
            return self._nll(node)
        if name == "ctc_loss":
            return self._ctc(node)
        if name in _ELEMENTWISE:
            is_mean = argument(node, "reduction", MEAN) == MEAN
        elif name in ("mean", "sum"):
            is_mean = name == "mean"
        else:
            raise UnknownForm(name)
        elements = self._elements(_node(node.args[0]))
        if is_mean and elements is None:
            raise UnknownForm("a mean over elements that are chosen by their contents")
        return Count(self.share if is_mean else None, elements)

    def _elements(self, node: fx.Node) -> int | None:
        """Return the number of elements of a value; None if it depends on contents of the inputs."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        return self.variant.captured.domain.elements(value, self.tensors)

    def _is_computable(self, node: fx.Node) -> bool:
        """Whether a value depends on inputs and constants alone."""
        flow = self.variant.flow
        return node in flow.recomputed or node in flow.constants

    def _scale_terms(self, terms: list[Count], by: Any, times: bool) -> list[Count]:
        """Return terms multiplied or divided by a value."""
        number = float(self._number(by, "a factor"))
        # A factor of 1 / n stands for a count of n.
        if times and number:
            number = 1 / number
        return [
            replace(term, value=number if term.value is None else term.value * number)
            for term in terms
        ]

    def _number(self, value: Any, name: str) -> Any:
        """Return a number of the graph for these inputs.

        A constant of one graph, such as `len(labels)`, may be another one in that of others.

        Raises:
            UnknownForm: it depends on outputs.
        """
        if not isinstance(value, fx.Node):
            return value
        if not self._is_computable(value):
            raise UnknownForm(f"{name} that depends on outputs")
        (number,) = self.inputs.recompute(self.layer.training, [value])
        return number

    def _nll(self, node: fx.Node) -> Count:
        """Return the count in a negative log-likelihood or cross-entropy."""
        reduction = argument(node, "reduction", MEAN)
        elements = self._elements(_node(node.args[0]))
        if reduction == SUM:
            return Count(None, elements)
        if reduction != MEAN:
            raise UnknownForm("a loss that is not reduced")
        target = _node(node.args[1])
        if not self._is_computable(target):
            raise UnknownForm("targets that depend on outputs")
        if not _depends_on_contents(target):
            # Numbers of rows: each sample's own place is its class, as in a contrastive loss.
            raise UnknownForm("classes that are the numbers of the samples")
        (value,) = self.inputs.recompute(self.layer.training, [target])
        if value.is_floating_point():
            return Count(self.share, elements)
        # It may be a size, as in the span losses of transformers.
        ignored = int(self._number(argument(node, "ignore_index", -100), "an ignored class"))
        weight = self._weight(node)
        count = class_count(value, weight, ignored)
        if argument(node, "label_smoothing", 0.0) and not count and bool((value != ignored).any()):
            raise UnknownForm("label smoothing of targets whose class weights are all 0")
        return Count(count, elements)

    def _ctc(self, node: fx.Node) -> Count:
        """Return the count in a CTC loss: a mean over samples, or a sum."""
        reduction = node.args[_CTC_REDUCTION]
        if reduction in ("sum", SUM):
            return Count(None)
        if reduction not in ("mean", MEAN):
            raise UnknownForm("a loss that is not reduced")
        return Count(self.share)

    def _weight(self, node: fx.Node) -> Tensor | None:
        """Return the class weights of a loss; None without any."""
        weight = argument(node, "weight", None)
        if weight is None:
            return None
        if self._is_computable(weight):
            (value,) = self.inputs.recompute(self.layer.training, [weight])
            return value  # type: ignore[no-any-return]
        if weight not in self.variant.flow.weights:
            raise UnknownForm("class weights that the model computes")
        return self.layer.weight(self.variant.flow.weights[weight])


def _is_number(value: Any) -> bool:
    """Whether a value is a tensor without dimensions."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(tensor, Tensor) and not tensor.dim()


def _stacked(value: Any) -> list[Any]:
    """Return the numbers of a stack, `torch.stack([first_loss, second_loss])`; none of others."""
    is_stack = isinstance(value, fx.Node) and op_name(value) == "stack"
    parts = list(value.args[0]) if is_stack else []
    return parts if all(map(_is_number, parts)) else []


def _node(value: Any) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise UnknownForm("a constant loss")
    return value


def _depends_on_contents(node: fx.Node) -> bool:
    """Whether a value depends on the contents of the inputs, and not on shapes alone."""
    waiting, visited = [node], {node}
    while waiting:
        current = waiting.pop()
        if current.op == "placeholder":
            return True
        if op_name(current) in SHAPE_ALONE or op_name(current).startswith("sym_"):
            continue
        fresh = [used for used in current.all_input_nodes if used not in visited]
        visited.update(fresh)
        waiting += fresh
    return False
