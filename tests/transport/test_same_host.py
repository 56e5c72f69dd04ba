"""The transport between processes of one host, most of it with both ends in one process."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import logging
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.transport.same_host_pair import backward, echo, forward, joined
from torch.distributed import HashStore

from penstock.errors import RunError
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.shared_memory.segment import Segment
from penstock.transport import same_host
from penstock.transport.payload import Payload
from penstock.transport.same_host import SameHostTransport
from penstock.transport.transport import TransportLost, TransportTimeout

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@pytest.fixture
def ends():
    """Two ends of one link, both here; closed when the test is over."""
    both = joined()
    yield both
    for end in both:
        end.abort()
        end.close()


@pytest.fixture(scope="module")
def other_process(tmp_path_factory):
    """This end of a link to another process, which sends everything back, and how many messages
    that was.
    """
    with echo(tmp_path_factory.mktemp("echo")) as (end, _):
        yield end, [0]


def equal(received: Payload, sent: Payload) -> bool:
    """Whether two payloads are equal."""
    pairs = list(zip(received.tensors, sent.tensors, strict=True))
    constants = [
        [repr(leaf) for leaf in one.leaves if not isinstance(leaf, torch.Tensor)]
        for one in (received, sent)
    ]
    return (
        received.structure == sent.structure
        and received.wants_grad == sent.wants_grad
        and [(one.shape, one.dtype) for one, _ in pairs]
        == [(one.shape, one.dtype) for _, one in pairs]
        and constants[0] == constants[1]
        and all(torch.equal(a, b) for a, b in pairs)
    )


def passed(ends, value, message=None):
    """What arrives of a value."""
    message = message or forward(0)
    ends[0].send(1, message, Payload.of(value), "")
    return ends[1].post(0, message, "").wait()


@st.composite
def tensors(draw):
    """A tensor of any dtype and shape, often a view that is not contiguous."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = (
        torch.arange(max(1, torch.Size(shape).numel()))
        .remainder(100)[: torch.Size(shape).numel()]
        .reshape(shape)
    )
    tensor = tensor.to(draw(st.sampled_from(DTYPES)))
    how = draw(st.sampled_from(["as it is", "turned", "every second", "expanded", "channels last"]))
    if how == "turned":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    elif how == "every second" and tensor.dim():
        tensor = tensor[..., ::2]
    elif how == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    elif how == "channels last" and tensor.dim() == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    return tensor.requires_grad_() if tensor.is_floating_point() and draw(st.booleans()) else tensor


CONSTANTS = st.sampled_from([None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, 2.5, "", "text", 2**40])
VALUES = st.one_of(
    tensors(),
    st.lists(st.one_of(tensors(), CONSTANTS), max_size=4),
    st.dictionaries(
        st.sampled_from("abcd"),
        st.one_of(tensors(), CONSTANTS, st.tuples(tensors(), CONSTANTS)),
        max_size=3,
    ),
)


def test_values_of_all_sorts_arrive_as_they_were(ends):
    """Every dtype, empty tensors, none of any dimensions, views of all kinds, and what is no
    tensor.
    """
    counted = torch.arange(12)
    value = {
        "dtypes": [counted.to(dtype) for dtype in DTYPES],
        "empty": (torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)),
        "no dimensions": [torch.tensor(2.5), torch.tensor(7), torch.tensor(True)],
        "transposed": counted.reshape(3, 4).t().float().requires_grad_(),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugated": torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj(),
        "negated": torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj().imag,
        "constants": (None, True, 3, 0.1, "text"),
    }
    received = passed(ends, value)
    assert equal(received, Payload.of(value))
    assert list(received.value()) == list(value)


def test_what_arrives_is_the_receivers_own(ends):
    """A stage may write into what it gets, and the sender into what it has sent."""
    mine = torch.zeros(4)
    ends[0].send(1, forward(0), Payload.of(mine), "")
    mine += 1
    first = ends[1].post(0, forward(0), "").wait().value()
    first += 7
    second = passed(ends, mine).value()
    assert first.tolist() == [7.0] * 4
    assert second.tolist() == [1.0] * 4
    assert not first.requires_grad
    assert first.is_leaf


def test_channels_last_stays_so(ends):
    """Convolutions are quicker on it: one that became contiguous on the way would be turned at
    every boundary.
    """
    image = torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last)
    volume = torch.arange(96.0).reshape(2, 2, 2, 3, 4).to(memory_format=torch.channels_last_3d)
    received = passed(ends, (image, volume, image.contiguous())).value()
    assert received[0].stride() == image.stride()
    assert received[1].stride() == volume.stride()
    assert received[2].is_contiguous()
    assert torch.equal(received[0], image)
    assert torch.equal(received[1], volume)


def test_the_first_payload_may_arrive_in_inference_mode(ends):
    """Evaluation may come before training: what is kept from it must be of use to training."""
    with torch.inference_mode():
        assert passed(ends, torch.ones(3)).value().is_inference()
    received = passed(ends, torch.full((3,), 2.0)).value()
    assert not received.is_inference()
    assert received.tolist() == [2.0] * 3


def test_constants_that_are_equal_but_not_the_same_are_told_apart(ends):
    """For a dictionary True is 1 and -0.0 is 0.0; a layer may not think so."""
    for value in ([True], [1], [1.0], [0.0], [-0.0], [False]):
        assert repr(passed(ends, value).value()) == repr(value)


def test_the_same_message_twice_arrives_twice_in_order(ends):
    """Of two copies of a stage one may be an update ahead, and sends the same message again."""
    for number in range(3):
        ends[0].send(1, forward(0), Payload.of(torch.tensor(number)), "")
    received = [ends[1].post(0, forward(0), "").wait().value().item() for _ in range(3)]
    assert received == [0, 1, 2]


def test_messages_are_told_apart_by_kind_stage_and_micro_batch(ends):
    """Everything under way between two ranks is on one link; micro-batches of a stream count on for
    ever.
    """
    messages = [
        Message(kind, stage, number)
        for kind in Kind
        for stage in (0, 1, 1023)
        for number in (0, 1, 2**33)
    ]
    for number, message in enumerate(messages):
        ends[0].send(1, message, Payload.of(torch.tensor(number)), "")
    received = [
        ends[1].post(0, message, "").wait().value().item() for message in reversed(messages)
    ]
    assert received == list(reversed(range(len(messages))))


def test_more_messages_than_a_block_holds_wait_for_their_receiver(ends):
    """Sending never waits, whatever the receiver does; memory is found again afterwards."""
    for round_ in range(4):
        for number in range(600):
            ends[0].send(1, forward(number), Payload.of(torch.tensor([float(number), round_])), "")
        if round_ == 0:
            grown = ends[0]._peers[1].outgoing.arena.nbytes
        received = [
            ends[1].post(0, forward(number), "").wait().value().tolist() for number in range(600)
        ]
        assert received == [[float(number), round_] for number in range(600)]
    assert ends[0]._peers[1].outgoing.arena.nbytes <= 1.3 * grown


def test_more_forms_than_are_kept_are_all_understood(ends):
    """Shapes that depend on the data may never come again: both sides forget the old, and may learn
    them anew.
    """
    for number in [*range(1100), 3, 1099, 5]:
        assert passed(ends, [torch.tensor([1.0]), number]).value()[1] == number
    assert len(ends[0]._peers[1].outgoing._layouts) < 200
    assert len(ends[1]._peers[0].incoming._layouts) < 200


def test_old_forms_that_are_forgotten_are_still_understood_in_messages_under_way(ends):
    """The receiver may take them long after the sender has gone on to other forms."""
    for number in range(1100):
        ends[0].send(1, forward(number), Payload.of([torch.tensor([1.0]), number]), "")
    assert [
        ends[1].post(0, forward(number), "").wait().value()[1] for number in range(1100)
    ] == list(range(1100))


def test_both_directions_at_once(ends):
    """Four large messages each way, all sent before the first wait."""
    for rank, kind in enumerate((Kind.F, Kind.B)):
        for number in range(4):
            value = torch.full((2**18,), 10.0 * rank + number)
            ends[rank].send(1 - rank, Message(kind, rank, number), Payload.of(value), "")
    for rank, kind in enumerate((Kind.B, Kind.F)):
        for number in range(4):
            value = ends[rank].post(1 - rank, Message(kind, 1 - rank, number), "").wait().value()
            assert value.unique().tolist() == [10.0 * (1 - rank) + number]
    for end in ends:
        end.drain()


def test_a_payload_that_cannot_be_copied_leaves_nothing_behind(ends):
    """Its slot is free again, and what comes next arrives."""
    for _ in range(100):
        with pytest.raises(NotImplementedError, match="meta"):
            ends[0].send(1, forward(0), Payload.of(torch.ones(1000, device="meta")), "")
    assert ends[0]._peers[1].outgoing.arena.nbytes < 100_000
    assert passed(ends, torch.ones(2)).value().tolist() == [1.0, 1.0]


def test_want_of_memory_is_an_error_that_says_so(ends, monkeypatch):
    """A signal would end the process without a word."""

    def none(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", none)
    with pytest.raises(
        RunError, match=r"no shared memory for messages.*cannot allocate .*Cannot allocate"
    ):
        ends[0].send(1, forward(0), Payload.of(torch.ones(2)), "")
    monkeypatch.undo()
    assert passed(ends, torch.ones(2)).value().tolist() == [1.0, 1.0]


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), VALUES)), max_size=40))
def test_any_sequence_of_sends_and_waits_is_a_queue_per_name(ends, script):
    """Against a dictionary of lists: (name, value) sends, (name, None) takes, and what is left is
    taken at the end.
    """
    model: dict[int, list[Payload]] = {}

    def take(name):
        if model.get(name):
            assert equal(ends[1].post(0, forward(name), "").wait(), model[name].pop(0))

    for name, value in script:
        if value is None:
            take(name)
        else:
            payload = Payload.of(value)
            ends[0].send(1, forward(name), payload, "")
            model.setdefault(name, []).append(payload)
    for name in reversed(list(model)):
        while model[name]:
            take(name)
    assert ends[1]._peers[0].incoming.pending == {}


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example([1, 100_000, 1, 100_000])
@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=30))
def test_memory_is_what_was_in_flight(ends, lengths):
    """With one message in flight at a time, every length used again and again takes no more than it
    did once.
    """
    arena = ends[0]._peers[1].outgoing.arena
    for length in [1] * 600 + lengths:  # some of the first need blocks of entries as well
        passed(ends, torch.ones(length, dtype=torch.uint8))
    grown = arena.nbytes
    for length in lengths * 3:
        passed(ends, torch.ones(length, dtype=torch.uint8))
    assert arena.nbytes == grown


def test_who_waits_is_woken_and_does_not_only_look_now_and_then(ends, monkeypatch):
    """Without notifications this would take an hour."""
    monkeypatch.setattr(same_host, "_CHECK_EVERY_S", 3600.0)
    for end in ends:
        end.spin_s = 0.0

    def send_back():
        for number in range(2000):
            ends[1].send(0, backward(number), ends[1].post(0, forward(number), "").wait(), "")

    thread = threading.Thread(target=send_back)
    thread.start()
    for number in range(2000):
        ends[0].send(1, forward(number), Payload.of(torch.tensor(number)), "")
        assert ends[0].post(1, backward(number), "").wait().value() == number
    thread.join()


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_wait_ends_when_any_rank_stops_the_run(monkeypatch, stopped):
    """The receiver, from another thread; the sender; or a third rank that the sender waits for."""
    monkeypatch.setattr(same_host, "_CHECK_EVERY_S", 3600.0)
    ends = joined(3)
    errors = []

    def wait():
        try:
            ends[0].post(1, forward(0), "").wait()
        except TransportLost as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not ends[0]._mailbox._words[16]:  # its notifier for rank 1
        os.sched_yield()
    ends[stopped].abort()
    thread.join()
    assert errors == ["the run was stopped"]


def test_a_run_that_was_stopped_stays_so(ends):
    """Its programs have been left in the middle: nothing that is under way can be told from what
    would come.
    """
    ends[0].send(1, forward(0), Payload.of(torch.ones(1)), "")
    ends[0].abort()
    for _ in range(2):
        with pytest.raises(TransportLost, match="the run was stopped"):
            ends[0].send(1, forward(1), Payload.of(torch.ones(1)), "")
        with pytest.raises(TransportLost, match="the run was stopped"):
            ends[1].post(0, forward(1), "").wait()
    with pytest.raises(TransportLost, match="the run was stopped"):
        ends[1].post(0, forward(0), "").wait()
    with pytest.raises(TransportLost, match="the run was stopped"):
        ends[1].send(0, backward(0), Payload.of(torch.ones(1)), "")


@pytest.mark.parametrize("deadline_s", [0.0, 0.001, 0.12])
def test_what_does_not_come_in_time_is_said(deadline_s):
    """The message says who was waited for and for how long; another message that came meanwhile is
    kept.
    """
    ends = joined(deadline_s=deadline_s)
    ends[0].send(1, forward(1), Payload.of(torch.ones(1)), "")
    with pytest.raises(
        TransportTimeout, match=rf"rank 0 \(process {os.getpid()}\) for {deadline_s:g} s"
    ):
        ends[1].post(0, forward(0), "").wait()
    assert ends[1].post(0, forward(1), "").wait().value().item() == 1


def test_who_closes_waits_until_what_he_has_sent_can_outlive_him(ends, monkeypatch):
    """A rank may end right after its last message, which lies in memory that its receiver has not
    opened yet.
    """
    monkeypatch.setattr(same_host, "_LINGER_S", 3600.0)
    ends[0].send(1, forward(0), Payload.of(torch.full((2,), 5.0)), "")
    thread = threading.Thread(target=ends[0].close)
    thread.start()
    assert ends[1].post(0, forward(0), "").wait().value().tolist() == [5.0, 5.0]
    thread.join()


def test_what_was_opened_outlives_its_sender(ends):
    """Then `close` does not wait."""
    passed(ends, torch.ones(2))
    ends[0].send(1, forward(0), Payload.of(torch.full((2,), 5.0)), "")
    ends[0].drain()
    ends[0].close()
    assert ends[1].post(0, forward(0), "").wait().value().tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    "why", ["it has left", "it closes too", "the run was stopped", "it was stopped there"]
)
def test_who_closes_does_not_wait_for_a_peer_that_will_never_look(ends, monkeypatch, why):
    """It would be for an hour."""
    monkeypatch.setattr(same_host, "_LINGER_S", 3600.0)
    ends[0].send(1, forward(0), Payload.of(torch.ones(2)), "")
    thread = threading.Thread(target=ends[1].close)
    if why == "it has left":
        ends[1].close()
    elif why == "it closes too":
        ends[1].send(0, backward(0), Payload.of(torch.ones(2)), "")
        thread.start()
    else:
        ends[0 if why == "the run was stopped" else 1].abort()
    ends[0].close()
    if why == "it closes too":
        thread.join()


def test_what_was_not_opened_in_time_is_lost_with_its_sender(ends, monkeypatch):
    """Said as such, and not as an error of the file system."""
    monkeypatch.setattr(same_host, "_LINGER_S", 0.01)
    ends[0].send(1, forward(0), Payload.of(torch.ones(2)), "")
    ends[0].close()
    with pytest.raises(TransportLost, match=r"cannot open the memory of rank 0"):
        ends[1].post(0, forward(0), "").wait()


def test_an_unwilling_rank_is_not_reachable():
    """Both sides must come to the same answer, or one would send where the other does not look."""
    ends = joined(3, unwilling=(1,))
    assert [end.reachable for end in ends] == [{2}, set(), {0}]


def test_a_rank_whose_memory_cannot_be_opened_is_not_reachable(monkeypatch):
    """As between two users, or where /proc is not there. Here rank 1 can open no other's memory,
    while the others can open its own.
    """
    real = SameHostTransport._open_peer
    monkeypatch.setattr(
        SameHostTransport,
        "_open_peer",
        lambda end, *entry: None if end.rank == 1 else real(end, *entry),
    )
    assert [end.reachable for end in joined(3)] == [{2}, set(), {0}]


@pytest.mark.parametrize("differs", ["host", "nonce", "pid", "mailbox"])
def test_a_process_that_only_looks_like_a_peer_is_not_taken_for_it(monkeypatch, differs):
    """Numbers of processes mean something else in another container, and another machine has its
    own.
    """
    real = same_host._gather
    wrong = {"host": "another", "nonce": "0" * 32, "pid": 2**22 + 1, "mailbox": 0}

    def gather(store, name, size):
        entries = real(store, name, size)
        if not name.endswith("address"):
            return entries
        return [{**entry, differs: wrong[differs]} for entry in entries]

    monkeypatch.setattr(same_host, "_gather", gather)
    assert [end.reachable for end in joined()] == [set(), set()]


@pytest.mark.parametrize("lack", ["platform", "boot id", "memory"])
def test_a_rank_without_shared_memory_is_not_reachable_and_one_line_says_why(
    monkeypatch, caplog, lack
):
    """The network back end is slower: a user who wonders finds the reason in the log, once."""

    def refused(*_):
        raise OSError(1, "Operation not permitted")

    if lack == "platform":
        monkeypatch.setattr(same_host, "unavailable_reason", lambda: "the reason")
    elif lack == "boot id":
        monkeypatch.setattr(same_host, "host_identity", str)
    else:
        monkeypatch.setattr(Segment, "make", refused)
    reason = {"platform": "the reason", "boot id": "boot_id", "memory": "not permitted"}[lack]
    with caplog.at_level(logging.INFO, "penstock"):
        assert [end.reachable for end in joined()] == [set(), set()]
    (line,) = caplog.messages
    assert line.startswith("messages of rank 0, 1 go over the network back end")
    assert reason in line


def test_ranks_that_use_shared_memory_log_nothing_about_it(caplog):
    """Nor does a rank that chose another transport itself."""
    with caplog.at_level(logging.INFO, "penstock"):
        joined(3, unwilling=(1,))
    assert caplog.messages == []


def test_a_closed_end_leaves_no_file_open():
    """Worlds are made and closed in one process, test after test."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        ends = joined()
        passed(ends, torch.ones(2**16))
        for end in ends:
            end.close()
        del ends, end
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(VALUES, min_size=1, max_size=8))
def test_another_process_gets_and_gives_the_same(other_process, values):
    """Several messages there, then all of them back, from the last to the first."""
    end, counted = other_process
    first = counted[0]
    counted[0] += len(values)
    for number, value in enumerate(values, first):
        end.send(1, forward(number), Payload.of(value), "")
    for number, value in reversed(list(enumerate(values, first))):
        assert equal(end.post(1, backward(number), "").wait(), Payload.of(value))


def test_another_process_misses_no_notification(other_process, monkeypatch):
    """Thousands of times both go to sleep just as the other is about to wake them; neither wakes by
    itself.
    """
    monkeypatch.setattr(same_host, "_CHECK_EVERY_S", 3600.0)
    end, counted = other_process
    monkeypatch.setattr(end, "spin_s", 0.0)
    payload = Payload.of(torch.ones(4))
    for number in range(counted[0], counted[0] + 4000):
        end.send(1, forward(number), payload, "")
        end.post(1, backward(number), "").wait()
    counted[0] += 4000


def test_a_process_that_is_killed_is_missed_before_the_deadline(tmp_path, monkeypatch):
    """What it had sent before still arrives; a further wait fails with its name."""
    with echo(tmp_path) as (end, process):
        for number in range(3):
            end.send(1, forward(number), Payload.of(torch.tensor(number)), "")
        assert end.post(1, backward(2), "").wait().value() == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert [end.post(1, backward(number), "").wait().value().item() for number in (1, 0)] == [
            1,
            0,
        ]
        with pytest.raises(TransportLost, match=rf"rank 1 \(process {process.pid}\) has ended"):
            end.post(1, backward(3), "").wait()
        monkeypatch.setattr(same_host, "_LINGER_S", 3600.0)
        end.send(1, forward(3), Payload.of(torch.ones(2**20)), "")
        end.close()  # which does not wait for it either


def test_messages_that_look_like_entries_are_not_taken_for_them(ends):
    """Memory of a message must never become a block of entries: its numbers could be those that the
    receiver waits for.
    """
    queue = ends[0]._peers[1].outgoing
    passed(
        ends, torch.zeros(8 * 128, dtype=torch.int64)
    )  # as large as a block, in entries of four numbers
    passed(ends, torch.tensor(0))
    looks = torch.zeros(256, 4, dtype=torch.int64)
    left = (queue._end - queue._offset) // 32
    looks[:, 0] = (
        torch.arange(256) + queue._sequence + left + 2
    )  # after what is left here comes the entry that leads there
    passed(ends, looks.reshape(-1))
    for number in range(left):
        assert passed(ends, torch.tensor(number), forward(number)).value() == number
    assert ends[1]._peers[0].incoming.pending == {}


def test_tensors_arrive_on_the_receivers_device():
    """Ranks on GPUs without links of their own pass through host memory. Here the device without
    any memory stands for one.
    """
    ends = joined(device=torch.device("meta"))
    assert passed(ends, [torch.ones(3), None]).tensors[0].is_meta
    for end in ends:
        end.close()


def test_what_a_peer_has_sent_just_before_its_end_counts(ends):
    """It may come between the last look for it and the look at whether its sender still lives."""
    sent = []

    class Ended:
        @staticmethod
        def poll(_):
            if not sent:
                sent.append(1)
                ends[0].send(1, forward(0), Payload.of(torch.ones(1)), "")
            return [(0, 1)]

    ends[1]._peers[0] = dataclasses.replace(ends[1]._peers[0], exit_poll=Ended())
    assert ends[1].post(0, forward(0), "").wait().value().item() == 1
    with pytest.raises(TransportLost, match=r"rank 0 .* has ended"):
        ends[1].post(0, forward(1), "").wait()


@pytest.mark.parametrize(
    ("opened", "connected"),
    [
        ([{1, 2}, {0, 2}, {0, 1}], True),
        ([{1, 2}, {0, 2}, {0}], False),
        ([{1, 2}, {2}, {0, 1}], False),
        ([{2}, {0, 2}, {0, 1}], False),
        ([{1, 2}, {0, 2}, set()], False),
    ],
)
def test_ranks_are_connected_if_each_can_open_the_memory_of_all_others(opened, connected):
    """A sum in shared memory is read in both directions; ranks that take no part do not count."""
    transport = SameHostTransport(0, 1.0)
    transport._opened = [frozenset(ranks) for ranks in opened]
    assert transport.connects([0, 1, 2]) is connected
    assert transport.connects([0])
    assert transport.connects([0, 1]) is (1 in opened[0] and 0 in opened[1])


def test_a_peer_is_waited_for_only_while_it_may_still_open_what_was_sent():
    """One reason against it is enough; what peers have sent is opened meanwhile, also of ended ones."""
    for opened, closed, ended, stopped in itertools.product([False, True], repeat=4):
        polls = []

        def poll(polls=polls):
            polls.append(1)
            raise OSError

        end = SameHostTransport(0, 60.0)
        end._mailbox = SimpleNamespace(stopped=stopped)
        peer = SimpleNamespace(
            incoming=SimpleNamespace(poll=poll),
            outgoing=SimpleNamespace(all_opened=lambda opened=opened: opened),
            mailbox=SimpleNamespace(closed=closed),
            exit_poll=SimpleNamespace(poll=lambda _, ended=ended: ["end"] * ended),
        )
        end._peers = {1: peer, 2: peer}
        assert end._must_linger(peer) is not (opened or closed or ended or stopped)
        assert len(polls) == 2


@pytest.mark.parametrize("arrives_at", [None, 0, 1, 3])
def test_a_sleep_is_armed_before_the_last_look_and_disarmed_after_it(monkeypatch, arrives_at):
    """However the wait ends; no sleep is longer than the rest of the deadline."""
    now_s, log = [100.0], []
    monkeypatch.setattr(
        same_host,
        "time",
        SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0]),
    )

    def sleep(seconds):
        log.append(round(seconds, 6))
        now_s[0] += seconds

    queue = SimpleNamespace(pending={}, polls=0)
    queue.notifier = SimpleNamespace(
        arm=lambda: log.append("arm"), disarm=lambda: log.append("disarm"), sleep=sleep
    )

    def poll():
        log.append("poll")
        if queue.polls == arrives_at:
            queue.pending[7] = "message"
        queue.polls += 1
        return True

    queue.poll = poll
    end = SameHostTransport(0, 0.12)
    end.spin_s = 0.0
    end._mailbox = SimpleNamespace(stopped=False)
    end._peers = {1: SimpleNamespace(exit_poll=SimpleNamespace(poll=lambda _: []), pid=9)}
    sleeps = [0.05, 0.05, 0.02]
    if arrives_at is None:
        with pytest.raises(
            TransportTimeout, match=r"no message from rank 1 \(process 9\) for 0.12"
        ):
            end._wait_for(queue, 1, 7)
        expected = [["arm", "poll", seconds, "disarm"] for seconds in sleeps]
        assert log == [*itertools.chain(*expected), "arm", "poll", "disarm"]
    else:
        end._wait_for(queue, 1, 7)
        expected = [["arm", "poll", seconds, "disarm"] for seconds in sleeps[:arrives_at]]
        assert log == [*itertools.chain(*expected), "arm", "poll", "disarm"]


def test_a_peer_that_could_not_open_this_rank_is_given_up_with_its_descriptor(monkeypatch):
    """A link needs both ends. By rank it is known who has opened whom."""
    store, closed = HashStore(), []
    end = SameHostTransport(1, 60.0)
    mailbox = SimpleNamespace(segment=SimpleNamespace(fd=3), nonce="n")
    monkeypatch.setattr(same_host, "_make_mailbox", lambda size: mailbox)
    monkeypatch.setattr(same_host.os, "close", closed.append)
    peers = {rank: SimpleNamespace(pidfd=50 + rank) for rank in (0, 2, 3)}
    monkeypatch.setattr(end, "_open_peers", lambda addresses, own: dict(peers))
    opened = {0: [1, 2], 2: [0], 3: [1]}
    for rank, ranks in opened.items():
        store.set(f"same-host/address/{rank}", json.dumps({}))
        store.set(f"same-host/opened/{rank}", json.dumps(ranks))
    end.connect(store, 4)
    assert end.reachable == {0, 3}
    assert closed == [52]
    assert json.loads(store.get("same-host/opened/1")) == [0, 2, 3]
    assert end._opened == [{1, 2}, {0, 2, 3}, {0}, {1}]
