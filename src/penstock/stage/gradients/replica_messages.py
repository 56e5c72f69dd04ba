"""Messages among the replicas of one stage at an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.transport.payload import Payload
from penstock.transport.transport import Transport
from penstock.transport.update_messages import UpdateMessage

#: Runs a function that may wait for a rank, and converts errors of the transport into those of the
#: run.
Guard = Callable[[int, Callable[[], Payload | None]], Payload | None]


@dataclass(frozen=True)
class ReplicaMessages:
    """One rank's messages to and from the other replicas of a stage.

    Attributes:
        stage: index of the stage.
        ranks: the ranks that hold a replica, ascending.
        rank: this rank.
        transport: the links of this rank.
        guard: see `Guard`.
    """

    stage: int
    ranks: tuple[int, ...]
    rank: int
    transport: Transport
    guard: Guard

    @property
    def position(self) -> int:
        """The position of this rank among the replicas."""
        return self.ranks.index(self.rank)

    @property
    def others(self) -> list[int]:
        """The ranks of the other replicas."""
        return [rank for rank in self.ranks if rank != self.rank]

    def send(self, number: UpdateMessage, row: Sequence[Tensor], signature: str = "") -> None:
        """Send the same tensors to all others, without waiting; they must not change afterwards."""
        for rank in self.others:
            self.send_row(rank, number, row, signature)

    def send_row(
        self, rank: int, number: UpdateMessage, row: Sequence[Tensor], signature: str = ""
    ) -> None:
        """Send tensors to one other rank, as `send` does."""
        message = number.of_stage(self.stage)
        self.transport.send(rank, message, Payload.row(list(row)), signature or number.name)

    def receive_row(self, rank: int, number: UpdateMessage, signature: str = "") -> list[Tensor]:
        """Wait for the tensors that one other rank has sent."""
        arrival = self.transport.post(rank, number.of_stage(self.stage), signature or number.name)
        payload = self.guard(rank, arrival.wait)
        assert payload is not None
        return list(payload.tensors)

    def send_text(self, rank: int, number: UpdateMessage, text: str) -> None:
        """Send a text to one other rank, its length first."""
        # Messages of other forms have other signatures, so the receiver must know the length.
        characters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        length = len(characters)
        self.send_row(rank, number, [torch.tensor([length])], f"{number.name} length")
        self.send_row(rank, number, [characters], f"{number.name} {length}")

    def receive_text(self, rank: int, number: UpdateMessage) -> str:
        """Wait for a text that one other rank has sent."""
        (length,) = self.receive_row(rank, number, f"{number.name} length")
        (characters,) = self.receive_row(rank, number, f"{number.name} {int(length)}")
        return bytes(characters.tolist()).decode()

    def receive(self, number: UpdateMessage, signature: str = "") -> dict[int, list[Tensor]]:
        """Wait for the tensors that all others have sent; return them by rank."""
        message = number.of_stage(self.stage)
        signature = signature or number.name
        # All are posted before the first is awaited: they may arrive in any order.
        arrivals = {rank: self.transport.post(rank, message, signature) for rank in self.others}
        rows = {}
        for rank, arrival in arrivals.items():
            payload = self.guard(rank, arrival.wait)
            assert payload is not None
            rows[rank] = list(payload.tensors)
        return rows

    def exchange(
        self, number: UpdateMessage, rows: Sequence[Sequence[Tensor]], signature: str = ""
    ) -> list[list[Tensor]]:
        """Send `rows[n]` to the n-th replica, and receive one row from each.

        Args:
            number: the message number.
            rows: for each replica the tensors for it; those for this rank stay here.
            signature: distinguishes messages of different forms.

        Returns:
            The rows in the order of the ranks; in the place of this rank its own.
        """
        message = number.of_stage(self.stage)
        signature = signature or number.name
        arrivals = {rank: self.transport.post(rank, message, signature) for rank in self.others}
        for rank, row in zip(self.ranks, rows, strict=True):
            if rank != self.rank:
                self.transport.send(rank, message, Payload.row(list(row)), signature)
        received: list[list[Tensor]] = []
        for rank, row in zip(self.ranks, rows, strict=True):
            payload = self.guard(rank, arrivals[rank].wait) if rank != self.rank else None
            received.append(list(row) if payload is None else list(payload.tensors))
        return received
