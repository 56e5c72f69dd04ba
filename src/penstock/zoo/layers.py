"""Layers that draw their own initial weights: torch's, with another `reset_parameters`.

A rank makes its layers from the meta device by calling `reset_parameters()` on each submodule,
children before parents. So whatever a model wants of its initial weights must stand there: a loop
over the finished model would be lost.
"""

from __future__ import annotations

from typing import final

from torch import nn


@final
class HeConv2d(nn.Conv2d):
    """A convolution whose weights are drawn from N(0, 2 / (kernel area x output channels)), its
    biases 0.

    Torch's own default shrinks the signal about sixfold in variance at every ReLU, which stops deep
    plain nets.

    Source: He et al. 2015, "Delving deep into rectifiers", section 2.2, the backward ("fan out")
    case.
    """

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


@final
class NormalLinear(nn.Linear):
    """A linear map whose weights are drawn from N(0, std²), its biases 0."""

    std: float

    def __init__(
        self, in_features: int, out_features: int, *, std: float, bias: bool = True
    ) -> None:
        # before nn.Linear's own __init__, which draws the weights; nn.Module takes plain numbers
        # that early
        self.std = std
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """As nn.Linear's, with `std`."""
        return f"{super().extra_repr()}, std={self.std:g}"


@final
class NormalEmbedding(nn.Embedding):
    """A table of vectors drawn from N(0, std²)."""

    std: float

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std  # early, as in NormalLinear
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the vectors anew."""
        nn.init.normal_(self.weight, std=self.std)

    def extra_repr(self) -> str:
        """As nn.Embedding's, with `std`."""
        return f"{super().extra_repr()}, std={self.std:g}"
