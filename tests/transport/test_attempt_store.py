"""Attempts under torchrun: restarted ranks read nothing of the attempt before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from penstock.errors import RunError
from penstock.transport import attempt_store
from penstock.transport.attempt_store import separate_attempts


def attempt(store, ranks):
    """Let all ranks of an attempt find each other; return what each reads of another's key."""

    def rank(number):
        attempt_store_of_rank = separate_attempts(store, number, ranks, timeout_s=30.0)
        assert attempt_store_of_rank.num_keys() >= 0
        has_address = attempt_store_of_rank.check(["address"])
        if number == 0:
            attempt_store_of_rank.set("address", "here")
        return has_address

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


def test_every_attempt_has_keys_of_its_own_though_greetings_of_earlier_ones_are_there():
    """Also if ranks are fewer or more than before, and if some of an attempt never came."""
    store = HashStore()
    store.set("greeting/1", "of a rank that has ended")
    for ranks in (3, 2, 4, 1, 3):
        has_address = attempt(store, ranks)
        assert has_address[0] is False, "an address of an earlier attempt"


def test_a_rank_that_does_not_come_is_named():
    """torchrun has started all of them, so it is not slow."""
    with pytest.raises(RunError, match=r"rank \[1\] did not join"):
        separate_attempts(HashStore(), 0, 2, timeout_s=0.0)
    with pytest.raises(RunError, match=r"ranks \[1, 2\] did not join"):
        separate_attempts(HashStore(), 0, 3, timeout_s=0.0)
    with pytest.raises(RunError, match="rank 0 did not join"):
        separate_attempts(HashStore(), 1, 2, timeout_s=0.0)


@pytest.mark.parametrize(
    ("rank", "agent", "hosts"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_rank_0_hosts_the_store_unless_the_launcher_has_it(monkeypatch, rank, agent, hosts):
    """Two hosts of one store would each wait for the other ranks."""
    stores, attempts = [], []

    def make(*given, **more):
        stores.append((given, more))
        return HashStore()

    monkeypatch.setattr(attempt_store, "TCPStore", make)
    monkeypatch.setattr(
        attempt_store, "separate_attempts", lambda store, *given: attempts.append((store, given))
    )
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "6123")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    assert attempt_store.launcher_listens() is agent
    attempt_store.attempt_store(rank, 3, 7.0)
    ((given, more),) = stores
    assert given == ("host", 6123, 3)
    assert more == {
        "is_master": hosts,
        "timeout": timedelta(seconds=7.0),
        "multi_tenant": not agent,
    }
    ((store, arguments),) = attempts
    assert arguments == (rank, 3, 7.0)
    store.set("key", "value")
    assert store.underlying_store.check(["penstock-attempts/key"])


def test_without_a_launcher_no_other_process_has_the_store(monkeypatch):
    """torchrun sets the variable to True or False."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert not attempt_store.launcher_listens()


def test_rank_0_answers_every_new_greeting_once_until_the_number_is_confirmed(monkeypatch):
    """A greeting of an earlier attempt may stand there until the rank replaces it."""
    store, rounds = HashStore(), []
    store.set("greeting/1", "old")
    looks = []
    siblings = SimpleNamespace(check=lambda missing: looks.append(sorted(missing)))
    monkeypatch.setattr(attempt_store, "LostSiblings", lambda: siblings)

    def pause(*_):
        rounds.append(store.check(["answer/old"]))
        answered = "new" if len(rounds) > 2 else "old"
        store.delete_key(f"answer/{answered}")
        if len(rounds) == 2:
            store.set("greeting/1", "new")
        if len(rounds) == 4:
            assert not store.check(["answer/new"]), "answered again"
            store.set("confirmed/1/1", "")
        if len(rounds) == 5:
            store.set("confirmed/1/2", "")

    monkeypatch.setattr(attempt_store, "_pause", pause)
    options = separate_attempts(store, 0, 3)
    assert rounds == [True, False, False, False, False]
    assert looks == [[1, 2]] * 4 + [[2]]
    options.set("key", "")
    assert store.check(["attempt/1/key"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_lost_before_it_joined_ends_the_handshake(monkeypatch, rank):
    """Of this host, where its process can be seen; the others are waited for until the limit."""

    def lose(missing):
        raise RunError(f"lost {sorted(missing)}")

    monkeypatch.setattr(attempt_store, "LostSiblings", lambda: SimpleNamespace(check=lose))
    with pytest.raises(RunError, match=r"lost \[0\]" if rank else r"lost \[1, 2\]"):
        separate_attempts(HashStore(), rank, 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_handshake_ends_at_its_time_limit(monkeypatch, rank):
    """Looks are 20 ms apart."""
    clock = SimpleNamespace(now_s=100.0, pauses=[])
    clock.monotonic = lambda: clock.now_s

    def sleep(seconds):
        clock.now_s += seconds
        clock.pauses.append(seconds)

    clock.sleep = sleep
    siblings = SimpleNamespace(check=lambda missing: None)
    monkeypatch.setattr(attempt_store, "time", clock)
    monkeypatch.setattr(attempt_store, "LostSiblings", lambda: siblings)
    with pytest.raises(RunError, match="did not join within 5 s of the start"):
        separate_attempts(HashStore(), rank, 2, timeout_s=5.0)
    assert 105.0 <= clock.now_s <= 105.03
    assert set(clock.pauses) == {0.02}
