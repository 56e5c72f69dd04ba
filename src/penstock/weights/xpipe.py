"""XPipe: the first micro-batch of a batch predicts weights in Adam's direction for all of it."""

from __future__ import annotations

from penstock.weights.catalogue import register
from penstock.weights.rule_types import Place, Reads


@register(
    "xpipe",
    synchronous=False,
    arithmetic="predicted",
    one_version=True,
    extra=3.0,
    optimizers=("Adam", "AdamW"),
    because="it predicts in Adam's direction",
    source="Guan et al. 2019, XPipe, section 3: bellwether micro-batches",
)
def xpipe(place: Place) -> Reads:
    """Predict at the first micro-batch of a batch; the others read the same prediction.

    The first micro-batch is the paper's bellwether. Forwards and backwards have separate
    predictions.

    Ŵ = W - lr · s · v̄ / (sqrt(q̄) + ε), v̄ = v / (1 - γ) and q̄ = q / (1 - λ) with Adam's moments
    v and q: by the constants, as in the paper, not by 1 - γ^t as in Adam. With T micro-batches per
    batch, on rank r of D,

        s before a forward   round((D + T - r/2 - 2) / T)
        s before a backward  round((T + floor(r/2) - 1) / T)

    For D = 4 and the forward this gives 3, 2, 2, 2 at T = 1, 2, 2, 2, 1 at T = 2 and 2, 1, 1, 1 at
    T = 4. The paper does not say how to round one half; here it is rounded to even, as in Python
    and in fairscale's code. Gradients are taken at Ŵ, and the mean of T of them is applied to W.
    One version is kept, and three copies: one to work with, and the two predictions.

    fairscale's code differs from the paper: it uses the number of the micro-batch instead of T, and
    floor(lr · x / T) instead of lr · round(x / T). This rule follows the paper. Refused: optimizers
    other than Adam and AdamW.
    """
    ranks, share, rank = place.stages, place.micro_batches, place.stage
    forward = round((ranks + share - rank / 2 - 2) / share)
    backward = round((share + rank // 2 - 1) / share)
    return Reads(place.batch_at_forward, place.batch_at_backward, forward, backward)
