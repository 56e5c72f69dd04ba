"""Comparison with the undivided batch in the self-check: differences and their possible causes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from penstock.modules.hooks import hooked
from penstock.tracing.ops import op_name
from penstock.tracing.traced_layer import TracedLayer

#: Relative differences from the undivided batch up to this are rounding: in full precision, and
#: with layers in 16 bits.
TOLERANCE, COARSE_TOLERANCE = 2e-3, 0.1

#: A difference is relative to the largest absolute value of its tensor, but at least to this share
#: of the largest of all gradients: some gradients, such as those of biases before a normalisation,
#: are zero up to rounding.
NEXT_TO_NOTHING = 1e-3

DRAWS = "layers draw random numbers, such as dropout, and draw others for each micro-batch"
SIDES = "side losses are computed for each micro-batch"


@dataclass(frozen=True)
class WholeBatch:
    """Differences between the pipeline and one device that runs the undivided batch.

    Attributes:
        gradients: by parameter name, the largest absolute difference of the gradient.
        loss: the absolute difference of the loss.
        scale: by parameter name, and for "loss", the largest absolute value on the one device.
        causes: known reasons why micro-batches differ from the undivided batch by design.
        tolerance: relative differences up to this are rounding.
    """

    gradients: Mapping[str, float] = field(default_factory=dict)
    loss: float = 0.0
    scale: Mapping[str, float] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    def ratios(self) -> dict[str, float]:
        """Return the relative differences, by parameter name; that of the loss as "loss"."""
        scales = [self.scale.get(name, 0.0) for name in self.gradients]
        smallest_scale = NEXT_TO_NOTHING * max(scales, default=0.0)
        ratios = {
            name: ratio(error, max(self.scale.get(name, 0.0), smallest_scale))
            for name, error in self.gradients.items()
        }
        return {**ratios, "loss": ratio(self.loss, self.scale.get("loss", 0.0))}

    @property
    def relative(self) -> float:
        """The largest relative difference."""
        return max(self.ratios().values())

    @property
    def agrees(self) -> bool:
        """Whether all differences are rounding."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        ratios = self.ratios()
        first = (
            "pipeline against one device with the undivided batch: largest relative difference "
            f"{self.relative:.2g}"
        )
        if self.agrees:
            return first
        gradients = {name: value for name, value in ratios.items() if name != "loss"}
        lines = [first, f"  loss      differs by {self.loss:.2e}, relative {ratios['loss']:.1e}"]
        if gradients:
            worst = max(gradients, key=lambda name: gradients[name])
            lines.append(
                f"  gradient  {worst} differs by {self.gradients[worst]:.2e}, relative "
                f"{gradients[worst]:.1e}"
            )
        if self.causes:
            lines += ["  this is expected, if it is due to a difference by design:"]
            lines += [f"  - {cause}" for cause in self.causes]
        else:
            lines.append(
                "  no reason is known for this model: either a layer mixes samples, or the loss is "
                "weighted otherwise than it is computed (see loss_weight= and loss_on= of Pipeline)"
            )
        return "\n".join(lines)


def causes_in(modules: Iterable[nn.Module]) -> list[str]:
    """Return known reasons why micro-batches of these layers differ from the undivided batch."""
    layers = list(modules)
    causes = []
    if any(_has_batch_statistics(part) for layer in layers for part in layer.modules()):
        causes.append("batch normalisation takes its statistics from each micro-batch")
    if names := hooked(layers):
        causes.append(f"hooks on weights run once for each micro-batch: {', '.join(names[:3])}")
    return causes


def _has_batch_statistics(part: nn.Module) -> bool:
    """Return whether a module computes statistics over samples."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return part.training or part.running_mean is None
    if not isinstance(part, TracedLayer):
        return False
    variants = part.variants.all()
    ops = variants[0].flow.order if variants else ()
    # The sixth argument of torch.batch_norm is `training`.
    return any(op_name(node) == "batch_norm" and bool(node.args[5]) for node in ops)


def ratio(error: float, size: float) -> float:
    """Return the relative error; infinite if `size` is 0 or the error is not finite."""
    if error == 0.0:
        return 0.0
    return error / size if size > 0 and abs(error) < float("inf") else float("inf")


def coarse(dtypes: Iterable[torch.dtype], autocast: torch.dtype | None) -> float:
    """Return the tolerance for parameters of these types and this autocast type."""
    low = {torch.bfloat16, torch.float16}
    return COARSE_TOLERANCE if autocast is not None or low & set(dtypes) else TOLERANCE
