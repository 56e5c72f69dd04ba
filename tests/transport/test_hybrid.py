"""Ranks of this host are reached through shared memory, all others through the network."""

from __future__ import annotations

import pytest

from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.hybrid import HybridTransport, route

MESSAGE = Message(Kind.F, 1, 2)


class Links:
    """A transport that records its calls."""

    shares = False

    def __init__(self, name, log, reachable=()):
        self.name, self.log, self.reachable = name, log, frozenset(reachable)

    def __getattr__(self, method):
        def record(*args):
            self.log.append((self.name, method, *args))
            return f"{self.name} {method}"

        return record


def make_links(reachable):
    """Return both transports, and the log of their calls."""
    log = []
    return Links("near", log, reachable), Links("far", log), log


@pytest.mark.parametrize("peer", [0, 2, 3])
def test_every_message_takes_the_transport_that_reaches_its_peer(peer):
    """With its arguments as they are, and with what the transport returns."""
    near, far, log = make_links({0, 3})
    hybrid = HybridTransport(near, far)
    name = "far" if peer == 2 else "near"
    assert hybrid.arrives_at_once(peer) == f"{name} arrives_at_once"
    assert hybrid.send(peer, MESSAGE, "payload", "form") == f"{name} send"
    assert hybrid.post(peer, MESSAGE, "form") == f"{name} post"
    assert log == [
        (name, "arrives_at_once", peer),
        (name, "send", peer, MESSAGE, "payload", "form"),
        (name, "post", peer, MESSAGE, "form"),
    ]
    assert not hybrid.shares


def test_both_transports_are_drained():
    """What is sent through shared memory has left already when it is released."""
    near, far, log = make_links({0})
    HybridTransport(near, far).release(5)
    assert ("far", "release", 5) in log
    log.clear()
    HybridTransport(near, far).drain()
    assert sorted(log) == [("far", "drain"), ("near", "drain")]


def test_one_transport_that_reaches_all_is_taken_alone():
    """A detour costs time for every message."""
    near, far, _ = make_links({0, 2})
    assert route(near, far, 2) is near
    hybrid = route(near, far, 3)
    assert isinstance(hybrid, HybridTransport)
    assert hybrid.arrives_at_once(0) == "near arrives_at_once"
    near, far, _ = make_links(())
    assert route(near, far, 3) is far
