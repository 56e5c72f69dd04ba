"""What each micro-batch's loss counts for in the loss of the batch, so that their sum is the loss
of the undivided batch.

A mean over samples counts by samples, a mean over tokens that are not padding by those, a sum
counts as it is. Every rank has the whole batch's targets, so the last stage knows all weights
before its first backward. Where they come from, in this order:

1. `loss_weight(target)`, which the caller gives.
2. The count of a loss that returns `(sum, count)`.
3. The loss's own divisor (`loss_symbolic.py`), or that of a loss that a traced model computes
   itself (`loss_traced.py`).
4. The shares of samples, or 1 each, whichever a numeric test says (`loss_probe.py`). It also checks
   3, except for torch's own losses.

A loss that adds up in none of these ways is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.losses.call import LossCall
from penstock.losses.graph import is_per_row
from penstock.losses.messages import (
    WAYS_OUT,
    count_differs,
    model_loss,
    nonlinear_in_samples,
    not_additive,
)
from penstock.losses.probe import Draws, ReturnsCount, consistent
from penstock.losses.shares import (
    additive,
    agreed,
    columns_of,
    ones,
    over_total,
    snapped,
    weights_of,
)
from penstock.losses.symbolic import Evaluation, Unpredictable
from penstock.losses.terms import (
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
from penstock.values.structure import tensors_of

#: Forms of batches that are remembered.
_MOST_FORMS = 256
#: A loss whose divisor is not known is tested on every batch up to this one, and then ever more
#: rarely.
_ALWAYS_UP_TO = 64


#: Elements of a micro-batch's output from which on the test's copies of it (64 MiB each in float32)
#: are worth avoiding.
_LARGE_OUTPUT = 1 << 24


@dataclass(frozen=True)
class Classes:
    """A mean over class indices that are a leaf of the targets: its divisor is counted there."""

    leaf: int
    ignore_index: int
    weight: Tensor | None


@dataclass(frozen=True)
class Knowledge:
    """What is known of a loss on batches of one form.

    Attributes:
        weights: where they are the same for all batches of this form.
        classes: where they are counted in class indices.
        adds_up: how a loss of an unknown form adds up, "shares" or "sums": over samples, and over
            the tokens of slices.
    """

    weights: list[float] | None = None
    classes: Classes | None = None
    adds_up: tuple[str, str] | None = None


@dataclass(frozen=True)
class _Form:
    """Weights from a loss's own form. `counts`: its divisors, if it is one term."""

    weights: list[float]
    counts: Mapping[int, float]
    first: Evaluation


@dataclass
class LossWeights:
    """The weights of one loss, on one copy of the last stage.

    Attributes:
        call: the loss.
        loss_weight: from a micro-batch's targets to how much it counts, if the caller gave one.
        layers: the stage's modules, for losses that the model computes itself.
    """

    call: LossCall
    loss_weight: Callable[[Any], Any] | None = None
    layers: Sequence[nn.Module] = ()
    _known: dict[object, Knowledge] = field(default_factory=dict)
    _batches: int = 0
    _warned: bool = False
    _model_sums: bool = False

    def __post_init__(self) -> None:
        self._model = ModelLoss.of(self.layers, self.call.device)

    def of(self, batch: Batch, number: int, value: Any) -> list[float]:
        """The weights of all micro-batches, or slices, before the first of their losses.

        Args:
            batch: the batch, which has targets.
            number: the micro-batch that is here.
            value: the model's output for it, with its graph.

        Raises:
            SettingError: the loss does not add up, or cannot be known to.
        """
        if len(batch.inputs) == 1:
            return batch.shares
        self._batches += 1
        outer = collect_side_losses(None)
        try:
            if self.loss_weight is not None:
                return self._by_caller(batch)
            key = batch.signature, _forms_of(batch.whole[1])
            knowledge = self._known.get(key)
            if knowledge is not None and not self._is_due(knowledge):
                if knowledge.adds_up is not None:
                    return additive(batch, knowledge.adds_up)
                if knowledge.weights is not None:
                    return knowledge.weights
                if knowledge.classes is not None:
                    return self._counted(batch, knowledge.classes)
            views = View.all(self.call, batch, number, value, self._batches)
            return self._by_loss(views, key, test=knowledge is None or self._is_due(knowledge))
        finally:
            collect_side_losses(outer)

    def _is_due(self, knowledge: Knowledge) -> bool:
        """Whether a test is due again: at batches 1, 2, 4, 8, ..."""
        if knowledge.adds_up is not None and self._batches <= _ALWAYS_UP_TO:
            return True
        return self._batches & (self._batches - 1) == 0

    def _remember(self, key: object, knowledge: Knowledge) -> None:
        if len(self._known) >= _MOST_FORMS:
            self._known.clear()
        self._known[key] = knowledge

    def _by_caller(self, batch: Batch) -> list[float]:
        """Weights by `loss_weight`."""
        assert self.loss_weight is not None
        counts = [
            _as_number(self.loss_weight(self.call.target(batch, number)), number)
            for number in batch.numbers
        ]
        batch.loss_counts = dict(enumerate(counts))
        return weights_of(counts, sum(counts), batch.shares)

    def _counted(self, batch: Batch, classes: Classes) -> list[float]:
        """Weights of a mean over class indices."""
        whole = tensors_of(batch.whole[1])[classes.leaf]
        if classes.weight is None and not bool((whole == classes.ignore_index).any()):
            return batch.shares
        assert batch.targets is not None
        targets = batch.targets
        if classes.weight is not None:
            targets = [self.call.target(batch, number) for number in batch.numbers]
        leaves = [tensors_of(target)[classes.leaf] for target in targets]
        counts = class_counts(leaves, classes.weight, classes.ignore_index)
        batch.loss_counts = dict(enumerate(counts))
        return weights_of(counts, sum(counts), batch.shares)

    # -- by the loss's own form
    # -------------------------------------------------------------------------------------------

    def _by_loss(self, views: Sequence[View], key: object, *, test: bool) -> list[float]:
        view = views[0]
        batch = view.batch
        try:
            first = view.evaluation(view.number)
            if any(term.leaf is not None for term in first.terms):
                return self._by_model(view, first)
            weights_by_form = self._divided(view, first)
        except Unpredictable:
            raise SettingError(
                "the loss returns (sum, count), and its count depends on the model's output: the counts of the micro-batches to come "
                f"are not known before the first backward. {WAYS_OUT}"
            ) from None
        except UnknownForm:
            return self._tested(views, key, None)
        if first.counted:
            batch.loss_counts = dict(weights_by_form.counts)
            return weights_by_form.weights
        if test and not self.call.is_torchs and not self._is_per_row(view, weights_by_form):
            weights = self._tested(views, key, weights_by_form)
            if weights is not weights_by_form.weights:
                return weights
        classes = self._classes(view, weights_by_form) if first.by_values else None
        self._remember(
            key, Knowledge(None if first.by_values else weights_by_form.weights, classes)
        )
        return weights_by_form.weights

    def _divided(self, view: View, first: Evaluation) -> _Form:
        """Weights from the divisors of all micro-batches and of the whole batch, term by term.

        Raises:
            UnknownForm: the terms do not count alike.
        """
        batch = view.batch
        rows = [
            first.terms if number == view.number else view.evaluation(number).terms
            for number in batch.numbers
        ]
        if first.counted:
            counts = [terms[0].divisor for terms in rows]
            return _Form(over_total(counts), dict(enumerate(counts)), first)
        columns = columns_of(rows, view.evaluation(None).terms, batch.shares)
        counts = [terms[0].divisor for terms in rows]
        return _Form(agreed(columns), dict(enumerate(counts)), first)

    def _classes(self, view: View, form: _Form) -> Classes | None:
        """The leaf of the targets that is the loss's class indices, if one is."""
        node = form.first.terms[0].node
        if len(form.first.terms) > 1 or node is None or node._saved_reduction != 1:
            return None
        target, weight = node._saved_target, node._saved_weight
        for place, leaf in enumerate(tensors_of(self.call.target(view.batch, view.number))):
            if leaf.dtype == target.dtype and _same_contents(leaf, target):
                return Classes(place, ignored_index(node), weight)
        return None

    def _is_per_row(self, view: View, form: _Form) -> bool:
        """Whether the loss's graph alone shows that no sample sees another: nothing is left to
        test.
        """
        node = form.first.terms[0].node
        if len(form.first.terms) > 1 or node is None:
            return False
        # Graphs do not show hooks on gradients, which the test sees: only where it would take much
        # memory is it left out.
        elements = sum(leaf.numel() for leaf in tensors_of(view.value))
        if elements < _LARGE_OUTPUT or any(leaf._backward_hooks for leaf in form.first.leaves):
            return False
        target = self.call.target(view.batch, view.number)
        return type(target) is Tensor and is_per_row(node, target)

    # -- by the model
    # ------------------------------------------------------------------------------------------------------

    def _by_model(self, view: View, first: Evaluation) -> list[float]:
        """Weights of a loss that the model computes, alone or beside terms of the caller's."""
        batch = view.batch
        terms = [term for term in first.terms if term.leaf is None]
        columns: list[list[float]] = []
        try:
            for term in first.terms:
                if term.leaf is None:
                    continue
                place = next(i for i, leaf in enumerate(first.leaves) if leaf is term.leaf)
                columns += self._model_columns(view, place)
            if terms:
                rows = [_own(view.evaluation(number).terms) for number in batch.numbers]
                columns += columns_of(rows, _own(view.evaluation(None).terms), batch.shares)
            return agreed(columns)
        except UnknownForm as error:
            raise SettingError(model_loss(str(error))) from error

    def _model_columns(self, view: View, place: int) -> list[list[float]]:
        if self._model is not None:
            return [
                snapped(column, view.batch.shares)
                for column in self._model.weights(view.batch, place)
            ]
        # Of layers that are not traced, only the graph of what is here tells; what comes is checked
        # when it is there.
        leaf = tensors_of(view.value)[place]
        if leaf.requires_grad:
            terms = terms_of(leaf)
            if any(term.leaf is not None for term in terms):
                raise UnknownForm("no graph")
            self._model_sums = all(term.summed for term in terms)
            if not self._model_sums:
                view.batch.loss_counts = {
                    number: terms[0].divisor * share / view.batch.shares[view.number]
                    for number, share in enumerate(view.batch.shares)
                }
        return [ones(view.batch) if self._model_sums else view.batch.shares]

    # -- by numbers
    # ----------------------------------------------------------------------------------------------------------

    def _tested(self, views: Sequence[View], key: object, form: _Form | None) -> list[float]:
        """Weights that the numbers agree with: those that are known, else shares or ones."""
        batch = views[0].batch
        ways: dict[bool, str] = {}
        try:
            for view in views:
                way = self._way(view, form)
                if way is not None:
                    ways[view.along_tokens] = way
        except ReturnsCount:
            return self._by_counts(views[0])
        if form is not None and all(way == "counts" for way in ways.values()):
            return form.weights
        adds_up = ways.get(False, "shares"), ways.get(True, "shares")
        self._remember(key, Knowledge(adds_up=adds_up))
        return additive(batch, adds_up)

    def _way(self, view: View, form: _Form | None) -> str | None:
        """How the loss of a pair is made of its parts'; None where that cannot be tested.

        Raises:
            SettingError: in no known way.
        """
        sizes = view.sizes
        total = sum(sizes)
        ways = {"shares": (sizes[0] / total, sizes[1] / total), "sums": (1.0, 1.0)}
        try:
            if form is not None:
                ways = {"counts": _pair_weights(view), **ways}
            readings = view.readings()
        except ReturnsCount:
            raise
        except Draws:
            self._warn("draws random numbers, others for each part of a batch")
            return None
        except Exception as error:  # noqa: BLE001 - whatever a loss raises on what it was not made for
            if form is None:
                self._warn(f"raises on parts of a batch ({type(error).__name__}: {error})")
            return None
        if not readings:
            return None
        way = consistent(readings, ways)
        if way is None:
            expected = ways.get("counts", ways["shares"])
            worst = readings[0]
            for reading in readings:
                if not reading.fits(expected):
                    worst = reading
                    break
            raise SettingError(not_additive(worst, sizes, ways, view.along_tokens))
        function = next((reading.nonlinear for reading in readings if reading.nonlinear), None)
        if function is not None:
            raise SettingError(nonlinear_in_samples(function, view.along_tokens))
        return way

    def _by_counts(self, view: View) -> list[float]:
        """Weights of a loss that returns (sum, count), by what it counts for the output that is
        here.

        Raises:
            SettingError: it does not return such a pair for the targets of another micro-batch.
        """
        batch = view.batch
        try:
            counts = [float(view.in_numbers(number)[1]) for number in batch.numbers]
        except Exception as error:
            raise SettingError(
                "the loss returns (sum, count), and its counts for the micro-batches to come could not be told from the output of the "
                f"first ({type(error).__name__}: {error}). {WAYS_OUT}"
            ) from error
        batch.loss_counts = dict(enumerate(counts))
        return over_total(counts)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "whether the losses of micro-batches add up to that of the batch could not be tested, for the loss "
                f"{reason}. Micro-batches count in proportion to what the loss is divided by where that is known, and to their samples "
                f"where it is not; compare_with_one_device tells whether that is right. {WAYS_OUT}",
                stacklevel=2,
            )

    # -- afterwards
    # ------------------------------------------------------------------------------------------------------------

    def check(self, batch: Batch, number: int, loss: Tensor) -> None:
        """Whether a loss is divided by what it was expected to be. It costs a few microseconds, on
        the CPU.

        Raises:
            SettingError: it is not.
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


def _pair_weights(view: View) -> tuple[float, float]:
    """The weights of a pair in both joined, by the loss's divisors."""
    whole = view.joined_evaluation().terms[0].divisor
    if not whole:
        raise UnknownForm("a pair that counts nothing")
    first, second = (view.evaluation(number).terms[0].divisor / whole for number in view.pair)
    return first, second


def _own(terms: Sequence[Term]) -> list[Term]:
    return [term for term in terms if term.leaf is None]


def _same_contents(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements, in any order."""
    if one.numel() != other.numel():
        return False
    return torch.equal(one.flatten().sort()[0], other.flatten().sort()[0])


def _forms_of(target: Any) -> object:
    if type(target) is Tensor:
        return target.shape, target.dtype
    return tuple((leaf.shape, leaf.dtype) for leaf in tensors_of(target))


def _as_number(count: Any, number: int) -> float:
    """What `loss_weight` returned, as a number.

    Raises:
        SettingError: it is none, or below 0.
    """
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, (int, float)) or not count >= 0:
        raise SettingError(
            f"loss_weight must return one number of 0 or more for the targets of a micro-batch; for micro-batch {number} it returned "
            f"{count if isinstance(count, (int, float)) else type(count).__name__}"
        )
    return float(count)
