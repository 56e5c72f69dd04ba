"""Evaluation of a loss on meta outputs and real targets, to find its divisor in advance.

Outputs are tensors on the meta device; targets are real. An op with an output among its arguments
returns a meta tensor, and every other op is computed. The divisor of most losses depends on targets
alone, and is therefore a known number at the end, at almost no cost in time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.losses.graph import divides_smoothing_by_zero
from penstock.losses.terms import Term, UnknownForm, is_float, terms_of
from penstock.values.structure import map_tensors, tensors_of

_aten = torch.ops.aten
_INDICES = (_aten.index.Tensor,)
_NLL = (_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)


class Unpredictable(Exception):
    """The divisor depends on the model's output."""


@dataclass(frozen=True)
class Evaluation:
    """The form of a loss on some targets.

    Attributes:
        terms: the terms of the loss; of a loss that returns (sum, count) one, whose divisor is the
            count.
        by_values: whether divisors may depend on the values of targets, and not on their shapes
            alone.
        leaves: the meta outputs, in the order of their leaves.
        counted: whether the loss returns (sum, count).
    """

    terms: list[Term]
    by_values: bool
    leaves: list[Tensor]
    counted: bool = False


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes ops on real tensors, and propagates shapes through ops on meta tensors."""

    def __init__(self, target: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = tensors_of(target)
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.by_values = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op."""
        kwargs = dict(kwargs or {})
        if _moves_to_meta(args, kwargs):
            # Targets that follow the outputs to their device, and constants that are made there,
            # keep their values.
            kwargs["device"] = self.device
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(leaf.is_meta for leaf in leaves):
            result = func(*args, **kwargs)
            self._note(func, args, leaves, result)
            return result
        if func in _INDICES:
            args = (args[0], [part for index in args[1] for part in self._index(index)], *args[2:])
        elif func is _aten.masked_select.default:
            return self._masked_select(args[0], args[1])
        elif func in _NLL:
            return self._nll(args)
        elif func is _aten._log_softmax.default:
            return torch.empty_like(args[0])
        args, kwargs = pytree.tree_map(_without_contents, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Sequence[Any], leaves: Sequence[Tensor], result: Any) -> None:
        """Note whether an op turns values of targets into numbers or shapes."""
        if self.by_values or not leaves:
            return
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        chooses_by_mask = func in _INDICES and any(map(_is_mask, args[1]))
        shape_by_values = torch.Tag.dynamic_output_shape in func.tags or chooses_by_mask
        self.by_values = not results or shape_by_values or _reduces(leaves, results)

    def _index(self, index: Any) -> list[Any]:
        """Replace a mask by as many indices as it has true elements."""
        if not _is_mask(index) or index.is_meta:
            return [index]
        self.by_values = True
        count = int(index.sum())
        # A mask stands for as many indices as it has dimensions.
        return [torch.empty(count, dtype=torch.int64, device="meta")] * index.dim()

    def _masked_select(self, value: Tensor, mask: Tensor) -> Tensor:
        """Return a meta tensor of as many elements as the mask selects."""
        if mask.is_meta or not value.is_meta:
            raise UnknownForm("a selection by outputs")
        self.by_values = True
        shape = torch.broadcast_shapes(value.shape, mask.shape)  # type: ignore[no-untyped-call]
        return value.new_empty(int(mask.expand(shape).sum()))

    def _nll(self, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the results of a negative log-likelihood: the loss and the weight of its
        targets.
        """
        self.by_values = True
        score, reduction = args[0], args[3]
        shape = () if reduction else args[1].shape
        return score.new_empty(shape), score.new_empty(())


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _reduces(leaves: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Whether an op reduces several elements to one."""
    several = any(leaf.numel() > 1 for leaf in leaves)
    return several and any(leaf.numel() == 1 for leaf in results)


def _moves_to_meta(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op creates a tensor on the meta device, or moves a real one there."""
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "meta":
        return False
    leaves = pytree.tree_leaves(args)
    return not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)


def _without_contents(value: Any) -> Any:
    """Return a tensor or a device of the meta device in place of a real one."""
    if isinstance(value, Tensor) and not value.is_meta:
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def outputs_like(value: Any, extents: tuple[int, int], new_extents: tuple[int, int]) -> Any:
    """Return a model's output for other samples and tokens, on the meta device.

    Args:
        value: an output.
        extents: its samples, and the tokens of each; tokens are 0 if sequences are not cut.
        new_extents: those of the result.

    Raises:
        UnknownForm: a tensor's first extent is not a multiple of the samples.
    """

    def like(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = resized_shape(tuple(leaf.shape), extents, new_extents)
        return torch.empty(shape, dtype=leaf.dtype, device="meta").requires_grad_(is_float(leaf))

    return map_tensors(like, value)


def resized_shape(
    shape: tuple[int, ...], extents: tuple[int, int], new_extents: tuple[int, int]
) -> tuple[int, ...]:
    """Return the shape of an output for other samples and tokens; see `outputs_like`."""
    if not shape:
        return shape
    (samples, tokens), (new_samples, new_tokens) = extents, new_extents
    if shape[0] % samples:
        raise UnknownForm(f"an output of {shape} for {samples} samples")
    first = shape[0] // samples * new_samples
    if not tokens or tokens == new_tokens:
        return (first, *shape[1:])
    if len(shape) > 1 and shape[1] == tokens:
        return (first, new_tokens, *shape[2:])
    if shape[0] == samples * tokens:
        return (new_samples * new_tokens, *shape[1:])
    raise UnknownForm(f"an output of {shape} for {samples} samples of {tokens} tokens")


@contextmanager
def without_stage_hooks() -> Iterator[None]:
    """Record graphs that the saved-tensor hooks of the stage do not see."""
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        yield


def evaluate(loss: Callable[[Any, Any], Any], output: Any, target: Any) -> Evaluation:
    """Evaluate a loss on an output of `outputs_like` and real targets.

    Raises:
        UnknownForm: the loss is not a sum divided by a number, or cannot be evaluated so.
        Unpredictable: it returns a count that depends on the output.
    """
    mode = _Mode(target)
    try:
        with without_stage_hooks(), mode:
            value = loss(output, target)
        return _read(value, mode, tensors_of(output))
    except (UnknownForm, Unpredictable):
        raise
    except Exception as error:
        raise UnknownForm(f"{type(error).__name__}: {error}") from error


def smooths_without_weight(loss: Callable[[Any, Any], Any], output: Any, target: Any) -> bool:
    """Whether a loss divides its label smoothing by class weights that are 0 for all targets.

    Args:
        loss: the loss.
        output: an output of `outputs_like`.
        target: the targets of a micro-batch.
    """
    value = None
    with suppress(Exception), without_stage_hooks(), _Mode(target):
        value = loss(output, target)
    return isinstance(value, Tensor) and divides_smoothing_by_zero(value)


def _read(value: Any, mode: _Mode, leaves: list[Tensor]) -> Evaluation:
    """Return the form of what a loss has returned."""
    if isinstance(value, tuple) and len(value) == 2:
        return Evaluation([Term(_count(value[1]))], True, leaves, counted=True)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UnknownForm("no number")
    return Evaluation(terms_of(value), mode.by_values, leaves)


def _count(value: Any) -> float:
    """Return the count of a loss that returns (sum, count), if it does not depend on outputs."""
    if isinstance(value, Tensor) and value.is_meta:
        raise Unpredictable
    return float(value)
