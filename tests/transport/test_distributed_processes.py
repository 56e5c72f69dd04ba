"""Transport over torch.distributed, between two real processes. They are started once, and play all
scenes one after another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from tests.transport.same_host_pair import forward
from torch._C._distributed_c10d import PrefixStore

from penstock.errors import RunError
from penstock.ranks.process_world import join
from penstock.ranks.processes.launch import launch
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.distributed import DistributedTransport
from penstock.transport.messages import header_name
from penstock.transport.payload import Payload
from penstock.transport.transport import TransportLost, TransportTimeout
from penstock.transport.wire import Wire

SCENES: dict[str, Callable[[DistributedTransport, int], Any]] = {}


def scene(play):
    """Have both ranks play it; what each returns is the report, by rank."""
    SCENES[play.__name__] = play
    return play


@pytest.fixture(scope="module")
def report():
    """What every scene returned on rank 0 and on rank 1."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        first, second = launch(_play_all, 2, threads=1)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    return {name: (first[name], second[name]) for name in SCENES}


def _play_all():
    """All scenes on one rank, with one transport."""
    join()
    rank = dist.get_rank()
    store = PrefixStore("scenes", dist.distributed_c10d._get_default_store())
    shared = dist.new_group(backend="gloo")
    wire = Wire(rank, torch.device("cpu"), store, 60.0, shared, range(dist.get_world_size()))
    transport = DistributedTransport(wire)
    results = {}
    for name, play in SCENES.items():
        results[name] = play(transport, rank)
        if name != "the_run_is_stopped":
            meet(wire, name)
    return results


def meet(wire, where):
    """Go on when both ranks are here. Over the store, so that the links under test stay out of it."""
    wire.store.set(f"{where}/{wire.rank}", "here")
    wire.fetch(f"{where}/{1 - wire.rank}")


def outcome(job):
    """The kind and text of the error that a job raises, or what it returns."""
    try:
        return job()
    except (RunError, TransportLost, TransportTimeout) as error:
        return type(error).__name__, str(error)


# -- scenes, in this order
# ------------------------------------------------------------------------------------------------


def all_sorts():
    """A nested value with every kind of tensor that may cross."""
    counted = torch.arange(12)
    return {
        "dtypes": [
            counted.to(dtype)
            for dtype in (
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
            )
        ],
        "flags": counted > 5,
        "empty": (torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)),
        "no dimensions": [torch.tensor(2.5), torch.tensor(7), torch.tensor(True)],
        "transposed": counted.reshape(3, 4).t().float().requires_grad_(),
        "every second": counted[::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "channels last": torch.arange(24.0)
        .reshape(1, 2, 3, 4)
        .to(memory_format=torch.channels_last),
        "conjugated": torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj(),
        "negated": torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj().imag,
        "constants": (None, True, 3, 0.1, "text"),
    }


@scene
def values_of_all_sorts(transport, rank):
    """Rank 0 sends, rank 1 compares with its own."""
    mine = Payload.of(all_sorts())
    if rank == 0:
        transport.send(1, forward(0), mine, "sorts")
        transport.drain()
        return len(transport._in_flight)
    received = transport.post(0, forward(0), "sorts").wait()
    same = [
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(received.tensors, mine.tensors, strict=True)
    ]
    return (
        same,
        received.form() == mine.form(),
        received.value()["constants"],
        list(received.value()),
    )


@scene
def waits_in_another_order(transport, rank):
    """Three batches of three messages; the receiver posts in the order of the sends and waits from
    the last to the first.
    """
    arrivals_seen = []
    for batch in range(3):
        if rank == 0:
            if batch == 2:
                transport.wire.fetch("posted ahead")
            for m in range(3):
                transport.send(
                    1, forward(m), Payload.of(torch.full((m + 1,), 10.0 * batch + m)), f"order.{m}"
                )
            transport.drain()
        else:
            arrivals = [transport.post(0, forward(m), f"order.{m}") for m in range(3)]
            if batch == 2:
                transport.wire.store.set("posted ahead", "yes")
            known = [arrival.posted is not None for arrival in arrivals]
            values = [arrival.wait().value().tolist() for arrival in reversed(arrivals)]
            arrivals_seen.append((known, values))
    return arrivals_seen


@scene
def a_new_signature_between_known_ones(transport, rank):
    """A last, smaller batch of an epoch: its shapes are learnt while receives of known shapes are
    posted around it.
    """
    batches = [
        ("order", 0, (1,)),
        ("small", 0, (2, 2)),
        ("order", 1, (2,)),
        ("small", 1, (3, 1)),
        ("small", 0, (2, 2)),
    ]
    if rank == 0:
        for number, (signature, m, shape) in enumerate(batches):
            transport.send(
                1, forward(m), Payload.of(torch.full(shape, float(number))), f"{signature}.{m}"
            )
        transport.drain()
        return None
    arrivals = [transport.post(0, forward(m), f"{signature}.{m}") for signature, m, _ in batches]
    return [
        (list(value.shape), value.flatten()[0].item())
        for value in (arrival.wait().value() for arrival in arrivals)
    ]


@scene
def both_directions_at_once(transport, rank):
    """Four messages of 4 MiB each way, all sent before the first wait."""
    other, count = 1 - rank, 4
    sent, expected = [(Kind.F, 0), (Kind.B, count)][
        :: 1 if rank == 0 else -1
    ]  # gradients of micro-batches that came before
    for m in range(count):
        message = Message(sent[0], rank, sent[1] + m)
        transport.send(other, message, Payload.of(torch.full((2**20,), 10.0 * rank + m)), "large")
    arrivals = [
        transport.post(other, Message(expected[0], other, expected[1] + m), "large")
        for m in range(count)
    ]
    values = [arrival.wait().value() for arrival in arrivals]
    transport.drain()
    return [(value.numel(), value.unique().tolist()) for value in values]


@scene
def kinds_and_stages(transport, rank):
    """An activation and a gradient of one stage and micro-batch, and those of another stage, under
    way together.
    """
    messages = [Message(kind, stage, 5) for kind in (Kind.F, Kind.B) for stage in (1, 2)]
    if rank == 0:
        for number, message in enumerate(messages):
            transport.send(1, message, Payload.of(torch.tensor([float(number)])), "kinds")
        transport.drain()
        return None
    return [transport.post(0, message, "kinds").wait().value().item() for message in messages]


@scene
def gradients_with_gaps(transport, rank):
    """Lists with None, one of them of nothing else: then there is no tensor at all."""
    lists = [[None, torch.tensor([1.0]), None, torch.tensor([2.0, 3.0])], [None], []]
    if rank == 0:
        for m, gradients in enumerate(lists):
            transport.send(1, Message(Kind.B, 1, m), Payload.flat(gradients), f"gaps.{m}")
        transport.drain()
        return None
    received = [
        transport.post(0, Message(Kind.B, 1, m), f"gaps.{m}").wait().value() for m in range(3)
    ]
    return [
        [None if gradient is None else gradient.tolist() for gradient in gradients]
        for gradients in received
    ]


@scene
def a_form_that_changes(transport, rank):
    """Rank 0 sends other forms under a signature that it has used; nothing of these may leave."""
    changed = [
        torch.ones(3),
        torch.ones(2, dtype=torch.float64),
        (torch.ones(2),),
        torch.ones(2, requires_grad=True),
    ]
    if rank == 0:
        transport.send(1, forward(0), Payload.of(torch.ones(2)), "form")
        refusals = [
            outcome(lambda value=value: transport.send(1, forward(0), Payload.of(value), "form"))
            for value in changed
        ]
        transport.send(1, forward(0), Payload.of(torch.zeros(2)), "form")
        transport.drain()
        return refusals
    return [transport.post(0, forward(0), "form").wait().value().tolist() for _ in range(2)]


@scene
def too_many_tensors(transport, rank):
    """40 tensors in one message: refused before the other side hears of them; 32 pass."""
    if rank == 0:
        refused = outcome(
            lambda: transport.send(
                1, forward(0), Payload.of([torch.ones(1) for _ in range(40)]), "many"
            )
        )
        stored = transport.wire.store.check([header_name(("many", Link(0, 1), Kind.F, 0))])
        transport.send(
            1, forward(0), Payload.of([torch.tensor(float(i)) for i in range(32)]), "many"
        )
        transport.drain()
        return refused, stored
    return [tensor.item() for tensor in transport.post(0, forward(0), "many").wait().value()]


@scene
def a_message_that_is_never_sent(transport, rank):
    """Of unknown shape: the header does not come within the deadline."""
    if rank == 0:
        return None
    transport.wire.deadline_s, before = 0.02, transport.wire.deadline_s
    failure = outcome(transport.post(0, forward(9), "never").wait)
    transport.wire.deadline_s = before
    transport._unposted.clear()
    return failure


@scene
def the_run_is_stopped(transport, rank):
    """Rank 1 waits for a message of known shape, and rank 0 closes the links; last of all, since
    nothing goes after it.
    """
    if rank == 1:
        arrival = transport.post(0, forward(0), "order.0")
        transport.wire.store.set("waits", "yes")
        return arrival.posted is not None, outcome(arrival.wait)[0]
    transport.wire.fetch("waits")
    transport.wire.abort()
    transport.wire.abort()
    late = [
        lambda: transport.send(1, forward(0), Payload.of(torch.ones(1)), "order"),
        lambda: transport.post(1, Message(Kind.B, 1, 0), "unknown").wait(),
    ]
    return [outcome(job)[0] for job in late]


# -- claims
# ---------------------------------------------------------------------------------------------------------------


def test_values_of_all_sorts_arrive_to_the_bit(report):
    """Whatever a layer may return: flags, tokens, half precision, nothing at all, views that are
    stored otherwise than they read.
    """
    left, (same, form, constants, keys) = report["values_of_all_sorts"]
    assert left == 0
    assert [place for place, equal in enumerate(same) if not equal] == []
    assert form
    assert constants == (None, True, 3, 0.1, "text")
    assert keys == list(all_sorts())


def test_shapes_are_learnt_once_and_receives_posted_ahead_from_then_on(report):
    """Posted ahead, a receive overlaps with the op before it; that is what the header's journey
    buys.
    """
    _, batches = report["waits_in_another_order"]
    assert [posted for posted, _ in batches] == [[False] * 3, [True] * 3, [True] * 3]


def test_waits_need_not_come_in_the_order_of_the_sends(report):
    """Schedules take gradients and activations by turns; each wait must get its own message."""
    _, batches = report["waits_in_another_order"]
    for batch, (_, values) in enumerate(batches):
        assert values == [[10.0 * batch + m] * (m + 1) for m in (2, 1, 0)]


def test_batches_of_another_shape_may_follow_others(report):
    """On backends that match in order, a receive posted too early would take another message's
    bytes.
    """
    _, received = report["a_new_signature_between_known_ones"]
    assert received == [([1], 0.0), ([2, 2], 1.0), ([2], 2.0), ([3, 1], 3.0), ([2, 2], 4.0)]


def test_large_tensors_in_both_directions_at_once_do_not_wait_for_each_other(report):
    """A send that waited for its receive would stop two ranks that send to each other, as 1F1B does
    all the time.
    """
    first, second = report["both_directions_at_once"]
    assert first == [(2**20, [10.0 + m]) for m in range(4)]
    assert second == [(2**20, [float(m)]) for m in range(4)]


def test_messages_of_other_kinds_and_stages_do_not_mix(report):
    """Ranks with several stages have several messages of one micro-batch under way."""
    _, numbers = report["kinds_and_stages"]
    assert numbers == [0.0, 1.0, 2.0, 3.0]


def test_gradients_keep_their_gaps(report):
    """None travels in the header alone."""
    _, lists = report["gradients_with_gaps"]
    assert lists == [[None, [1.0], None, [2.0, 3.0]], [None], []]


def test_a_form_that_changes_under_its_signature_is_refused_at_the_sender(report):
    """The receiver has posted buffers of the old shape; bytes would land anywhere."""
    refusals, arrived = report["a_form_that_changes"]
    for kind, text in refusals:
        assert kind == "RunError"
        assert text.startswith(
            "the output of 0F0 changed its form between batches whose inputs have the same shapes: it was a tensor of float32[2] and is "
        )
        assert (
            "Shapes and constants that depend on the data are not supported between hosts" in text
        )
    assert "is a tensor of float32[3]." in refusals[0][1]
    assert len(refusals) == 4
    assert arrived == [[1.0, 1.0], [0.0, 0.0]]


def test_more_tensors_than_a_tag_has_room_for_are_refused_before_anything_is_sent(report):
    """A header of 40 tensors would have the receiver post receives whose tags are other messages'."""
    (refused, stored), arrived = report["too_many_tensors"]
    kind, text = refused
    assert kind == "RunError"
    assert text.startswith(
        "stage 0 sends 40 tensors for micro-batch 0: at most 32 tensors and 1,024 stages"
    )
    assert not stored
    assert arrived == [float(i) for i in range(32)]


def test_a_message_that_is_never_sent_ends_at_the_deadline(report):
    """And the error is that of lateness, so that the report names who waits for whom."""
    _, (kind, text) = report["a_message_that_is_never_sent"]
    assert kind == "TransportTimeout"
    assert text == "penstock/header/never/0-1/0F is not in the store"


def test_stopping_the_run_lets_go_whoever_waits_and_refuses_what_comes_later(report):
    """Within seconds, not at the deadline; a second stop does nothing."""
    late, (posted, kind) = report["the_run_is_stopped"]
    assert posted
    assert kind == "TransportLost"
    assert late == ["TransportLost", "TransportLost"]
