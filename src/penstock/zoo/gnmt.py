"""GNMT: an LSTM encoder, an LSTM decoder, and attention between them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import SettingError
from penstock.zoo.catalogue import check_counts, check_dropout, register

if TYPE_CHECKING:
    from torch import nn


def gnmt(
    *, layers: int = 8, hidden: int = 1024, vocabulary: int = 32_320, dropout: float = 0.2
) -> nn.Sequential:
    """GNMT with `layers` LSTM layers, half of them in the encoder and half in the decoder, each a
    layer of the chain.

        tokens -> source_embedding -> encoder.lstm1 (bidirectional) ... encoder.lstm<n> ->
        target_embedding
               -> decoder.lstm1 with attention ... decoder.lstm<n> -> classifier -> logits

    Values between layers are dicts (see `State` in `penstock.zoo.blocks.gnmt`): target tokens are
    passed through the whole encoder, and the attention's context through all decoder layers. So a
    cut inside the decoder sends twice as much as one inside the encoder. Every LSTM from the third
    on has a residual connection.

    With h = hidden, v = vocabulary, n = layers / 2 it has 3 v h + v parameters in embeddings and
    classifier, and 8 h² + 8 h in an LSTM of h inputs (12 h² + 8 h of 2 h inputs): 193,765,952 at
    the defaults, layer by layer as many as in PipeDream's profile of GNMT-8, and 277,717,568 with
    16 layers. The two embeddings are separate, as in the original; sharing them would save 33
    million parameters.

    Args:
        layers: LSTM layers in all, an even number of 4 or more. `gnmt` has 8, 4 and 4; `gnmt16` has
            8 and 8, as the original.
        hidden: numbers per token between layers.
        vocabulary: number of different tokens, of both languages together. Input: int64 (batch, 2,
            t), source tokens and target tokens (shifted by one: each is the decoder's input when it
            predicts the next). Output: float (batch, t, vocabulary), logits.
        dropout: share dropped before every LSTM but the first of encoder and decoder, in training.

    Raises:
        SettingError: layers is odd or below 4, dropout is not in [0, 1), or a count is below 1.

    Source: Wu et al. 2016, "Google's neural machine translation system", section 3, in the form
    that PipeDream, DAPPLE and BaPipe trained (NVIDIA's): the first decoder layer attends by its own
    output, instead of that of the step before, so that a layer runs over all steps at once.
    """
    check_counts("gnmt", layers=layers, hidden=hidden, vocabulary=vocabulary)
    check_dropout("gnmt", dropout)
    if layers < 4 or layers % 2:
        raise SettingError(
            "gnmt takes layers of 4 or more, an even number, half of them in the encoder and half "
            f"in the decoder, not {layers}"
        )
    from penstock.zoo.blocks.gnmt import build_gnmt

    return build_gnmt(layers, hidden, vocabulary, dropout)


for _name, _layers, _count in (("gnmt", 8, 193_765_952), ("gnmt16", 16, 277_717_568)):
    register(
        _name,
        parameters=_count,
        input="int64 (batch, 2, t), below vocabulary",
        output="float (batch, t, vocabulary)",
        source="Wu et al. 2016, section 3; NVIDIA's form, as PipeDream profiled it",
        task="translate",
    )(gnmt if _layers == 8 else partial(gnmt, layers=_layers))
