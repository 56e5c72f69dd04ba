"""Tied weights: one parameter that layers of several stages use, such as a GPT's embedding and its
head.

On a rank all stages share one tensor. At the end of a batch, when the program has been played,
every rank that holds it gives its gradient to the tensor's home: the first rank of the first stage
that uses it. There the gradients are added up in the order of the ranks and stepped by one
optimizer, and the others get the new weights before anybody's next forward. Nothing of this happens
inside a U: two tensors whose homes are each other's holders would wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.model.chain import Chain
from penstock.runtime.packed import Packed
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind, Schedule
from penstock.tracing.chain import TracedChain
from penstock.tracing.names import prefix_of
from penstock.transport.payload import Payload
from penstock.transport.transport import Transport

Guard = Callable[[int, Callable[[], Any]], Any]

#: What batch norm has besides weights, and changes in every forward.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Number(IntEnum):
    """Messages of all ranks after a program. Those of copies of a stage (`copies.Round`) have the
    numbers below 8, waves those from 16.
    """

    GRADIENTS = 8
    WEIGHTS = 9
    NORMS = 10
    VERDICT = 11

    @property
    def message(self) -> Message:
        """They are of no stage; stage 0 is there in every run."""
        return Message(Kind.U, 0, self)


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer that layers of several stages use, by the chain's name.

    `ranks` hold it, ascending; `home` is the one whose tensor counts; `stages` use it, ascending.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    home: int
    trainable: bool

    @property
    def links(self) -> set[Link]:
        """The links between its home and the others, both ways."""
        others = [rank for rank in self.ranks if rank != self.home]
        return {Link(self.home, rank) for rank in others} | {
            Link(rank, self.home) for rank in others
        }


def shared_tensors(
    description: Chain, lengths: Sequence[int], schedule: Schedule
) -> tuple[Shared, ...]:
    """The tensors that a cut leaves in several stages, in the order of the chain.

    Raises:
        ChainError: they cannot be kept one tensor: the schedule is asynchronous, or the tensor is a
        running statistic.
    """
    bounds = description.stage_bounds(list(lengths))
    stage_of = [stage for stage, (first, end) in enumerate(bounds) for _ in range(first, end)]
    found = []
    for name, users in description.tied.items():
        stages = tuple(sorted({stage_of[user] for user in users}))
        if len(stages) < 2:
            continue
        trainable = description.tensor(name).trainable
        layers = ", ".join(description.layers[user].name for user in users)
        used = f"{name} is used by layers {layers}, which this cut puts into stages {', '.join(map(str, stages))}"
        if trainable and not schedule.synchronous:
            raise ChainError(
                f"{used}. {schedule.name} is asynchronous: its stages update at different times, so there is no moment at "
                "which their gradients could be added up. Move the cut so that these layers stay together, untie them, "
                "or take a synchronous schedule"
            )
        if name.rpartition(".")[2] in _STATISTICS:
            raise ChainError(
                f"{used}. It is a running statistic, which every use moves on from where the one before left it: these "
                "layers have to stay in one stage, or have a batch norm each"
            )
        ranks = sorted({rank for stage in stages for rank in schedule.ranks_of_stage[stage]})
        found.append(
            Shared(name, stages, tuple(ranks), schedule.ranks_of_stage[stages[0]][0], trainable)
        )
    return tuple(found)


def tensors_of(traced: TracedChain, layers: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Parameters and buffers of some layers, live, by the chain's own names; of a shared one, the
    first.
    """
    held: dict[str, Tensor] = {}
    for layer, module in layers:
        prefix = prefix_of(layer, module)
        for found in (
            module.named_parameters(prefix, remove_duplicate=False),
            module.named_buffers(prefix, remove_duplicate=False),
        ):
            for name, tensor in found:
                held.setdefault(traced.aliases.get(name, name), tensor)
    return held


@dataclass
class Tied:
    """One rank's part in what is shared over ranks.

    Attributes:
        rank: which one.
        held: the tensors that several ranks hold and this is one of, in the order of the chain.
        transport: its links.
        guard: runs what may wait for a rank, and turns what a transport raises into what happened.
    """

    rank: int
    held: Sequence[tuple[Shared, Tensor]]
    transport: Transport
    guard: Guard
    _here: Mapping[int, list[Tensor]] = field(default_factory=dict)
    _there: Mapping[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trained = {shared.name for shared, _ in self.held if shared.trainable}
        self.refresh()

    def refresh(self) -> None:
        """Take in the parameters that have been thawed."""
        self._trained |= {shared.name for shared, tensor in self.held if tensor.requires_grad}
        rows = [row for row in self.held if row[0].name in self._trained]
        self._here, self._there = self._by_peer(rows)

    def _by_peer(
        self, rows: Iterable[tuple[Shared, Tensor]]
    ) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
        """By the other rank: tensors whose home is here, and those whose home is there. In one
        order on both sides.
        """
        here: dict[int, list[Tensor]] = {}
        there: dict[int, list[Tensor]] = {}
        for shared, tensor in rows:
            if shared.home != self.rank:
                there.setdefault(shared.home, []).append(tensor)
                continue
            for rank in shared.ranks:
                if rank != self.rank:
                    here.setdefault(rank, []).append(tensor)
        return dict(sorted(here.items())), dict(sorted(there.items()))

    def gather(self) -> None:
        """Give gradients to their homes, and add up those whose home is here, in the order of the
        ranks.
        """
        number = Number.GRADIENTS
        arrivals = {
            rank: self.transport.post(rank, number.message, _signature(number, tensors))
            for rank, tensors in self._here.items()
        }
        for home, tensors in self._there.items():
            flags = torch.tensor(
                [tensor.grad is not None for tensor in tensors],
                dtype=torch.uint8,
                device=tensors[0].device,
            )
            grads = [
                torch.zeros_like(tensor) if tensor.grad is None else _dense(tensor.grad)
                for tensor in tensors
            ]
            self._send(home, number, [flags, *Packed.of(grads).parts], _signature(number, tensors))
            for tensor in tensors:
                tensor.grad = None
        for rank, arrival in arrivals.items():
            tensors = self._here[rank]
            flags, *parts = self.guard(rank, arrival.wait).tensors
            found = Packed.of([tensor.detach() for tensor in tensors]).unpacked(parts)
            for tensor, there, grad in zip(tensors, flags.tolist(), found, strict=True):
                if there:
                    own = tensor.grad
                    tensor.grad = grad if own is None else _dense(own) + grad

    def hand_out(self) -> None:
        """Let the others have the weights whose home is here, and take those whose home is
        elsewhere.
        """
        self._hand_out(self._here, self._there)

    def begin(self) -> None:
        """Likewise with everything that is shared, frozen weights and buffers too."""
        self._hand_out(*self._by_peer(self.held))

    def _hand_out(
        self, here: Mapping[int, list[Tensor]], there: Mapping[int, list[Tensor]]
    ) -> None:
        number = Number.WEIGHTS
        arrivals = {
            home: self.transport.post(home, number.message, _signature(number, tensors))
            for home, tensors in there.items()
        }
        for rank, tensors in here.items():
            self._send(rank, number, Packed.of(tensors).parts, _signature(number, tensors))
        with torch.no_grad():
            for home, arrival in arrivals.items():
                tensors = there[home]
                found = Packed.of(tensors).unpacked(self.guard(home, arrival.wait).tensors)
                for tensor, value in zip(tensors, found, strict=True):
                    tensor.copy_(value)

    def _send(self, rank: int, number: Number, tensors: list[Tensor], signature: str) -> None:
        payload = Payload.row(tensors)
        self.guard(rank, lambda: self.transport.send(rank, number.message, payload, signature))


def _signature(number: Number, tensors: Sequence[Tensor]) -> str:
    """One name for one form: all that is shared, at the beginning, or what is trained."""
    return f"{number.name} {len(tensors)}"


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad
