"""Copies of a stage on several ranks: they begin with the same weights, and at every U they add up
their gradients.

The sum is made in the order of the ranks, so that it is the same to the bit wherever and whenever
it is made. Two copies send each other all they have. More of them make an all-reduce out of two
rounds: each copy owns a piece of the gradients, gets that piece from all others, adds them up, and
hands the sum round (2 (k - 1) / k of the gradients sent by each of k copies, as little as any
all-reduce needs: Rabenseifner 2004).

Buffers, such as the running statistics of batch norm, are those of the first copy: it alone sees
its micro-batches in them, as in torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.runtime.packed import Packed, flat, unflat
from penstock.runtime.stage import Stage
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.tracing.single_copy import keeps_sparse_gradients
from penstock.transport.payload import Payload
from penstock.transport.transport import Transport

#: Runs what may wait for a rank, and turns what a transport raises into what happened.
Guard = Callable[[int, Callable[[], Payload | None]], Payload | None]


#: Numbers of messages with waves begin here, after those of meetings.
_WAVES, _MOST_WAVES = 16, 4096


class Round(IntEnum):
    """Messages of one meeting."""

    GRADIENTS = 0
    SUMS = 1
    BUFFERS = 2
    WEIGHTS = 3


@dataclass
class Copies:
    """One rank's copy of a stage among the others.

    Attributes:
        stage: the copy that is held here.
        ranks: who holds one, ascending.
        rank: this one.
        transport: its links.
        guard: see `Guard`.
        apart: parameters that other stages use too, whose gradients come together elsewhere.
    """

    stage: Stage
    ranks: tuple[int, ...]
    rank: int
    transport: Transport
    guard: Guard
    apart: Collection[Tensor] = ()
    _before: list[Tensor | None] | None = None

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Take in the parameters that the stage trains now."""
        elsewhere = set(map(id, self.apart))
        self._parameters = [
            each for each in self.stage.update.parameters if id(each) not in elsewhere
        ]
        self._sparse = {
            id(module.weight)
            for module in self.stage.modules()
            if keeps_sparse_gradients(module) and isinstance(module.weight, Tensor)
        }

    def begin(self) -> None:
        """Before a batch: gradients of earlier ones, which no update has used, are set aside: they
        have been added up.
        """
        parameters = self._parameters
        self._before = (
            [parameter.grad for parameter in parameters] if self._before is None else self._before
        )
        for parameter in parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Drop what was set aside."""
        self._before = None

    def meet(self) -> None:
        """Add up the gradients of all copies, and take the first one's buffers.

        Every copy must come here, in the same order on ranks that share several stages; until they
        have, this waits.
        """
        parameters = self._parameters
        if parameters:
            here = torch.tensor(
                [parameter.grad is not None for parameter in parameters],
                dtype=torch.uint8,
                device=parameters[0].device,
            )
            own = [self._dense(parameter) for parameter in parameters]
            tables = [each for each in parameters if id(each) in self._sparse]
            flags, total = self._all_sum(here, [*own, *map(rows_of, tables)])
            rows = dict(zip(map(id, tables), total[len(parameters) :], strict=True))
            before = self._before or [None] * len(parameters)
            for parameter, there, summed, earlier in zip(
                parameters, flags.tolist(), total[: len(parameters)], before, strict=True
            ):
                found = summed if there else None
                if found is not None and id(parameter) in rows:
                    found = sparse_of(found, rows[id(parameter)])
                parameter.grad = (
                    found if earlier is None else earlier if found is None else earlier + found
                )
            self._before = None
        self._share(Round.BUFFERS, self._buffers())

    def _dense(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient as it is added up.

        Raises:
            SettingError: it is sparse, and no module of the stage says that it would be.
        """
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(parameter)
        if grad.layout is torch.strided:
            return grad
        if id(parameter) not in self._sparse:
            raise SettingError(
                f"a gradient of stage {self.stage.index}, of shape {tuple(grad.shape)}, is {grad.layout}, and copies of the stage can "
                "add up sparse gradients of nn.Embedding(sparse=True) and nn.EmbeddingBag(sparse=True) only. Make it dense, or take a "
                "schedule with one copy of each stage, such as schedule='1f1b'"
            )
        return grad.to_dense()

    def share_weights(self) -> None:
        """Let all copies begin with the first one's parameters and buffers."""
        tensors = [
            tensor
            for module in self.stage.modules()
            for tensor in module._parameters.values()
            if tensor is not None
        ]
        self._share(Round.WEIGHTS, [*tensors, *self._buffers()])

    def _buffers(self) -> list[Tensor]:
        return [
            buffer
            for module in self.stage.modules()
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def _all_sum(self, flags: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Flags and tensors added up over the copies, in the order of the ranks."""
        if len(self.ranks) == 2:
            packed = Packed.of(tensors)
            found = self._exchange(Round.GRADIENTS, [[flags, *packed.parts]] * 2)
            mine = self.ranks.index(self.rank)
            own, theirs = found[mine], found[1 - mine]
            # In place where nobody else has what has arrived: a fresh tensor of that size costs as
            # much time as its sum.
            sums = [
                there + here if self.transport.shares else there.add_(here)
                for here, there in zip(own, theirs, strict=True)
            ]
            return sums[0], packed.unpacked(sums[1:])
        pieces = list(
            zip(*(part.tensor_split(len(self.ranks)) for part in flat(tensors)), strict=True)
        )
        found = self._exchange(Round.GRADIENTS, [[flags, *piece] for piece in pieces])
        flags = _sum([row[0] for row in found])
        own = [_sum(column) for column in zip(*(row[1:] for row in found), strict=True)]
        handed = self._exchange(Round.SUMS, [own] * len(self.ranks))
        return flags, unflat([torch.cat(column) for column in zip(*handed, strict=True)], tensors)

    def _exchange(self, number: Round, rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Send `rows[n]` to the n-th copy; what the copies have sent here, in the order of the
        ranks, the own row among them.
        """
        message = Message(Kind.U, self.stage.index, number)
        # Parameters may be thawed: with more of them the message has another form.
        signature = f"{number.name} {len(self._parameters)}"
        others = [rank for rank in self.ranks if rank != self.rank]
        arrivals = {rank: self.transport.post(rank, message, signature) for rank in others}
        for rank, row in zip(self.ranks, rows, strict=True):
            if rank != self.rank:
                self.transport.send(rank, message, Payload.row(row), signature)
        found: list[list[Tensor]] = []
        for rank, row in zip(self.ranks, rows, strict=True):
            arrived = self.guard(rank, arrivals[rank].wait) if rank != self.rank else None
            found.append(list(row) if arrived is None else arrived.tensors)
        return found

    def _share(self, number: Round, tensors: list[Tensor]) -> None:
        """Let the tensors of all copies be the first one's."""
        if not tensors:
            return
        message = Message(Kind.U, self.stage.index, number)
        first, *others = self.ranks
        if self.rank == first:
            parts = flat(
                tensors
            )  # copies: the next batch may change the tensors before they have left
            for rank in others:
                self.transport.send(rank, message, Payload.row(parts), number.name)
            return
        arrived = self.guard(first, self.transport.post(first, message, number.name).wait)
        assert arrived is not None
        with torch.no_grad():
            for tensor, value in zip(tensors, unflat(arrived.tensors, tensors), strict=True):
                tensor.copy_(value)


@dataclass(frozen=True)
class WaveMessages:
    """What copies of a stage that do not meet at every U hand on to each other (see
    `penstock.optim.stage_weights.WaveExchange`).
    """

    here: Copies

    @property
    def copies(self) -> int:
        """How many there are, this one included."""
        return len(self.here.ranks)

    def hand_on(self, wave: int, tensors: list[Tensor]) -> None:
        """Send the tensors of a wave to the other copies, and go on at once. Nobody may change them
        afterwards.
        """
        for rank in self._others:
            payload = Payload.row(tensors)
            self.here.guard(
                rank, partial(self.here.transport.send, rank, self._message(wave), payload, "wave")
            )

    def take_in(self, wave: int) -> list[list[Tensor]]:
        """What the other copies have handed on for a wave, in the order of their ranks, waited for."""
        arrivals = {
            rank: self.here.transport.post(rank, self._message(wave), "wave")
            for rank in self._others
        }
        arrived = [self.here.guard(rank, arrival.wait) for rank, arrival in arrivals.items()]
        return [list(payload.tensors) for payload in arrived if payload is not None]

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.here.ranks if rank != self.here.rank]

    def _message(self, wave: int) -> Message:
        return Message(Kind.U, self.here.stage.index, _WAVES + wave % _MOST_WAVES)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term.to(total.device)
    return total


def rows_of(parameter: nn.Parameter) -> Tensor:
    """One number for every row of a table: above 0 where its gradient has the row, even if with
    zeros.
    """
    rows = torch.zeros(parameter.shape[0], dtype=torch.float32, device=parameter.device)
    grad = parameter.grad
    if grad is None:
        return rows
    if grad.layout is torch.strided:
        return rows + 1
    rows[grad.coalesce().indices()[0]] = 1
    return rows


def sparse_of(dense: Tensor, rows: Tensor) -> Tensor:
    """The sparse gradient with these rows: what an optimizer for sparse gradients steps, and no
    other rows.
    """
    indices = rows.nonzero().reshape(1, -1)
    return torch.sparse_coo_tensor(
        indices, dense[indices[0]], dense.shape, is_coalesced=True, check_invariants=False
    )
