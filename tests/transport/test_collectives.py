"""Plain values between ranks."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from penstock.cluster.device import Device
from penstock.errors import RunError
from penstock.ranks.processes.launch import launch
from penstock.transport import collectives, process_group
from penstock.transport.collectives import all_gather, barrier, begin_barrier, broadcast
from penstock.transport.process_group import join

KIND = dict[int, tuple[str, list[float], Device]]


def facts(rank):
    """Of one rank: of other lengths in JSON than the others', with seconds that are not exact in
    decimal.
    """
    seconds = [math.pi / (number + 3) for number in range(rank)]
    return {
        rank: ("é" * rank, seconds, Device(f"number {rank}", 1024, flops=(("float32", math.e),)))
    }


def exchange():
    """What each exchange gives on one rank."""
    join()
    rank = dist.get_rank()
    refused = ""
    try:
        all_gather("text" if rank else 1, int)
    except ValidationError as error:
        refused = str(error)
    return (
        all_gather(facts(rank), KIND),
        broadcast(facts(rank), KIND, 2),
        broadcast([float(rank)], list[float], 0),
        refused,
    )


@pytest.fixture(scope="module")
def ranks():
    """What `exchange` returned on three ranks."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        return launch(exchange, 3, threads=1)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_every_rank_has_the_values_of_all_exactly(ranks):
    """Floats come back to the bit, and integers that are keys as integers."""
    for gathered, sent, numbers, _ in ranks:
        assert [repr(value) for value in gathered] == [repr(facts(rank)) for rank in range(3)]
        assert repr(sent) == repr(facts(2))
        assert numbers == [0.0]


def test_a_value_of_another_type_is_refused_everywhere(ranks):
    """Nothing is taken for what it is not."""
    for *_, refused in ranks:
        assert "valid integer" in refused


@pytest.fixture
def group(monkeypatch):
    """A group of two ranks, of which the other sends a given text."""
    fake = SimpleNamespace(text=b"", calls=[], rank=1, backend="cpu:gloo,cuda:nccl")

    def gather(rows, row, group):
        fake.calls.append(("gather", group))
        rows[1].copy_(row)
        if row.dtype == torch.int64:
            rows[0].fill_(len(fake.text))
        else:
            filled = fake.text.ljust(len(row), b"\0")
            rows[0].copy_(torch.frombuffer(bytearray(filled), dtype=torch.uint8))

    def send(tensor, source):
        fake.calls.append(("broadcast", source, len(tensor)))
        if source != fake.rank:
            if tensor.dtype == torch.int64:
                tensor.fill_(len(fake.text))
            else:
                tensor.copy_(torch.frombuffer(bytearray(fake.text), dtype=torch.uint8))

    def reduce(tensor, group, async_op=False):
        fake.calls.append(("reduce", tensor.tolist(), tensor.device.type, group, async_op))
        return "work" if async_op else None

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: fake.rank)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: fake.backend)
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "broadcast", send)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    return fake


@pytest.mark.parametrize("text", [b'"a"', b'"' + b"x" * 50 + b'"'])
def test_texts_of_any_lengths_are_gathered_over_the_group(group, text):
    """torch gathers tensors of one size; the padding is no part of a value."""
    group.text = text
    expected = [text.decode()[1:-1], "middle of the two"]
    assert all_gather("middle of the two", str, "group") == expected
    assert group.calls == [("gather", "group")] * 2


def test_only_the_source_sends_its_value_and_others_need_not_know_its_length(group):
    """Ranks that have no value may pass any."""
    group.text = b"[1,2,3]"
    assert broadcast([], list[int], 0) == [1, 2, 3]
    assert broadcast([4], list[int], 1) == [4]
    assert group.calls == [
        ("broadcast", 0, 1),
        ("broadcast", 0, 7),
        ("broadcast", 1, 1),
        ("broadcast", 1, 3),
    ]


def test_the_device_of_a_message_is_that_of_the_backend_of_its_group(group, monkeypatch):
    """A group of NCCL serves no CPU tensors, whatever the default group serves."""
    devices = {None: "cuda:nccl", "gloo": "cpu:gloo", "both": "cpu:gloo,cuda:nccl"}
    monkeypatch.setattr(dist, "get_backend_config", devices.get)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(device) or tensor)
    group.text = b"1"
    for name in ("gloo", "both", None):
        all_gather(1, int, name)
        barrier(name)
    assert list(map(str, moved)) == ["cpu"] * 4 + ["cuda:3"] * 2
    assert {call[-2] for call in group.calls if call[0] == "reduce"} == {"gloo", "both", None}


def test_a_barrier_is_a_sum_on_the_cpu_that_may_be_awaited_later(group):
    """torch's own may go over NCCL, which refuses ranks that share a card."""
    assert barrier("group") is None
    assert begin_barrier("group") == "work"
    assert begin_barrier() == "work"
    assert group.calls == [
        ("reduce", [1], "cpu", "group", False),
        ("reduce", [1], "cpu", "group", True),
        ("reduce", [1], "cpu", None, True),
    ]


@pytest.mark.parametrize(
    "call", [lambda: all_gather(1, int), lambda: broadcast(1, int, 0), barrier]
)
def test_a_lost_connection_is_an_error_of_the_run(group, monkeypatch, call):
    """torch's own has no rank in it."""

    def fail(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(process_group, "lost_ranks", lambda _: None)
    for name in ("all_gather", "broadcast", "all_reduce"):
        monkeypatch.setattr(dist, name, fail)
    message = "could not exchange values with the other ranks: Connection closed"
    with pytest.raises(RunError, match=message):
        call()


def test_the_host_reads_the_sum_of_a_barrier(group, monkeypatch):
    """Over NCCL only the stream waits for the sum, and the host would go on."""
    log = []
    count = SimpleNamespace(item=lambda: log.append("read"))
    monkeypatch.setattr(collectives, "_to_tensor", lambda content, group: count)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: log.append("sum"))
    barrier("group")
    assert log == ["sum", "read"]
