"""A store that does not answer, before there are heartbeats."""

from __future__ import annotations

import os
import socket

import pytest
from tests.time_limits import HANG_S

from penstock.errors import RunError
from penstock.transport.liveness import store_watch
from penstock.transport.liveness.store_watch import StoreWatch, wait_for_store


@pytest.fixture
def listener():
    """A port whose connections nobody answers, as that of a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_wait_for_a_store_that_does_not_answer_ends_with_its_address(listener, monkeypatch):
    """torch would wait until its time limit. The watch closes the connection, which ends the wait."""
    monkeypatch.setattr(store_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(store_watch, "_EXCEPTION_S", HANG_S)
    monkeypatch.setattr(os, "getppid", os.getpid)
    address, port = listener.getsockname()
    watch = StoreWatch(1, address, port, "rank 0", limit_s=0.1)
    with pytest.raises(RunError, match=rf"rank 0 on host 127\.0\.0\.1 is missing: .* port {port}"):
        wait_watched(watch, (address, port))


def wait_watched(watch: StoreWatch, address: tuple[str, int]) -> None:
    """Wait for an answer of a store, as torch does."""
    with watch, socket.create_connection(address, HANG_S) as connection:
        while connection.recv(1):
            pass
        raise ConnectionError("the store is gone")


def test_a_store_that_listens_is_not_waited_for(listener):
    """Whatever becomes of it then is for the watch."""
    wait_for_store(*listener.getsockname(), timeout_s=HANG_S)


def test_a_host_without_a_store_is_named_at_the_time_limit(listener):
    """It answers, so that rank 0 may only be late."""
    address, port = listener.getsockname()
    listener.close()
    with pytest.raises(RunError, match=f"port {port}, and the host does not listen there"):
        wait_for_store(address, port, timeout_s=0.0)


def test_a_host_that_no_longer_answers_is_lost(monkeypatch):
    """It answered before it had a store, and then lost its power or its cable."""
    outcomes = iter([ConnectionRefusedError()])

    def connect(address: object, limit_s: float) -> None:
        """Refuse the first connection; the others get no answer."""
        raise next(outcomes, TimeoutError())

    monkeypatch.setattr(store_watch.socket, "create_connection", connect)
    with pytest.raises(RunError, match=r"rank 0 on host 10\.0\.0\.9 is missing: the host has not"):
        wait_for_store("10.0.0.9", 29500, timeout_s=HANG_S, limit_s=0.2)
