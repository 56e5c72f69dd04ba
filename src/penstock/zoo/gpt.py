"""GPT, a decoder-only transformer: many equal blocks between a light first layer and a heavy last
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import SettingError
from penstock.zoo.catalogue import check_counts, check_dropout, register

if TYPE_CHECKING:
    from torch import Tensor, nn


@register(
    "gpt",
    parameters=9_772_544,
    input="int64 (batch, t <= tokens), below vocabulary",
    output="float (batch, t, vocabulary)",
    source="Radford et al. 2019, section 2.3",
)
def gpt(
    *,
    layers: int = 12,
    width: int = 256,
    heads: int = 4,
    tokens: int = 128,
    vocabulary: int = 512,
    dropout: float = 0.0,
) -> nn.Sequential:
    """GPT with pre-norm blocks, each one layer, learned positions, and a head that is not tied to
    the embedding.

    Layers: `embedding`, `blocks.0`, ..., `blocks.<layers - 1>`, `norm`, `head`: layers + 3 in all.
    With n = layers, w = width, t = tokens, v = vocabulary it has n (12 w² + 13 w) + 2 v w + t w + 2
    w parameters: 9,772,544 at the defaults. GPT-2's head shares the embedding's weights; here it
    has its own and no bias, so that first and last stage are independent.

    Args:
        layers: number of blocks.
        width: numbers per token between blocks.
        heads: attention heads; they divide width.
        tokens: the longest sequence (context length). Input: int64 (batch, t), t <= tokens.
        vocabulary: number of different tokens. Output: float (batch, t, vocabulary), the logits of
            the next token.
        dropout: share dropped after embedding, attention weights, attention and MLP, in training.

    Raises:
        SettingError: heads does not divide width, dropout is not in [0, 1), or a count is below 1.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3,
    with its initial weights: N(0, 0.02²), divided by sqrt(2 x layers) for the projections into the
    residual stream.
    """
    check_counts(
        "gpt", layers=layers, width=width, heads=heads, tokens=tokens, vocabulary=vocabulary
    )
    check_dropout("gpt", dropout)
    if width % heads:
        raise SettingError(
            f"gpt cannot divide width={width} among heads={heads}: the remainder is "
            f"{width % heads}. Choose a width that is a multiple of {heads}, for example "
            f"{-(-width // heads) * heads}"
        )
    from penstock.zoo.blocks.gpt import build_gpt

    return build_gpt(layers, width, heads, tokens, vocabulary, dropout)


def gpt_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, in nats: a scalar.

    Args:
        logits: float (batch, t, vocabulary).
        targets: int64 (batch, t), the token that follows each token of the input.
    """
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
