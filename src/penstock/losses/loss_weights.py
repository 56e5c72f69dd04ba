"""Weights of micro-batches in the loss of a batch.

With these weights the losses of the micro-batches add up to the loss of the undivided batch. A mean
over samples weighs a micro-batch by its samples, a mean over tokens that are not padding by those
tokens, and a sum by 1. Every rank has the targets of the whole batch, so the last stage knows all
weights before its first backward. They are determined by the first of these that applies:

1. `loss_weight(target)` of the caller.
2. The count of a loss that returns `(sum, count)`.
3. The divisor of the loss, read from its graph (`symbolic.py`), or from the graph of a traced model
   that computes its loss itself (`traced_loss.py`).
4. A numeric test of whether the loss is a mean or a sum over samples (`probe.py`). It also checks
   3, except for torch's own losses.

A loss that adds up in none of these ways is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.losses.additivity import AdditivityTest
from penstock.losses.call import LossCall
from penstock.losses.caller_weights import CallerCounts
from penstock.losses.graph import is_per_row
from penstock.losses.messages import (
    WAYS_OUT,
    count_differs,
    model_loss,
    smoothing_without_weight,
)
from penstock.losses.probe import ReturnsCount
from penstock.losses.shares import (
    common_weights,
    mean_or_sum_weights,
    ones,
    rounded_to_shares,
    sum_weights,
    weights_by_term,
    weights_of,
)
from penstock.losses.symbolic import Evaluation, Unpredictable
from penstock.losses.terms import (
    MEAN,
    Term,
    UnknownForm,
    class_counts,
    ignored_index,
    same,
    terms_of,
)
from penstock.losses.traced_loss import ModelLoss
from penstock.losses.view import View
from penstock.modules.side_loss import collect_side_losses
from penstock.values.rare_checks import is_due
from penstock.values.structure import tensors_of

#: Number of forms of batches whose analysis is cached.
_MOST_FORMS = 256
#: A loss whose divisor is unknown is tested on every batch up to this one, then on batches 128,
#: 256, 512 and so on.
_ALWAYS_UP_TO = 64
#: Elements of a micro-batch's output above which the test's copies of it (64 MiB each in float32)
#: are avoided if the graph suffices.
_LARGE_OUTPUT = 1 << 24


@dataclass(frozen=True)
class Classes:
    """The leaf of the targets that holds the class indices over which a loss is a mean."""

    leaf: int
    ignore_index: int
    weight: Tensor | None


@dataclass(frozen=True)
class Knowledge:
    """Results of analysing a loss on batches of one form.

    Attributes:
        weights: the weights, if they are equal for all batches of this form.
        classes: the class indices, if the weights are counted in them.
        adds_up: "shares" (a mean) or "sums", over samples and over the tokens of slices, for a loss
            whose graph is not understood.
    """

    weights: list[float] | None = None
    classes: Classes | None = None
    adds_up: tuple[str, str] | None = None


@dataclass(frozen=True)
class _GraphWeights:
    """Weights that were read from the graph of a loss.

    Attributes:
        weights: by micro-batch, its weight.
        first: the evaluation of the loss on the micro-batch that has been run.
    """

    weights: list[float]
    first: Evaluation


@dataclass
class LossWeights:
    """The weights of one loss, on one replica of the last stage.

    Attributes:
        call: the loss.
        loss_weight: returns the weight of a micro-batch for its targets, if the caller gave it.
        layers: the modules of the stage, for losses that the model computes itself.
    """

    call: LossCall
    loss_weight: Callable[[Any], Any] | None = None
    layers: Sequence[nn.Module] = ()
    _knowledge_by_key: dict[object, Knowledge] = field(default_factory=dict)
    _batches: int = 0
    _additivity: AdditivityTest = field(default_factory=AdditivityTest)
    _model_sums: bool = False

    def __post_init__(self) -> None:
        self._model = ModelLoss.of(self.layers, self.call.device)

    def of(self, batch: Batch, number: int, value: Any) -> list[float]:
        """Return the weights of all micro-batches or slices of a batch.

        Called before the first loss of the batch is computed.

        Args:
            batch: the batch, which has targets.
            number: a micro-batch that has been run.
            value: the model's output for it, with its graph.

        Raises:
            SettingError: the losses of micro-batches do not add up to that of the batch, or that
                cannot be determined.
        """
        weights = self.known(batch)
        if weights is not None:
            return weights
        # Side losses that test evaluations of the loss add must not reach those of the batch.
        outer = collect_side_losses(None)
        try:
            self._batches += 1
            views = View.all(self.call, batch, number, value, self._batches)
            if self.loss_weight is not None:
                weights = self._by_caller(batch)
            else:
                key = self._key_of(batch)
                knowledge = self._knowledge_by_key.get(key)
                test = knowledge is None or self._is_due(knowledge, self._batches)
                weights = self._by_loss(views, key, test=test)
            _check_smoothing(views[0], weights)
            return weights
        finally:
            collect_side_losses(outer)

    def known(self, batch: Batch) -> list[float] | None:
        """Return the weights of a batch if earlier ones of its form have shown how to count them.

        None if the loss has to be looked at, which takes an output of the model. Called once per
        batch, or again if the result was None.
        """
        if len(batch.inputs) == 1:
            return batch.shares
        if self.loss_weight is not None:
            return None
        knowledge = self._knowledge_by_key.get(self._key_of(batch))
        if knowledge is None or self._is_due(knowledge, self._batches + 1):
            return None
        weights = self._by_knowledge(batch, knowledge)
        if weights is not None:
            self._batches += 1
        return weights

    def _by_knowledge(self, batch: Batch, knowledge: Knowledge) -> list[float] | None:
        """Return the weights without another look at the loss; None if that takes one."""
        if knowledge.adds_up is not None:
            return mean_or_sum_weights(batch, knowledge.adds_up)
        if knowledge.classes is not None:
            return self._by_classes(batch, knowledge.classes)
        return knowledge.weights

    def _is_due(self, knowledge: Knowledge, number: int) -> bool:
        """Whether batch `number` is tested again: batches 1, 2, 4, 8, ... are."""
        if knowledge.adds_up is not None and number <= _ALWAYS_UP_TO:
            return True
        return is_due(number)

    def _key_of(self, batch: Batch) -> object:
        """Return the form of a batch, its targets and the loss, under which knowledge is kept."""
        target, settings = batch.whole[1], self.call.settings()
        if type(target) is Tensor:
            return batch.signature, target.shape, target.dtype, settings
        forms = tuple((leaf.shape, leaf.dtype) for leaf in tensors_of(target))
        return batch.signature, forms, settings

    def _remember(self, key: object, knowledge: Knowledge) -> None:
        if len(self._knowledge_by_key) >= _MOST_FORMS:
            self._knowledge_by_key.clear()
        self._knowledge_by_key[key] = knowledge

    def _by_caller(self, batch: Batch) -> list[float]:
        """Return the weights by `loss_weight`."""
        assert self.loss_weight is not None
        counts = CallerCounts(self.loss_weight, self.call).of(batch)
        batch.loss_counts = dict(enumerate(counts))
        return weights_of(counts, sum(counts), batch.shares)

    def _by_classes(self, batch: Batch, classes: Classes) -> list[float]:
        """Return the weights of a mean over class indices."""
        whole = tensors_of(batch.whole[1])[classes.leaf]
        assert batch.targets is not None
        targets = batch.targets
        if classes.weight is None and not bool((whole == classes.ignore_index).any()):
            if not self.call.is_torchs:
                # A function may use other weights, or ignore another class, from some batch on:
                # `check` compares its divisors.
                sizes = [float(tensors_of(target)[classes.leaf].numel()) for target in targets]
                batch.loss_counts = dict(enumerate(sizes))
            return batch.shares
        if classes.weight is not None and self.call.host_target(batch, None) is None:
            targets = [self.call.target(batch, number) for number in batch.numbers]
        leaves = [tensors_of(target)[classes.leaf] for target in targets]
        counts = class_counts(leaves, classes.weight, classes.ignore_index)
        batch.loss_counts = dict(enumerate(counts))
        return weights_of(counts, sum(counts), batch.shares)

    def _by_loss(self, views: Sequence[View], key: object, *, test: bool) -> list[float]:
        """Return the weights that the graph of the loss shows, or else a numeric test.

        Args:
            views: evaluations of the loss, one per partner of the numeric test.
            key: the form of the batch.
            test: whether to check the weights by the numeric test.
        """
        view = views[0]
        batch = view.batch
        try:
            first = view.evaluation(view.number)
            if any(term.leaf is not None for term in first.terms):
                return self._by_model(view, first)
            parts = [
                first.terms if number == view.number else view.evaluation(number).terms
                for number in batch.numbers
            ]
            if first.counted:
                return _by_sum_and_count(batch, [terms[0].divisor for terms in parts])
            whole = view.evaluation(None).terms
            weights = common_weights(weights_by_term(parts, whole, batch.shares))
        except Unpredictable:
            raise SettingError(
                "the loss returns (sum, count), and its count depends on the model's output: the "
                "counts of the micro-batches to come are not known before the first backward. "
                f"{WAYS_OUT}"
            ) from None
        except UnknownForm:
            return self._by_test(views, key, None)
        by_graph = _GraphWeights(weights, first)
        is_trusted = self.call.is_torchs and not view.may_broadcast
        if test and not is_trusted and not self._is_per_row(view, by_graph):
            return self._by_test(views, key, by_graph)
        return self._accept(view, key, by_graph)

    def _accept(self, view: View, key: object, by_graph: _GraphWeights) -> list[float]:
        """Return weights that need no further test, and remember how they were found."""
        if by_graph.first.by_values:
            self._remember(key, Knowledge(classes=self._classes(view, by_graph)))
        else:
            self._remember(key, Knowledge(weights=by_graph.weights))
        return by_graph.weights

    def _classes(self, view: View, by_graph: _GraphWeights) -> Classes | None:
        """Return the leaf of the targets that holds the class indices; None if none does."""
        node = by_graph.first.terms[0].node
        if len(by_graph.first.terms) > 1 or node is None or node._saved_reduction != MEAN:
            return None
        target, weight = node._saved_target, node._saved_weight
        for place, leaf in enumerate(tensors_of(view.target(view.number))):
            # In any order, since the loss may have reshaped or transposed the targets.
            if leaf.dtype == target.dtype and _same_contents(leaf, target):
                return Classes(place, ignored_index(node), weight)
        return None

    def _is_per_row(self, view: View, by_graph: _GraphWeights) -> bool:
        """Whether the graph of the loss shows that samples do not interact.

        The numeric test is then unnecessary.
        """
        node = by_graph.first.terms[0].node
        if len(by_graph.first.terms) > 1 or node is None:
            return False
        # Graphs do not show hooks on gradients, which the test sees: only where it would take much
        # memory is it left out.
        elements = sum(leaf.numel() for leaf in tensors_of(view.value))
        if elements < _LARGE_OUTPUT or any(leaf._backward_hooks for leaf in by_graph.first.leaves):
            return False
        target = view.target(view.number)
        return type(target) is Tensor and is_per_row(node, target)

    def _by_model(self, view: View, first: Evaluation) -> list[float]:
        """Return the weights of a loss that the model computes, with terms of the caller."""
        batch = view.batch
        weights: list[list[float]] = []  # by term of the loss
        try:
            for term in first.terms:
                if term.leaf is not None:
                    place = next(i for i, leaf in enumerate(first.leaves) if leaf is term.leaf)
                    weights += self._weights_of_output(view, place)
            if _caller_terms(first.terms):
                parts = [_caller_terms(view.evaluation(number).terms) for number in batch.numbers]
                whole = _caller_terms(view.evaluation(None).terms)
                weights += weights_by_term(parts, whole, batch.shares)
            return common_weights(weights)
        except UnknownForm as error:
            raise SettingError(model_loss(str(error))) from error

    def _weights_of_output(self, view: View, place: int) -> list[list[float]]:
        """Return the weights of a loss that the model computes, one list per term of it.

        Args:
            view: evaluations of the loss.
            place: of the model's outputs, the one that is the loss.
        """
        if self._model is not None:
            return [
                rounded_to_shares(column, view.batch.shares)
                for column in self._model.weights(view.batch, place)
            ]
        # Of layers that are not traced, only the graph of what is here tells; what comes is checked
        # when it is there.
        leaf = tensors_of(view.value)[place]
        if leaf.requires_grad:
            terms = terms_of(leaf)
            if any(term.leaf is not None for term in terms):
                raise UnknownForm("no graph")
            samples, _ = view.extents(view.number)
            if any((term.elements or 0) % samples for term in terms):
                raise UnknownForm("a sum or mean over values that are not those of single samples")
            self._model_sums = all(term.summed for term in terms)
            if not self._model_sums:
                view.batch.loss_counts = {
                    number: terms[0].divisor * share / view.batch.shares[view.number]
                    for number, share in enumerate(view.batch.shares)
                }
        return [ones(view.batch) if self._model_sums else view.batch.shares]

    def _by_test(
        self, views: Sequence[View], key: object, by_graph: _GraphWeights | None
    ) -> list[float]:
        """Return the weights that the numeric test confirms.

        Args:
            views: evaluations of the loss.
            key: the form of the batch.
            by_graph: weights from the graph, which are tried first; else a mean or a sum over
                samples.
        """
        # With a large vocabulary the whole test takes as long as several steps. The graph is read
        # again at every repetition, so the model's own outputs suffice then.
        brief = by_graph is not None and key in self._knowledge_by_key
        try:
            weightings = self._additivity.weightings(
                views, has_counts=by_graph is not None, brief=brief
            )
        except ReturnsCount:
            return self._by_counts(views[0])
        if by_graph is not None and set(weightings.values()) <= {"counts"}:
            return self._accept(views[0], key, by_graph)
        adds_up = weightings.get("samples", "shares"), weightings.get("tokens", "shares")
        self._remember(key, Knowledge(adds_up=adds_up))
        return mean_or_sum_weights(views[0].batch, adds_up)

    def _by_counts(self, view: View) -> list[float]:
        """Return the weights of a loss that returns (sum, count), by its counts for one output.

        Raises:
            SettingError: it does not return such a pair for the targets of another micro-batch.
        """
        batch = view.batch
        try:
            counts = [float(view.in_numbers(number)[1]) for number in batch.numbers]
        except Exception as error:
            raise SettingError(
                "the loss returns (sum, count), and its counts for the micro-batches to come could "
                f"not be told from the output of the first ({type(error).__name__}: {error}). "
                f"{WAYS_OUT}"
            ) from error
        return _by_sum_and_count(batch, counts)

    def check(self, batch: Batch, number: int, loss: Tensor) -> None:
        """Check that the loss of a micro-batch has the divisor that its weight assumes.

        It costs a few microseconds, and is done on the CPU alone.

        Raises:
            SettingError: the divisor differs.
        """
        expected = batch.loss_counts.get(number)
        if expected is None or not loss.requires_grad or self.call.device.type != "cpu":
            return
        try:
            terms = terms_of(loss)
            if any(term.leaf is not None for term in terms):
                return
        except UnknownForm:
            return
        if len(terms) == 1 and not same(terms[0].divisor, expected, 1e-4):
            raise SettingError(count_differs(number, expected, terms[0].divisor))


def _by_sum_and_count(batch: Batch, counts: Sequence[float]) -> list[float]:
    """Return the weights of a loss that returns (sum, count), by its counts."""
    batch.loss_counts = dict(enumerate(counts))
    return sum_weights(counts)


def _check_smoothing(view: View, weights: Sequence[float]) -> None:
    """Refuse label smoothing in a micro-batch whose targets all have a class weight of 0.

    Such a micro-batch has a weight of 0, but its smoothing counts in the loss of the batch.

    Raises:
        SettingError: there is such a micro-batch.
    """
    for number, weight in enumerate(weights):
        if weight == 0.0 and view.smooths_without_weight(number):
            raise SettingError(smoothing_without_weight(number))


def _caller_terms(terms: Sequence[Term]) -> list[Term]:
    """Return the terms that the caller's loss computes, not the model."""
    return [term for term in terms if term.leaf is None]


def _same_contents(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements, in any order."""
    if one.numel() != other.numel():
        return False
    return torch.equal(one.flatten().sort()[0], other.flatten().sort()[0])
