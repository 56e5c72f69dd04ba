"""Layers with initial weights of their own: torch's layers with another `reset_parameters`.

A rank materialises its layers from the meta device by calling `reset_parameters()` on each
submodule, children before parents. So a model's initialisation must be in that method: a loop over
the finished model would have no effect.
"""

from __future__ import annotations

from typing import final

from torch import nn


@final
class HeConv2d(nn.Conv2d):
    """A convolution with weights from N(0, 2 / (kernel area x output channels)) and zero biases.

    Torch's own default reduces the variance of the signal about sixfold at every ReLU, so that deep
    plain nets do not learn.

    Source: He et al. 2015, "Delving deep into rectifiers", section 2.2, the backward ("fan out")
    case.
    """

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


@final
class NormalLinear(nn.Linear):
    """A linear layer with weights from N(0, std²) and zero biases."""

    std: float

    def __init__(
        self, in_features: int, out_features: int, *, std: float, bias: bool = True
    ) -> None:
        # Set before nn.Linear.__init__, which draws the weights; nn.Module accepts plain numbers
        # before its own __init__.
        self.std = std
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Return nn.Linear's text, with `std`."""
        return f"{super().extra_repr()}, std={self.std:g}"


@final
class NormalEmbedding(nn.Embedding):
    """An embedding with vectors from N(0, std²)."""

    std: float

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std  # before the weights are drawn, as in NormalLinear
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw new vectors."""
        nn.init.normal_(self.weight, std=self.std)

    def extra_repr(self) -> str:
        """Return nn.Embedding's text, with `std`."""
        return f"{super().extra_repr()}, std={self.std:g}"
