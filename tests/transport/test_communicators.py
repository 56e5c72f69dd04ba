"""Communicators: which there are, in which order all ranks create them, and how they end."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from penstock.schedule.lower import Link
from penstock.transport import communicators
from penstock.transport.communicators import (
    NCCL_DTYPES,
    abort_communicators,
    as_bytes,
    close_gloo_group,
    communicator_keys,
    make_common_communicator,
    make_communicators,
)

CPU = torch.device("cpu")


def test_all_ranks_create_communicators_in_one_order():
    """Whatever the order in which they know of the links, and each once."""
    links = [Link(1, 2), Link(0, 1), Link(1, 0), Link(0, 1)]
    copies = [Link(2, 0), Link(0, 1)]
    expected = [
        (Link(0, 1), False),
        (Link(0, 1), True),
        (Link(1, 0), False),
        (Link(1, 2), False),
        (Link(2, 0), True),
    ]
    for order in itertools.permutations(links):
        assert communicator_keys(order, reversed(copies)) == expected


@pytest.fixture
def calls(monkeypatch):
    """The calls of torch.distributed, of which none reaches another process."""
    log = []

    def record(name, result=None):
        def call(*args, **options):
            log.append((name, args, options))
            return result

        return call

    waited = SimpleNamespace(wait=lambda: log.append(("wait", (), {})))

    def new_group(ranks, timeout, backend, **options):
        log.append(("new_group", (ranks, timeout, backend), options))
        return f"group {ranks}"

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for name in ("isend", "irecv", "all_reduce"):
        monkeypatch.setattr(dist, name, record(name, waited))
    monkeypatch.setattr(dist, "barrier", record("barrier"))
    return log


def test_every_communicator_is_created_by_all_and_connected_by_its_ranks(calls):
    """A rank sends on its own links and receives on those to it; a barrier comes last."""
    keys = [(Link(0, 1), False), (Link(0, 2), False), (Link(1, 2), True)]
    groups = make_communicators(keys, 1, CPU, "everyone")
    assert groups == {
        (Link(0, 1), False): "group [0, 1]",
        (Link(1, 2), True): "group [1, 2]",
    }
    assert [(name, options.get("group")) for name, _, options in calls] == [
        ("new_group", None),
        ("irecv", "group [0, 1]"),
        ("wait", None),
        ("new_group", None),
        ("new_group", None),
        ("isend", "group [1, 2]"),
        ("wait", None),
        ("barrier", "everyone"),
    ]
    assert [args[1] for name, args, _ in calls if name in ("isend", "irecv")] == [0, 2]
    for _, (_, timeout, backend), _ in (call for call in calls if call[0] == "new_group"):
        assert backend == "nccl"
        assert timeout >= timedelta(days=1), "torch's watchdog would end the process"


def test_communicators_are_connected_by_tensors_on_the_device(calls):
    """NCCL refuses tensors in host memory."""
    device = torch.device("meta")
    make_communicators([(Link(0, 1), False), (Link(1, 2), False)], 1, device, "everyone")
    make_common_communicator(device, [0, 1])
    transfers = [args[0] for name, args, _ in calls if name in ("isend", "irecv", "all_reduce")]
    assert [tensor.device for tensor in transfers] == [device] * 3


@pytest.mark.parametrize(("ranks", "belongs"), [([0, 1], True), ([2, 3], False)])
def test_the_communicator_of_a_pipeline_is_for_its_ranks(calls, ranks, belongs):
    """Every process takes part in its creation, and only the pipeline's connect it."""
    group = make_common_communicator(CPU, ranks)
    assert group == (f"group {ranks}" if belongs else None)
    names = [name for name, _, _ in calls]
    assert names == ["new_group", *(["all_reduce", "wait"] if belongs else [])]


def test_the_device_is_named_where_torch_can_connect_at_once(monkeypatch):
    """An older torch has no such argument."""
    assert communicators._group_options(CPU) == {"device_id": CPU}
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, backend: None)
    assert communicators._group_options(CPU) == {}


def test_all_communicators_are_aborted_at_once_and_waited_for():
    """The abort of one may wait for the transfers of another."""
    started, released = [], SimpleNamespace(count=0)
    barrier = threading.Barrier(3)

    def abort():
        started.append(1)
        barrier.wait(30)  # passes only if all three abort at the same time
        released.count += 1

    abort_communicators([SimpleNamespace(abort=abort) for _ in range(3)])
    assert (len(started), released.count) == (3, 3)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.int16],
)
def test_a_dtype_that_nccl_does_not_know_travels_as_its_bytes(dtype):
    """A view of the same memory, into which a receive writes."""
    tensor = torch.ones(2, 3).to(dtype)
    carried = as_bytes(tensor)
    assert carried.data_ptr() == tensor.data_ptr()
    assert carried.nbytes == tensor.nbytes
    if dtype in NCCL_DTYPES:
        assert carried is tensor
    else:
        assert (carried.dtype, carried.shape) == (torch.uint8, (tensor.nbytes,))
    assert (dtype in NCCL_DTYPES) == (dtype not in (torch.complex64, torch.int16))


def test_a_single_element_of_any_stride_travels_as_its_bytes():
    """It counts as contiguous."""
    row = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    tensor = row[1:, 1]
    assert (tensor.is_contiguous(), tensor.stride()) == (True, (3,))
    carried = as_bytes(tensor)
    assert carried.tolist() == [4, 0]
    carried.fill_(1)
    assert row.tolist() == [[0, 1, 2], [3, 257, 5]]
    assert as_bytes(torch.empty(0, 3, dtype=torch.int16)).shape == (0,)


@pytest.mark.parametrize(
    ("ranks", "source"), [([3], None), ([3, 5, 8], 5), ([5, 3], 5), ([0, 3], 0)]
)
def test_a_group_of_gloo_is_closed_by_a_receive_that_times_out(monkeypatch, ranks, source):
    """From another rank than this one; a group of one has no links."""
    received = []

    def wait(limit):
        assert limit <= timedelta(milliseconds=50)
        raise RuntimeError("timed out")

    def irecv(tensor, source, *, group, tag):
        received.append((source, group, tag))
        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks)
    monkeypatch.setattr(dist, "irecv", irecv)
    close_gloo_group("group", 3)
    assert received == ([] if source is None else [(source, "group", 2**31 - 1)])


def test_a_closing_receive_that_cannot_be_posted_ends_nothing(monkeypatch):
    """The context is closed already, or this process is not in the group."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [3, 5])
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: None)
    close_gloo_group("group", 3)

    def fail(*_, **__):
        raise RuntimeError("closed")

    monkeypatch.setattr(dist, "irecv", fail)
    close_gloo_group("group", 3)


def test_transfers_without_work_are_not_waited_for(monkeypatch, calls):
    """torch returns none to a process outside of the group."""
    for name in ("isend", "irecv", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    groups = make_communicators([(Link(0, 1), False), (Link(1, 0), True)], 1, CPU, "everyone")
    assert len(groups) == 2
    assert make_common_communicator(CPU, [0, 1]) == "group [0, 1]"
    assert "wait" not in [name for name, _, _ in calls]
