"""The transport between processes of one host, most of it with both ends in one process."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.transport.same_host_pair import backward, echo, forward, joined, passed

from penstock.errors import RunError
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport import same_host
from penstock.transport.payload import Payload

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
    assert not ends[1].shares
    assert ends[0].arrives_at_once(1)


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


@pytest.mark.parametrize("value", [3, None, "text", (), {}])
def test_values_without_a_tensor_arrive(ends, value):
    """A stage may pass on a number, or nothing."""
    assert passed(ends, value).value() == value
    assert passed(ends, value).tensors == []


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
        for stage in (0, 1, 1023, 2**20 - 1)
        for number in (0, 1, 2**10, 2**20, 2**33)
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
