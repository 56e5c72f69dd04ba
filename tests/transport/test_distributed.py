"""Transport over torch.distributed with transfers that reach no other process."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.transport.same_host_pair import forward

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.buffer_meter import BufferMeter
from penstock.transport.distributed import MAX_IN_FLIGHT, DistributedTransport
from penstock.transport.messages import header_name, message_tag
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost
from penstock.transport.wire import Wire


def test_a_stage_that_has_no_room_in_a_tag_is_refused():
    """Numbers that wrapped around would be another message's."""
    transport = DistributedTransport(wire=None)
    with pytest.raises(
        RunError,
        match=r"^stage 1024 sends 1 tensors for micro-batch 0: at most 32 tensors and 1,024 stages",
    ):
        transport.send(1, Message(Kind.F, 2**10, 0), Payload.of(torch.ones(1)), "s")


def test_a_stream_lets_go_of_what_nothing_answers():
    """A stream is never drained: without a release its gradients would fill the memory."""
    waited = []
    transport = DistributedTransport(
        wire=SimpleNamespace(wait=waited.append, buffers=BufferMeter())
    )
    for m in range(4):
        transport._in_flight[0, Message(Kind.B, 1, m)] = [(f"work {m}", torch.ones(1))]
    transport._in_flight[0, Message(Kind.U, 1, 0)] = [("meeting", torch.ones(1))]
    transport.release(before=2)
    assert waited == ["work 0", "work 1"]
    assert list(transport._in_flight) == [
        (0, Message(Kind.B, 1, 2)),
        (0, Message(Kind.B, 1, 3)),
        (0, Message(Kind.U, 1, 0)),
    ]


def test_an_activation_is_held_no_longer_than_until_its_gradient_is_back():
    """A copy of every boundary tensor of a batch, kept to its end, would be memory that no
    plan accounts for.
    """
    waited = []
    wire = SimpleNamespace(wait=waited.append, buffers=BufferMeter())
    transport = DistributedTransport(wire=wire)
    for m in range(2):
        transport._in_flight[1, Message(Kind.F, 0, m)] = [(f"work {m}", torch.ones(1))]
    transport.arrived(1, Message(Kind.F, 0, 0))
    assert len(transport._in_flight) == 2, "an activation says nothing of other activations"
    transport.arrived(1, Message(Kind.B, 1, 0))
    assert list(transport._in_flight) == [(1, Message(Kind.F, 0, 1))]
    transport.drain()
    assert waited == ["work 0", "work 1"]
    assert not transport._in_flight


class Work:
    """A transfer that is never over, or one that a wait ends."""

    def __init__(self, kind, tensor, peer, options):
        self.kind, self.tensor, self.peer, self.options = kind, tensor, peer, options
        self.waits, self.limits = 0, []

    def wait(self, *limit):
        """Count the waits, and note their limits."""
        self.waits += 1
        self.limits += limit

    def is_completed(self):
        """Return whether somebody has waited."""
        return bool(self.waits)


@pytest.fixture
def works(monkeypatch):
    """All transfers that were begun, in order, of which none reaches another process."""
    begun = []

    def isend(tensor, *, dst, **options):
        begun.append(Work("send", tensor, dst, options))
        return begun[-1]

    def irecv(tensor, *, src, **options):
        begun.append(Work("receive", tensor, src, options))
        return begun[-1]

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    return begun


def alone(device="cpu", **fields):
    """The transport of rank 1 of 3, whose processes are 4, 5 and 6 of the job."""
    return DistributedTransport(
        Wire(1, torch.device(device), dist.HashStore(), 0.05, "shared", [4, 5, 6], **fields)
    )


def announce(transport, peer, message, value, signature):
    """Store the header of a message that the peer will send."""
    link = Link(peer, transport.wire.rank)
    name = header_name((signature, link, message.kind, message.stage))
    transport.wire.store.set(name, Payload.of(value).header())


def test_a_send_goes_to_the_process_of_the_rank_and_is_counted_until_it_has_left(works):
    """Rank 2 is process 6; the tensors of a message have tags of their own."""
    transport, message = alone(), forward(3, stage=1)
    value = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    assert transport.send(2, message, Payload.of(value), "s") == 12 + 16
    assert [(work.kind, work.peer, work.options) for work in works] == [
        ("send", 6, {"group": "shared", "tag": message_tag(message, leaf)}) for leaf in (0, 1)
    ]
    assert (transport.arrives_at_once(2), transport.shares) == (False, False)
    buffers = transport.wire.buffers
    assert (buffers.now, buffers.peak) == (28, 28)
    transport.drain()
    assert [work.waits for work in works] == [1, 1]
    assert (buffers.now, buffers.peak) == (0, 28)
    transport.drain()
    assert [work.waits for work in works] == [1, 1], "nothing is waited for twice"
    deadline = timedelta(seconds=transport.wire.deadline_s)
    assert [work.limits for work in works] == [[deadline]] * 2, "the host waits for gloo"


def test_a_received_message_comes_from_the_process_of_the_rank_and_its_buffers_are_given_back(
    works,
):
    """First from the store, then posted ahead; an arrived gradient drops its activation."""
    transport, gradient = alone(), Message(Kind.B, 2, 0)
    announce(transport, 2, gradient, torch.ones(3), "s")
    transport.send(2, forward(0, stage=1), Payload.of(torch.ones(5)), "s")
    arrival = transport.post(2, gradient, "s")
    assert (arrival.posted, len(works)) == (None, 1)
    arrival.wait()
    assert [(work.kind, work.peer) for work in works] == [("send", 6), ("receive", 6)]
    assert works[1].options == {"group": "shared", "tag": message_tag(gradient, 0)}
    assert [work.waits for work in works] == [1, 1]
    assert transport.wire.buffers.now == 0
    assert transport.wire.buffers.peak == 20 + 12
    later = transport.post(2, gradient, "s")
    assert later.posted is not None
    assert transport.wire.buffers.now == 12


@pytest.mark.parametrize(
    ("arrived", "released"),
    [
        (Message(Kind.B, 2, 3), forward(3, stage=1)),
        (Message(Kind.L, 1, 3), Message(Kind.E, 1, 3)),
        (Message(Kind.F, 0, 3), None),
        (Message(Kind.E, 1, 3), None),
        (Message(Kind.U, 1, 3), None),
    ],
)
def test_what_arrives_releases_the_message_that_it_answers(works, arrived, released):
    """A gradient its activation, activations that come back their eviction, and of the same
    micro-batch, stage and peer.
    """
    transport = alone()
    kinds = (Kind.F, Kind.E, Kind.B)
    sent = [
        (peer, Message(kind, stage, m))
        for peer in (0, 2)
        for kind in kinds
        for stage in (1, 2)
        for m in (2, 3)
    ]
    for peer, message in sent:
        transport.send(peer, message, Payload.of(torch.ones(1)), "s")
    transport.arrived(2, arrived)
    gone = set(sent) - set(transport._in_flight)
    assert gone == ({(2, released)} if released else set())
    assert sum(work.waits for work in works) == len(gone)


def test_updates_in_flight_are_limited_to_a_number(works):
    """Nothing answers them: the oldest must leave before one more. Other kinds have no limit."""
    transport = alone()
    for number in range(MAX_IN_FLIGHT):
        transport.send(2, Message(Kind.U, 1, number), Payload.of(torch.ones(1)), "s")
        transport.send(2, forward(number, stage=1), Payload.of(torch.ones(1)), "s")
    assert sum(work.waits for work in works) == 0
    for extra in range(3):
        last = Message(Kind.U, 1, MAX_IN_FLIGHT + extra)
        transport.send(2, last, Payload.of(torch.ones(1)), "s")
        assert [work.waits for work in works[: 2 * extra + 2]] == [1, 0] * (extra + 1)
        assert sum(work.waits for work in works) == extra + 1
        assert len(transport._in_flight) == 2 * MAX_IN_FLIGHT


def test_receives_of_unknown_shape_are_posted_in_the_order_of_their_channel(works):
    """One that is known waits for those before it; other peers and updates are other channels."""
    transport = alone()
    messages = {
        name: Message(kind, stage, 0)
        for name, kind, stage in (("a", Kind.F, 0), ("b", Kind.F, 1), ("u", Kind.U, 1))
    }
    announce(transport, 0, messages["b"], torch.ones(2), "s")
    transport.post(0, messages["b"], "s").wait()
    works.clear()
    first = transport.post(0, messages["a"], "s")
    known = transport.post(0, messages["b"], "s")
    update = transport.post(0, messages["u"], "s")
    other = transport.post(2, messages["b"], "s")
    assert [arrival.posted for arrival in (first, known, update, other)] == [None] * 4
    assert transport._unposted == [first, known, update, other]
    announce(transport, 0, messages["u"], torch.ones(3), "s")
    update.wait()
    assert [work.tensor.numel() for work in works] == [3]
    assert transport._unposted == [first, known, other]
    announce(transport, 0, messages["a"], torch.ones(4), "s")
    known.wait()
    assert [work.tensor.numel() for work in works] == [3, 4, 2]
    assert [work.waits for work in works] == [1, 0, 1]
    assert transport._unposted == [other]
    first.wait()
    assert [work.waits for work in works] == [1, 1, 1]


def test_over_a_device_empty_tensors_stay_and_dtypes_without_a_kernel_go_as_bytes(works):
    """Its communicators know no complex numbers, and a transfer of nothing may block."""
    groups = {(Link(1, 2), False): "to", (Link(2, 1), False): "from"}
    transport = alone(groups=groups)
    value = [torch.empty(0), torch.ones(3, dtype=torch.complex64), torch.ones(2)]
    assert transport.send(2, forward(4, stage=1), Payload.of(value), "s") == 24 + 8
    assert [(work.options["group"], work.tensor.dtype, work.tensor.numel()) for work in works] == [
        ("to", torch.uint8, 24),
        ("to", torch.float32, 2),
    ]
    (work, _), _ = transport._in_flight[2, forward(4, stage=1)]
    assert work.text == "1F4 from rank 1 to rank 2"
    transport.drain()
    assert [(work.waits, work.limits) for work in works] == [(1, [])] * 2, "the stream waits"
    works.clear()
    gradient = Message(Kind.B, 2, 4)
    announce(transport, 2, gradient, value, "s")
    arrival = transport.post(2, gradient, "s")
    transport.catch_up(arrival)
    assert [(work.options["group"], work.tensor.numel()) for work in works] == [
        ("from", 24),
        ("from", 2),
    ]
    _, tensors, transfers = arrival.posted
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.complex64, torch.float32]
    assert transfers[0].text == "2B4 from rank 2 to rank 1"


def test_without_a_communicator_tensors_of_a_device_pass_through_host_memory(works):
    """Gloo carries CPU tensors; the receiver puts them back on its device."""
    transport = alone("meta")
    announce(transport, 0, forward(0), torch.ones(2), "s")
    received = transport.post(0, forward(0), "s").wait()
    assert received.tensors[0].device.type == "meta"
    assert works[0].tensor.device.type == "cpu"


def test_over_a_communicator_tensors_stay_on_their_device(works):
    """NCCL reads and writes the memory of the device, without a copy of the host."""
    groups = {(Link(1, 2), False): "to", (Link(0, 1), False): "from"}
    transport = alone("meta", groups=groups)
    transport.send(2, forward(0, stage=1), Payload.of(torch.ones(2, device="meta")), "s")
    announce(transport, 0, forward(0), torch.ones(2), "s")
    transport.post(0, forward(0), "s").wait()
    assert [work.tensor.device.type for work in works] == ["meta", "meta"]


def test_a_sent_view_is_resolved_and_packed(works):
    """The bytes in memory are sent, not those that a view reads."""
    transport = alone()
    conjugated = torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj()
    # The imaginary part of one number is contiguous, so that no copy resolves its sign.
    negated = torch.tensor([1 + 2j]).conj().imag
    values = [conjugated, negated, torch.arange(6.0)[::2], torch.ones(1).expand(4)]
    assert (negated.is_neg(), negated.is_contiguous()) == (True, True)
    transport.send(2, forward(0, stage=1), Payload.of(values), "s")
    for work, value in zip(works, values, strict=True):
        sent = work.tensor
        assert (sent.is_conj(), sent.is_neg(), sent.requires_grad) == (False, False, False)
        assert sent.is_contiguous()
        assert torch.equal(sent, value if sent.shape == value.shape else value[:1])
    assert works[3].tensor.numel() == 1


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("Invalid scalar type", False),
        ("Invalid scalar type", True),
        ("Connection closed by peer", False),
    ],
)
@pytest.mark.parametrize("sends", [False, True])
def test_a_transfer_that_cannot_begin_says_what_between_whom(monkeypatch, sends, text, closed):
    """From the side of this rank; a closed link is the failure of another."""
    transport = alone(lost=closed)
    lost = closed or text.startswith("Connection")

    def refuse(*args, **options):
        raise RuntimeError(text)

    monkeypatch.setattr(dist, "isend", refuse)
    monkeypatch.setattr(dist, "irecv", refuse)
    announce(transport, 0, forward(3), torch.ones(2), "s")
    payload = Payload.of(torch.ones(2))

    def begin():
        if sends:
            transport.send(2, forward(3, stage=1), payload, "s")
        else:
            transport.catch_up(transport.post(0, forward(3), "s"))

    with pytest.raises(TransportLost if lost else RunError) as error:
        begin()
    if lost:
        assert str(error.value) == text
        return
    transfer = (
        "1F3 could not be sent to rank 2" if sends else "0F3 could not be received from rank 0"
    )
    assert str(error.value) == (
        f"rank 1: {transfer}, as torch.float32[2] on cpu: RuntimeError: Invalid scalar type"
    )


def test_buffers_of_all_tensors_of_a_message_are_counted(works):
    """Not only those of the largest one, nor of tensors alone that have elements."""
    transport, gradient = alone(), Message(Kind.B, 2, 0)
    announce(transport, 2, gradient, [torch.ones(3), torch.ones(7), torch.ones(0)], "s")
    transport.post(2, gradient, "s").wait()
    assert (transport.wire.buffers.now, transport.wire.buffers.peak) == (0, 40)
    transport.post(2, gradient, "s")
    assert transport.wire.buffers.now == 40
