"""Plain training in one process on slices, written out: what every pipeline that cuts sequences
must equal, to the bit.

No slice's graph is cut off from the next one's here, and no gradients are handed over: all slices of
a micro-batch are one graph, and one backward goes through it. That the gradients of each slice can
be told apart, each has a copy of the model to itself, so that they can be added up in the order in
which a program has its backwards.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.conformance.reference import gradients, layers_of
from torch import Tensor, nn

from penstock.modules.randomness import may_draw, stream_seed

#: Per micro-batch, how many samples it has and how many tokens its slices have; None where
#: sequences stay whole.
Cuts = Sequence[tuple[int, Sequence[int] | None]]


def parts_of(length: int, sizes: Sequence[int]) -> list[slice]:
    """Where the parts of these sizes lie."""
    assert sum(sizes) == length
    return [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]


@dataclass
class PlainSlices:
    """A model in one process, trained on the same slices as the pipeline."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    seed: int = 0
    step: int = 0

    def backward_in_parts(
        self, x: Tensor, y: Tensor, cuts: Cuts
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """The mean loss of the batch, and the gradients of every slice, by name."""
        losses: list[Tensor] = []
        copies: list[nn.Module] = []
        for samples, (size, lengths) in zip(
            parts_of(len(x), [size for size, _ in cuts]), cuts, strict=True
        ):
            own_x, own_y = x[samples], y[samples]
            pasts: dict[int, Any] = {}
            sequence = []
            for tokens in [...] if lengths is None else parts_of(x.shape[1], lengths):
                copies.append(copy.deepcopy(self.model))
                copies[-1].zero_grad()
                part_x, part_y = (
                    (own_x, own_y) if tokens is ... else (own_x[:, tokens], own_y[:, tokens])
                )
                share = 1.0 if tokens is ... else (tokens.stop - tokens.start) / x.shape[1]
                out = self.forward(
                    copies[-1], part_x, len(copies) - 1, None if tokens is ... else pasts
                )
                sequence.append(self.loss(out, part_y) * (share * (size / len(x))))
            torch.autograd.backward(sequence)
            losses += [loss.detach() for loss in sequence]
        self.step += 1
        return torch.stack(losses).sum(), [gradients(model) for model in copies]

    def forward(self, model: nn.Module, x: Any, number: int, pasts: dict[int, Any] | None) -> Any:
        """Layers in turn, those that look back with what they have left so far."""
        with torch.random.fork_rng(devices=[]):
            for index, layer in enumerate(layers_of(model)):
                if may_draw(layer):
                    torch.default_generator.manual_seed(
                        stream_seed(self.seed, self.step, index, number)
                    )
                if pasts is not None and hasattr(layer, "forward_slice"):
                    x, pasts[index] = layer.forward_slice(x, pasts.get(index))
                else:
                    x = layer(x)
        return x
