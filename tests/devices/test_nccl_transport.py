"""Parts of the path over NCCL that need no ranks: which errors mean that a rank is lost, bytes, and
the deadline of the device.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.time_limits import HANG_S

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.communicators import (
    GROUP_TIMEOUT,
    NCCL_DTYPES,
    abort_communicators,
    as_bytes,
    communicator_keys,
)
from penstock.transport.distributed import DistributedTransport
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost, TransportTimeout
from penstock.transport.wire import DeviceTransfer, Wire, is_lost


def wire(**options) -> Wire:
    """Rank 0's wire, with no process group behind it."""
    return Wire(0, torch.device("cpu"), {}, 5.0, None, range(2), **options)


class Store(dict):
    """As much of a store as a send asks for."""

    set = dict.__setitem__


LOST = [
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    dist.DistNetworkError("The client socket has timed out"),
    RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2000"),
    RuntimeError("Connection reset by peer"),
]
OF_THIS_RANK = [
    RuntimeError("No backend type associated with device type cpu"),
    RuntimeError("[/gloo/transport/tcp/pair.cc:534] writev [127.0.0.1]:2000: Bad address"),
    RuntimeError("Unconvertible NCCL type Short"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_errors_of_links_mean_that_a_rank_is_lost(error, monkeypatch):
    """Only they lead to the question what has become of the other rank."""
    assert is_lost(error)
    assert isinstance(sending(error, monkeypatch), TransportLost)


@pytest.mark.parametrize("error", OF_THIS_RANK, ids=str)
def test_errors_of_this_rank_keep_their_words(error, monkeypatch):
    """`a rank is gone without a word` would hide from every rank that memory has run out on this
    one.
    """
    assert not is_lost(error)
    raised = sending(error, monkeypatch)
    assert type(raised) is RunError
    start = "rank 0: 2F7 could not be sent to rank 1, as torch.float32[3] on cpu: "
    assert str(raised) == f"{start}{type(error).__name__}: {error}"
    assert raised.__cause__ is error


def sending(error: Exception, monkeypatch) -> Exception:
    """What comes of an error of torch's at a send."""

    def refuse(*args, **options):
        """Raise it."""
        raise error

    monkeypatch.setattr(dist, "isend", refuse)
    rank_wire = wire()
    rank_wire.store = Store()
    transport = DistributedTransport(rank_wire)
    with pytest.raises((TransportLost, RunError)) as raised:
        transport.send(1, Message(Kind.F, 2, 7), Payload.of(torch.ones(3)), "form")
    return raised.value


@pytest.mark.parametrize(
    ("error", "kind"), [(LOST[0], TransportLost), (OF_THIS_RANK[3], torch.OutOfMemoryError)]
)
def test_a_wait_that_fails_tells_lost_ranks_from_errors_of_its_own(error, kind):
    """Likewise where the error comes at the wait."""

    def wait(timeout=None):
        """Raise it."""
        raise error

    with pytest.raises(kind):
        wire().wait(SimpleNamespace(wait=wait))


def test_a_wait_for_nccl_has_no_timeout_and_a_wait_for_gloo_has_one():
    """Given one, torch polls until the device is done, and the host stands."""
    asked = []
    work = SimpleNamespace(wait=lambda *timeout: asked.append(timeout), is_completed=lambda: True)
    rank_wire = wire()
    rank_wire.wait(DeviceTransfer(work, "0F0"))
    rank_wire.wait(work)
    assert asked == [(), (timedelta(seconds=5),)]


def test_the_device_is_late_when_nothing_has_come_for_longer_than_the_deadline(monkeypatch):
    """Each message that comes starts the clock anew: a long program may enqueue waits of many
    messages at once.
    """
    clock = [100.0]
    monkeypatch.setattr("penstock.transport.wire.time.monotonic", lambda: clock[0])
    over = [False, False]
    works = [
        SimpleNamespace(wait=lambda: None, is_completed=lambda number=number: over[number])
        for number in range(2)
    ]
    rank_wire = wire()
    assert rank_wire.late() is None
    for number, work in enumerate(works):
        rank_wire.wait(DeviceTransfer(work, f"0F{number}"))
    clock[0] = 104.0
    assert rank_wire.late() is None
    over[0] = True
    assert rank_wire.late() is None
    clock[0] = 108.0
    assert rank_wire.late() is None, "the first has come at 104"
    clock[0] = 109.5
    assert rank_wire.late() == "0F1"
    over[1] = True
    assert rank_wire.late() is None


def test_torchs_watchdog_is_never_sooner_than_the_deadline():
    """It ends the process by a signal, so that no rank hears why."""
    assert timedelta(days=1) <= GROUP_TIMEOUT


def test_all_ranks_make_communicators_in_one_order():
    """Whatever the order in which the links were found."""
    links = [Link(1, 0), Link(0, 1), Link(1, 0)]
    keys = communicator_keys(links, [Link(0, 1)])
    assert keys == [((0, 1), False), ((0, 1), True), ((1, 0), False)]
    assert keys == communicator_keys(reversed(links), [Link(0, 1)])


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.complex64, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_what_nccl_has_no_dtype_for_travels_as_bytes_of_the_same_memory(dtype, shape):
    """A receive into the bytes must fill the tensor."""
    tensor = torch.zeros(shape, dtype=dtype)
    carried = as_bytes(tensor)
    assert carried.dtype in NCCL_DTYPES
    assert carried.nbytes == tensor.nbytes
    assert carried.data_ptr() == tensor.data_ptr()
    assert (carried is tensor) == (dtype in NCCL_DTYPES)


def test_tensors_without_elements_are_not_sent_over_a_communicator(monkeypatch):
    """What is evicted of a stage that keeps nothing is one on the CPU, which NCCL would refuse."""
    sent = []
    work = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
    monkeypatch.setattr(dist, "isend", lambda tensor, **_: sent.append(tensor.shape) or work)
    group = SimpleNamespace()
    rank_wire = wire(groups={(Link(0, 1), False): group})
    rank_wire.store = Store()
    row = Payload.row([torch.empty(0, dtype=torch.uint8), torch.ones(2)])
    DistributedTransport(rank_wire).send(1, Message(Kind.E, 0, 0), row, "form")
    assert sent == [(2,)]


def test_an_abort_of_one_communicator_does_not_wait_for_that_of_another():
    """NCCL's abort may stand until another communicator is aborted as well."""
    import threading

    barrier = threading.Barrier(3, timeout=HANG_S)
    ended = []

    def abort():
        """End when all others are aborted too."""
        barrier.wait()
        ended.append(1)

    abort_communicators([SimpleNamespace(abort=abort) for _ in range(3)])
    assert ended == [1, 1, 1]


def test_both_directions_at_once_are_one_group(monkeypatch):
    """Two ranks that time a link in both directions would else wait for each other on one stream."""
    from penstock.measure.messages import Wires

    groups = []

    def begin(ops):
        """Take the ops of one group."""
        groups.append([op.op for op in ops])
        return []

    monkeypatch.setattr(dist, "P2POp", lambda op, *_: SimpleNamespace(op=op))
    monkeypatch.setattr(dist, "batch_isend_irecv", begin)
    Wires(None, torch.device("cpu")).meet(1)
    assert groups == [[dist.irecv, dist.isend]]


def test_a_timeout_is_no_loss():
    """gloo's error at the deadline names the transport, too."""

    def wait(timeout):
        """Raise what gloo raises."""
        raise RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 0ms")

    rank_wire = wire()
    rank_wire.deadline_s = 0.0
    with pytest.raises(TransportTimeout):
        rank_wire.wait(SimpleNamespace(wait=wait))
