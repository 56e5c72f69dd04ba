"""Layers of GNMT."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import final

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.zoo.blocks.layers import NormalEmbedding, NormalLinear

#: Values between layers: the activation `x`, and what later layers need.
#: `target` (batch, s) int64: target tokens, as far as the decoder's embedding.
#: `memory` (batch, t, hidden): the encoder's output, as far as the decoder's first layer.
#: `context` (batch, s, hidden): the attention's output, as far as the last decoder layer.
State = dict[str, Tensor]


def _run_lstm(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """Run an LSTM with results that are identical to the bit with and without gradients.

    A recomputed layer runs once in each mode, and oneDNN's inference kernel rounds differently from
    its training kernel: so in training the training kernel is always used.
    """
    grad_enabled = torch.is_grad_enabled()
    with torch.set_grad_enabled(grad_enabled or lstm.training):
        out: Tensor = lstm(x)[0]
    return out if grad_enabled else out.detach()


@final
class SourceEmbedding(nn.Module):
    """Embedding of the source tokens: int64 (batch, 2, t), source and target, to `x` (batch, t,
    hidden) and `target` (batch, t).
    """

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.token = NormalEmbedding(vocabulary, hidden, std=1 / math.sqrt(hidden))

    def forward(self, tokens: Tensor) -> State:
        """Run the layer.

        Raises:
            SettingError: the input has another shape.
        """
        if tokens.dim() != 3 or tokens.shape[1] != 2:
            raise SettingError(
                "gnmt takes tokens of shape (batch, 2, t), source and target, not "
                f"{tuple(tokens.shape)}"
            )
        return {"x": self.token(tokens[:, 0]), "target": tokens[:, 1]}


@final
class EncoderLayer(nn.Module):
    """An LSTM over the source: (batch, t, inputs) to (batch, t, hidden), or 2 hidden if
    bidirectional.

    With `skip`, a residual connection adds the input to the output.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        dropout: float,
        bidirectional: bool = False,
        skip: bool = False,
    ) -> None:
        super().__init__()
        self.skip = skip
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True, bidirectional=bidirectional)

    def forward(self, state: State) -> State:
        """Run the layer."""
        x = state["x"]
        out = _run_lstm(self.lstm, self.dropout(x))
        return {**state, "x": out + x if self.skip else out}


@final
class TargetEmbedding(nn.Module):
    """Embedding of the target tokens; the encoder's output becomes `memory`."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.token = NormalEmbedding(vocabulary, hidden, std=1 / math.sqrt(hidden))

    def forward(self, state: State) -> State:
        """Run the layer."""
        return {"x": self.token(state["target"]), "memory": state["x"]}


@final
class Attention(nn.Module):
    """Additive attention: query (batch, s, hidden) and memory (batch, t, hidden) to (batch, s,
    hidden).

    Source: Bahdanau, Cho and Bengio 2015, section 3.1: score(q, k) = v · tanh(W q + U k).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = NormalLinear(hidden, hidden, std=1 / math.sqrt(hidden), bias=False)
        self.key = NormalLinear(hidden, hidden, std=1 / math.sqrt(hidden), bias=False)
        self.score = NormalLinear(hidden, 1, std=1 / math.sqrt(hidden), bias=False)

    def forward(self, query: Tensor, memory: Tensor) -> Tensor:
        """Run the attention."""
        # (batch, s, 1, hidden) + (batch, 1, t, hidden): the only activation of s x t x hidden
        # numbers.
        hidden = torch.tanh(self.query(query)[:, :, None] + self.key(memory)[:, None])
        scores: Tensor = self.score(hidden).squeeze(-1)
        return scores.softmax(-1) @ memory


@final
class FirstDecoderLayer(nn.Module):
    """An LSTM over the target, and attention from its output to `memory`, which later layers do not
    need.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.attention = Attention(hidden)

    def forward(self, state: State) -> State:
        """Run the layer."""
        out = _run_lstm(self.lstm, state["x"])
        return {"x": out, "context": self.attention(out, state["memory"])}


@final
class DecoderLayer(nn.Module):
    """An LSTM over the previous layer's output and the context: twice (batch, s, hidden) to (batch,
    s, hidden). The last layer drops the context.
    """

    def __init__(self, hidden: int, *, dropout: float, skip: bool, last: bool) -> None:
        super().__init__()
        self.skip, self.last = skip, last
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(2 * hidden, hidden, batch_first=True)

    def forward(self, state: State) -> State:
        """Run the layer."""
        x = state["x"]
        out = _run_lstm(self.lstm, torch.cat([self.dropout(x), state["context"]], dim=-1))
        out = out + x if self.skip else out
        return {"x": out} if self.last else {**state, "x": out}


@final
class Classifier(nn.Module):
    """Logits of the next token: `x` (batch, s, hidden) to (batch, s, vocabulary)."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.linear = NormalLinear(hidden, vocabulary, std=1 / math.sqrt(hidden))

    def forward(self, state: State) -> Tensor:
        """Run the layer."""
        out: Tensor = self.linear(state["x"])
        return out


def build_gnmt(layers: int, hidden: int, vocabulary: int, dropout: float) -> nn.Sequential:
    """Build the model of `penstock.zoo.gnmt.gnmt`, whose arguments these are."""
    depth = layers // 2
    # Made in the order of execution, so that a whole model draws the same initial weights as ranks
    # that make their layers one by one.
    model: OrderedDict[str, nn.Module] = OrderedDict(
        source_embedding=SourceEmbedding(vocabulary, hidden)
    )
    encoder: OrderedDict[str, nn.Module] = OrderedDict(
        lstm1=EncoderLayer(hidden, hidden, dropout=0.0, bidirectional=True)
    )
    for index in range(2, depth + 1):
        skip = index > 2
        encoder[f"lstm{index}"] = EncoderLayer(
            (1 if skip else 2) * hidden, hidden, dropout=dropout, skip=skip
        )
    model["encoder"] = nn.Sequential(encoder)
    model["target_embedding"] = TargetEmbedding(vocabulary, hidden)
    decoder: OrderedDict[str, nn.Module] = OrderedDict(lstm1=FirstDecoderLayer(hidden))
    for index in range(2, depth + 1):
        decoder[f"lstm{index}"] = DecoderLayer(
            hidden, dropout=dropout, skip=index > 2, last=index == depth
        )
    model["decoder"] = nn.Sequential(decoder)
    model["classifier"] = Classifier(hidden, vocabulary)
    return nn.Sequential(model)
