"""References of every asynchronous weight rule, simulated in one process: `simulate`. One line of
stages is in asynchronous_rules.py; here are the rules with several copies of the weights. Nothing
of the package is used, its schedules neither.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tests.conformance.asynchronous_rules import (
    DoubleBuffer,
    Line,
    Newest,
    PipeMare,
    PipeOptim,
    SpecTrain,
    Stash,
    VerticalSync,
    VirtualWorker,
    Weights,
    WPipe,
    XPipe,
    copies,
)
from torch import Tensor, nn


class AvgPipe:
    """Chen et al. 2023: N copies, each trained synchronously, pulled towards a reference that takes
    in the mean of their steps.

    Batch t is copy t mod N's. theta_n steps by delta_n; theta_n = (1 - 1/N) theta_n + reference /
    N; when all N have had their turn, reference += sum(delta_n) / N.
    """

    def __init__(self, *args: Any, pipelines: int, **rest: Any) -> None:
        self.lines = [Line(*args, **rest) for _ in range(pipelines)]
        self.stages, self.n, self.t = self.lines[0].stages, pipelines, 0
        self.reference = [copies(versions[0]) for versions in self.lines[0].weights]
        self.moved = [[torch.zeros_like(w) for w in weights] for weights in self.reference]

    def batch(self, x: Any, y: Any) -> Tensor:
        """One batch on the copy whose turn it is."""
        line = self.lines[self.t % self.n]
        loss = line.batch(x, y)
        for s, reference in enumerate(self.reference):
            before, after = line.weights[s][-2:]
            self.moved[s] = [
                d + (b - a) for d, a, b in zip(self.moved[s], before, after, strict=True)
            ]
            line.weights[s][-1] = [
                (1 - 1 / self.n) * b + r / self.n for b, r in zip(after, reference, strict=True)
            ]
        self.t += 1
        if self.t % self.n == 0:
            self._close_round()
        return loss

    def _close_round(self) -> None:
        for s, moved in enumerate(self.moved):
            self.reference[s] = [
                r + d / self.n for r, d in zip(self.reference[s], moved, strict=True)
            ]
            self.moved[s] = [torch.zeros_like(d) for d in moved]

    def drain(self) -> None:
        """A round that is not over is closed; the model is the reference."""
        self._close_round()
        self.t = 0
        for s, reference in enumerate(self.reference):
            self.lines[0].put(s, reference)


class HetPipe:
    """Park et al. 2020: W virtual workers tell each other the sums of their waves, of N_m updates
    each.

    Batch t is virtual worker t mod W's. When it has ended wave c, it takes in the sums of the
    others' waves up to c - distance.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *args: Any,
        virtual_workers: int,
        in_flight: int,
        distance: int,
        **rest: Any,
    ) -> None:
        others = [copy.deepcopy(list(stages)) for _ in range(virtual_workers - 1)]
        self.lines = [
            VirtualWorker(chain, *args, in_flight=in_flight, **rest) for chain in (stages, *others)
        ]
        self.stages, self.length, self.distance = stages, in_flight, distance
        self._begin()

    def _begin(self) -> None:
        self.t = 0
        self.begun = [[copies(versions[-1]) for versions in line.weights] for line in self.lines]
        #: sums[k][c][s]: what virtual worker k did to stage s in wave c by itself. heard[k]: waves
        #: of the others it has taken in.
        self.sums: list[list[list[Weights]]] = [[] for _ in self.lines]
        self.heard = 0

    def batch(self, x: Any, y: Any) -> Tensor:
        """One batch on the virtual worker whose turn it is."""
        loss = self.lines[self.t % len(self.lines)].batch(x, y)
        self.t += 1
        rounds, left = divmod(self.t, len(self.lines))
        if left == 0 and rounds % self.length == 0:
            self._end_wave()
            while self.heard <= rounds // self.length - 1 - self.distance:
                self._hear()
            self.begun = [
                [copies(versions[-1]) for versions in line.weights] for line in self.lines
            ]
        return loss

    def _end_wave(self) -> None:
        for line, begun, sums in zip(self.lines, self.begun, self.sums, strict=True):
            sums.append(
                [
                    [b - a for a, b in zip(old, versions[-1], strict=True)]
                    for old, versions in zip(begun, line.weights, strict=True)
                ]
            )

    def _hear(self) -> None:
        """Everyone adds what the others did in the next wave that it has not taken in yet."""
        for k, line in enumerate(self.lines):
            for other, sums in enumerate(self.sums):
                for s, versions in enumerate(line.weights) if other != k else ():
                    versions[-1] = [
                        w + u for w, u in zip(versions[-1], sums[self.heard][s], strict=True)
                    ]
        self.heard += 1

    def drain(self) -> None:
        """Waves end as far as they are, and everyone takes in all; so all are equal, and the first
        stands for them.
        """
        self._end_wave()
        while self.heard < len(self.sums[0]):
            self._hear()
        for line in self.lines:
            for s, versions in enumerate(self.lines[0].weights):
                torch.testing.assert_close(line.weights[s][-1], versions[-1])
                line.weights[s][-1] = copies(versions[-1])
            line.drain()
        self._begin()


REFERENCES: dict[str, Any] = {
    "flush": Line,
    "stash": Stash,
    "vertical-sync": VerticalSync,
    "double-buffer": DoubleBuffer,
    "none": Newest,
    "spectrain": SpecTrain,
    "xpipe": XPipe,
    "pipeoptim": PipeOptim,
    "pipemare": PipeMare,
    "wpipe": WPipe,
    "avgpipe": AvgPipe,
    "hetpipe": HetPipe,
}


def simulate(
    rule: str,
    model: nn.Module,
    lengths: Sequence[int],
    optimizer: Any,
    loss: Any,
    batches: Sequence[tuple[Any, Any]],
    m: int,
    *,
    drains: Sequence[int] = (),
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train a copy of a model: the losses of all batches, and the state that it has in the end.

    `lengths`: layers of each stage. `drains`: numbers of batches before which the stream is
    drained. `options`: the rule's.
    """
    model = copy.deepcopy(model)
    layers = list(leaves(model))
    assert len(layers) == sum(lengths)
    ends = [sum(lengths[: s + 1]) for s in range(len(lengths))]
    stages = [
        nn.Sequential(*layers[end - length : end])
        for end, length in zip(ends, lengths, strict=True)
    ]
    training = REFERENCES[rule](stages, optimizer, loss, m, **options)
    losses = []
    for number, (x, y) in enumerate(batches):
        if number in drains:
            training.drain()
        losses.append(training.batch(x, y))
    training.drain()
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def leaves(model: nn.Module) -> list[nn.Module]:
    """The layers of nested Sequentials, in the order of running."""
    return (
        [leaf for child in model for leaf in leaves(child)]
        if type(model) is nn.Sequential
        else [model]
    )
