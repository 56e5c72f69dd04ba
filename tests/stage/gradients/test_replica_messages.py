"""Messages among the replicas of a stage at an update."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from penstock.stage.gradients.replica_messages import ReplicaMessages
from penstock.transport.in_process import Exchange, MemoryTransport
from penstock.transport.update_messages import UpdateMessage

RANKS = (1, 4, 6)


class Watched(MemoryTransport):
    """A transport that notes the signatures of messages."""

    signatures: ClassVar[list[tuple[str, int, str]]] = []

    def send(self, peer, message, payload, signature):
        """Send, and note the signature."""
        self.signatures.append(("send", peer, signature))
        return super().send(peer, message, payload, signature)

    def post(self, peer, message, signature):
        """Post, and note the signature."""
        self.signatures.append(("post", peer, signature))
        return super().post(peer, message, signature)


@pytest.fixture
def replicas():
    """The messages of three replicas of stage 2; waits are noted by rank."""
    exchange, waits = Exchange(), []
    Watched.signatures = []

    def guard_of(rank):
        def guard(peer, action):
            waits.append((rank, peer))
            return action()

        return guard

    members = [
        ReplicaMessages(2, RANKS, rank, Watched(rank, exchange, 5.0), guard_of(rank))
        for rank in RANKS
    ]
    return members, waits


def test_each_replica_knows_its_position_and_the_others(replicas):
    """In the order of the ranks."""
    members, _ = replicas
    assert [messages.position for messages in members] == [0, 1, 2]
    assert [messages.others for messages in members] == [[4, 6], [1, 6], [1, 4]]


def test_what_one_sends_all_others_receive(replicas):
    """By rank; under the name of the message unless another form is said."""
    members, waits = replicas
    for messages in members:
        messages.send(UpdateMessage.BUFFERS, [torch.tensor(messages.rank), torch.ones(2)])
    for messages in members:
        rows = messages.receive(UpdateMessage.BUFFERS)
        assert list(rows) == messages.others
        assert [int(row[0]) for row in rows.values()] == messages.others
        assert all(len(row) == 2 for row in rows.values())
    assert waits == [(messages.rank, other) for messages in members for other in messages.others]
    assert {signature for _, _, signature in Watched.signatures} == {UpdateMessage.BUFFERS.name}
    members[0].send(UpdateMessage.BUFFERS, [torch.ones(1)], "a form")
    assert Watched.signatures[-1] == ("send", 6, "a form")


def test_an_exchange_gives_each_replica_its_row_and_keeps_the_own_one(replicas):
    """Received in the order of the ranks; receives are posted before anything is sent."""
    members, waits = replicas
    rows_of = {
        messages.rank: [[torch.tensor(10 * messages.rank + target)] for target in RANKS]
        for messages in members
    }
    received = {}
    for messages in members:
        for rank, row in zip(RANKS, rows_of[messages.rank], strict=True):
            if messages.rank not in (rank, 6):
                messages.send_row(rank, UpdateMessage.GRADIENTS, row, "form")
    Watched.signatures.clear()
    last = members[2]
    received = last.exchange(UpdateMessage.GRADIENTS, rows_of[6], "form")
    assert [int(row[0]) for row in received] == [16, 46, 66]
    assert [kind for kind, _, _ in Watched.signatures] == ["post", "post", "send", "send"]
    assert {signature for _, _, signature in Watched.signatures} == {"form"}
    for messages in members[:2]:
        (row,) = [messages.receive_row(6, UpdateMessage.GRADIENTS, "form")]
        assert int(row[0]) == 60 + messages.rank
    # Errors of a wait name the rank that is awaited.
    assert waits == [(6, 1), (6, 4), (1, 6), (4, 6)]
    for rank in RANKS[:2]:
        members[RANKS.index(rank)].send_row(6, UpdateMessage.SUMS, [torch.ones(1)])
    Watched.signatures.clear()
    last.exchange(UpdateMessage.SUMS, rows_of[6])
    assert {signature for _, _, signature in Watched.signatures} == {UpdateMessage.SUMS.name}
    members[0].receive_row(6, UpdateMessage.SUMS)
    assert Watched.signatures[-1] == ("post", 6, UpdateMessage.SUMS.name)
    with pytest.raises(ValueError, match="shorter"):
        last.exchange(UpdateMessage.GRADIENTS, rows_of[6][:2], "form")


def test_a_text_arrives_as_it_was_sent(replicas):
    """Whatever its characters; its length goes first, under a form of its own."""
    members, _ = replicas
    for text in ("{}", "naïve €", "x" * 1000):
        members[0].send_text(6, UpdateMessage.OPTIMIZER_STATE, text)
        assert members[2].receive_text(1, UpdateMessage.OPTIMIZER_STATE) == text
    name = UpdateMessage.OPTIMIZER_STATE.name
    assert ("send", 6, f"{name} {len('naïve €'.encode())}") in Watched.signatures
    assert Watched.signatures[-1] == ("post", 1, f"{name} 1000")
    assert ("send", 6, f"{name} length") in Watched.signatures
