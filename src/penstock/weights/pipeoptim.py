"""PipeOptim: a forward reads the weights of its backward, predicted by the optimizer's update."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "pipeoptim",
    synchronous=False,
    arithmetic="predicted",
    one_version=True,
    extra=1.0,
    optimizers=("SGD", "Adam", "AdamW", "RMSprop"),
    because="it predicts by the optimizer's own step, which is implemented for these",
    source="Guan et al. 2023, PipeOptim, section 4, optimizer-dependent weight prediction",
)
def pipeoptim(place: Place) -> Reads:
    """Predict the version of the backward in the forward; read the newest in the backward.

    Ŵ = W - lr · s · ΔW. On stage s of p a batch's forward sees p - 1 - s updates less than its
    backward, and that is the prediction distance. The paper's batches have one micro-batch. For the
    j-th of m, from 0, the missing updates are max(0, ceil((p - 1 - s - j) / m)). ΔW is that of the
    last step: the gradient with SGD, the momentum with SGD with momentum, m̂ / (sqrt(v̂) + ε) with
    Adam and AdamW, g / (sqrt(E[g²]) + ε) with RMSprop. One version is kept, and a working copy with
    the prediction.

    The paper's code predicts one update further, `world_size - rank`; this rule follows the paper,
    whose distance is exactly the gap. Refused: other optimizers, and Nesterov's momentum, for which
    the paper has no formula.
    """
    missing = place.stages - 1 - place.stage - place.micro_batch
    return Reads(place.at_forward, place.at_backward, max(0, -(-missing // place.micro_batches)))
