"""The undivided batch in the self-check: what differs from it, by how much, and what may be the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from penstock.tracing.hooks import hooked
from penstock.tracing.ops import op_name
from penstock.tracing.traced import TracedLayer

#: Differences from the undivided batch up to here are rounding, by the precision that layers
#: compute in.
TOLERANCE, COARSE_TOLERANCE = 2e-3, 0.1

#: A difference is held against the largest value of the tensor itself, and where that is next to
#: nothing, as the gradients of biases
#: that change nothing are, against this share of the largest of its kind.
NEXT_TO_NOTHING = 1e-3

DRAWS = "layers draw random numbers, such as dropout, and draw others for each micro-batch"
SIDES = "side losses are computed for each micro-batch"


@dataclass(frozen=True)
class WholeBatch:
    """Largest absolute differences between the pipeline and one device that takes the batch
    undivided.

    Attributes:
        gradients: by name.
        loss: of the losses of the batch.
        scale: by name, and for "loss", the largest absolute value on the one device.
        causes: what is known to make micro-batches differ from the undivided batch by design.
        tolerance: differences in proportion up to this are rounding.
    """

    gradients: Mapping[str, float] = field(default_factory=dict)
    loss: float = 0.0
    scale: Mapping[str, float] = field(default_factory=dict)
    causes: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    def ratios(self) -> dict[str, float]:
        """Differences in proportion to what they are of, by name; of the loss under "loss"."""
        sizes = [self.scale.get(name, 0.0) for name in self.gradients]
        least = NEXT_TO_NOTHING * max(sizes, default=0.0)
        found = {
            name: ratio(error, max(self.scale.get(name, 0.0), least))
            for name, error in self.gradients.items()
        }
        return {**found, "loss": ratio(self.loss, self.scale.get("loss", 0.0))}

    @property
    def relative(self) -> float:
        """The largest difference in proportion to what it is of."""
        return max(self.ratios().values())

    @property
    def agrees(self) -> bool:
        """Whether all differences are rounding."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        ratios = self.ratios()
        first = f"pipeline against one device with the undivided batch: largest difference {self.relative:.2g} of what it is of"
        if self.agrees:
            return first
        gradients = {name: each for name, each in ratios.items() if name != "loss"}
        lines = [first, f"  loss      differs by {self.loss:.2e}, {ratios['loss']:.1e} of it"]
        if gradients:
            worst = max(gradients, key=lambda name: gradients[name])
            lines.append(
                f"  gradient  {worst} differs by {self.gradients[worst]:.2e}, {gradients[worst]:.1e} of it"
            )
        if self.causes:
            lines += [
                "  this may be, as a batch in micro-batches is not the same computation here:"
            ]
            lines += [f"  - {cause}" for cause in self.causes]
        else:
            lines.append(
                "  nothing is known in this model that makes micro-batches differ from the undivided batch: either samples see each other in "
                "it, or the loss counts other than it is weighed (see loss_weight= and loss_on= of Pipeline)"
            )
        return "\n".join(lines)


def causes_in(modules: Iterable[nn.Module]) -> list[str]:
    """What in a model's layers makes micro-batches differ from the undivided batch."""
    layers = list(modules)
    found = []
    if any(_normalises(part) for layer in layers for part in layer.modules()):
        found.append("batch normalisation takes its statistics from each micro-batch")
    if names := hooked(layers):
        found.append(f"hooks on weights run once for each micro-batch: {', '.join(names[:3])}")
    return found


def _normalises(part: nn.Module) -> bool:
    """Whether a module takes statistics over samples."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return part.training or part.running_mean is None
    if not isinstance(part, TracedLayer):
        return False
    ops = (part.variants.all()[0].flow.order) if part.variants.all() else ()
    return any(op_name(node) == "batch_norm" and bool(node.args[5]) for node in ops)


def ratio(error: float, size: float) -> float:
    """An error in proportion to what it is of; infinite where that is 0, or the error is no number."""
    if error == 0.0:
        return 0.0
    return error / size if size > 0 and abs(error) < float("inf") else float("inf")


def coarse(dtypes: Iterable[torch.dtype], autocast: torch.dtype | None) -> float:
    """The tolerance for a model with parameters of these types."""
    low = {torch.bfloat16, torch.float16}
    return COARSE_TOLERANCE if autocast is not None or low & set(dtypes) else TOLERANCE
