"""Layers of GPT."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import SettingError
from penstock.zoo.blocks.layers import NormalEmbedding, NormalLinear

#: Standard deviation of initial weights: Radford et al. 2018, section 4.1.
STD = 0.02


@final
class TokenEmbedding(nn.Module):
    """Sum of token and learned position embeddings: int64 (batch, t) to float (batch, t, width), t
    at most `tokens`.
    """

    def __init__(self, vocabulary: int, tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = NormalEmbedding(vocabulary, width, std=STD)
        self.position = NormalEmbedding(tokens, width, std=STD)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the layer.

        Raises:
            SettingError: the sequences are longer than the model has positions. On a GPU the
                look-up itself would fail without a clear message.
        """
        return self.forward_slice(tokens, None)[0]

    def forward_slice(self, tokens: Tensor, past: int | None) -> tuple[Tensor, int]:
        """Run the layer on the next slice of sequences.

        Args:
            tokens: int64 (batch, slice length).
            past: number of tokens in earlier slices; None for the first.

        Returns:
            The embeddings, and the number of tokens so far.
        """
        start = past or 0
        length, limit = start + tokens.shape[-1], self.position.num_embeddings
        if length > limit:
            raise SettingError(
                f"gpt was made with tokens={limit}, but the input has {length} per sequence: "
                f"make it with tokens={length}, or shorten the input"
            )
        positions = torch.arange(start, length, device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions)), length


@final
class CausalSelfAttention(nn.Module):
    """Causal self-attention: every token attends to itself and earlier ones; float (batch, t,
    width) to the same shape.

    Torch's fused attention applies the causal mask, so there is no buffer to send, save or count.
    """

    def __init__(self, width: int, heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_dropout = dropout
        self.qkv = NormalLinear(width, 3 * width, std=STD)
        self.projection = NormalLinear(width, width, std=residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Run the attention."""
        return self.forward_slice(x, None)[0]

    def forward_slice(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the attention on the next slice of sequences.

        Args:
            x: float (batch, slice length, width).
            past: keys and values of all earlier tokens, (batch, heads, t so far, width / heads)
                each; None for the first slice.

        Returns:
            The output, and keys and values including those of this slice.
        """
        batch, length, width = x.shape
        # (batch, t, 3 width) -> 3 of (batch, heads, t, width / heads)
        qkv: Tensor = (
            self.qkv(x)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        query, key, value = qkv.unbind(0)
        dropout = self.attention_dropout if self.training else 0.0
        mask = None
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
            # Row i is token t + i of its sequence. torch's causal_lower_right would need no memory
            # for this on a GPU, but it is still a prototype, and importing it loads torch._dynamo:
            # a second at the start of every rank.
            earlier = key.shape[2] - length
            mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=x.device).tril(earlier)
        attended = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=past is None
        )
        merged_heads = attended.transpose(1, 2).reshape(batch, length, width)
        out: Tensor = self.dropout(self.projection(merged_heads))
        return out, (key, value)


@final
class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): float (batch, t, width) to the same shape.

    12 width² + 13 width parameters. The two projections into the residual stream have smaller
    initial weights, `residual_std`.
    """

    def __init__(self, width: int, heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout, residual_std)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                up=NormalLinear(width, 4 * width, std=STD),
                gelu=nn.GELU(),
                down=NormalLinear(4 * width, width, std=residual_std),
                dropout=nn.Dropout(dropout),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out

    def forward_slice(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run the block on the next slice of sequences; `past` is the attention's."""
        attended, past = self.attention.forward_slice(self.norm1(x), past)
        x = x + attended
        return x + self.mlp(self.norm2(x)), past


def build_gpt(
    layers: int, width: int, heads: int, tokens: int, vocabulary: int, dropout: float
) -> nn.Sequential:
    """Build the model of `penstock.zoo.gpt.gpt`, whose arguments these are."""
    residual_std = STD / math.sqrt(2 * layers)
    # Made in the order of execution, so that a whole model draws the same initial weights as ranks
    # that make their layers one by one.
    embedding = TokenEmbedding(vocabulary, tokens, width, dropout)
    blocks = [TransformerBlock(width, heads, dropout, residual_std) for _ in range(layers)]
    return nn.Sequential(
        OrderedDict(
            embedding=embedding,
            blocks=nn.Sequential(*blocks),
            norm=nn.LayerNorm(width),
            head=NormalLinear(width, vocabulary, std=STD, bias=False),
        )
    )
