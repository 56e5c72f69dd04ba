"""Waits for the ranks that have not come: time limits, lost ranks, and who names them."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import pytest
from tests.transport.liveness.fake_clock import Clock, store_of

from penstock.errors import RunError
from penstock.transport.liveness import heartbeats
from penstock.transport.liveness.heartbeats import (
    Heartbeats,
    _check_siblings,
    _MeetingWatch,
    _shared_secret,
    wait_for_keys,
)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the module."""
    fake = Clock()
    monkeypatch.setattr(heartbeats, "time", fake)
    return fake


def test_the_secret_is_the_users_or_that_of_rank_0(monkeypatch, clock):
    """A drawn one has 32 bytes, and is the same on all ranks."""
    monkeypatch.setenv("PENSTOCK_SECRET", "é!")
    store = store_of()
    assert bytes.fromhex(_shared_secret(store, 0, 200.0)).decode() == "é!"
    assert not store.check(["heartbeat-secret"])
    monkeypatch.delenv("PENSTOCK_SECRET")
    secret = _shared_secret(store, 0, 200.0)
    assert len(bytes.fromhex(secret)) == 32
    assert _shared_secret(store, 1, 200.0) == secret
    with pytest.raises(RunError, match="rank 0 did not join the run within 10 s"):
        _shared_secret(store_of(), 1, 110.0)

    def lose(missing):
        raise RunError(f"lost {sorted(missing)}")

    monkeypatch.setattr(heartbeats, "LostSiblings", lambda: SimpleNamespace(check=lose))
    with pytest.raises(RunError, match=r"^lost \[0\]$"):
        _shared_secret(store_of(), 1, 210.0)


def test_keys_are_awaited_until_the_deadline_and_each_is_noted_once(clock):
    """Ranks that have come are not in the message."""
    store, noted = store_of(), []
    keys = {rank: f"key/{rank}" for rank in (2, 0, 1, 3)}
    store.set("key/0", "")

    def note(rank):
        noted.append((rank, round(clock.now_s, 2)))
        if rank == 0:
            store.set("key/3", "")
            store.set("key/2", "")

    with pytest.raises(RunError, match=r"^rank 1 did not join the run within 5 s\. Look"):
        wait_for_keys(store, keys, 105.0, on_key=note)
    assert noted == [(0, 100.0), (3, 100.0), (2, 100.02)]
    assert clock.now_s - 105.0 <= 0.021
    with pytest.raises(RunError, match=r"^ranks 1, 4 did not join"):
        wait_for_keys(store, {4: "key/4", 1: "key/1"}, 0.0)
    assert keys.keys() == {0, 1, 2, 3}
    begin_s = clock.now_s
    wait_for_keys(store, {0: "key/0", 3: "key/3"}, 0.0)
    assert clock.now_s == begin_s


def test_waiting_ends_after_the_deadline_and_not_at_it(clock):
    """A rank may come at the last moment."""
    looks = []
    siblings = SimpleNamespace(check=lambda missing: looks.append(list(missing)))
    with pytest.raises(RunError, match="within 0 s"):
        wait_for_keys(store_of(), {1: "k"}, clock.now_s, siblings)
    assert looks == [[1]]


def test_a_lost_sibling_is_told_to_the_ranks_of_other_hosts(clock):
    """They cannot see its process."""
    store = store_of()
    text = "rank 3 has ended " + "x" * 600

    def lose(missing):
        raise RunError(text + repr(sorted(missing)))

    with pytest.raises(RunError, match=r"\[3, 4\]$"):
        _check_siblings(store, SimpleNamespace(check=lose), {3: "", 4: ""})
    with pytest.raises(RunError, match=r"^rank 3 has ended x*…$") as raised:
        _check_siblings(store, SimpleNamespace(check=lambda _: None), [4])
    assert len(str(raised.value)) == 500
    _check_siblings(store, None, [4])


@pytest.mark.parametrize(
    ("rank", "missing", "says"),
    [(0, [2], True), (2, [0, 1, 3], True), (2, [1, 3], False), (2, [0, 3], False), (1, [2], False)],
)
def test_the_lowest_rank_that_has_come_names_those_that_have_not(rank, missing, says):
    """One of them is enough."""
    looks, checks = [], []
    heard = SimpleNamespace(reason=lambda: None)
    watch = _MeetingWatch(heard, SimpleNamespace(look=looks.append), rank)
    watch._siblings = SimpleNamespace(check=checks.append)
    watch.check(missing)
    assert looks == [missing] * says
    assert checks == [missing]
    heard.reason = lambda: "rank 7 is missing"
    with pytest.raises(RunError, match=r"^rank 7 is missing$"):
        watch.check(missing)


def test_the_other_ranks_are_waited_for_until_the_time_limit(monkeypatch, clock):
    """Each by its own key. Messages on those that are missing have the limit as well."""
    waits, store = [], store_of()
    idle = SimpleNamespace(start=lambda: None)
    threads = SimpleNamespace(Thread=lambda **_: idle, Event=threading.Event)
    process = SimpleNamespace(stdout=io.BytesIO(b'{"port": 5000}\n'))
    monkeypatch.setattr(heartbeats, "threading", threads)
    monkeypatch.setattr(heartbeats.atexit, "register", lambda _: None)
    monkeypatch.setattr(heartbeats, "_shared_secret", lambda *given: waits.append(given) or "00")
    monkeypatch.setattr(heartbeats, "_start_process", lambda *_: process)
    monkeypatch.setattr(heartbeats, "wait_for_keys", lambda *given: waits.append(given))
    watch = Heartbeats(store, 1, 3, timeout_s=9.0)
    (secret, (waited_store, keys, deadline_s, siblings, on_key)) = waits
    assert secret == (store, 1, 109.0)
    assert (waited_store, deadline_s, on_key) == (store, 109.0, watch._add_peer)
    assert keys == {0: "heartbeat/0", 2: "heartbeat/2"}
    assert (siblings._heartbeats, siblings._rank) == (watch, 1)
    assert siblings._progress._limit_s == 9.0
