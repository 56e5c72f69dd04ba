"""The store of `launch`: torch's semantics, over a socket that only its user can reach."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.time_limits import HANG_S
from torch._C._distributed_c10d import PrefixStore

from penstock.transport import unix_store
from penstock.transport.unix_store import VARIABLE, StoreServer, UnixStore, launch_store


@pytest.fixture
def server(tmp_path):
    """A server in a folder whose path is longer than a socket's address may be."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with StoreServer(folder / "store") as server:
        yield server


def test_values_are_bytes_and_prefixes_keep_worlds_apart(server):
    """A second client reads what the first has written, of any bytes."""
    first, second = UnixStore(server.path), UnixStore(server.path)
    value = bytes(range(256))
    PrefixStore("a", first).set("key", value)
    assert PrefixStore("a", second).get("key") == value
    assert not PrefixStore("b", second).check(["key"])
    assert server.find("/key") == ["a/key"]


def test_methods_do_what_those_of_torchs_store_do(server):
    """Compared with torch's own HashStore, call by call."""
    for store in (dist.HashStore(), UnixStore(server.path)):
        results = [
            store.add("count", 2),
            store.add("count", -5),
            store.compare_set("flag", "", "one"),
            store.compare_set("flag", "", "two"),
            store.compare_set("nothing", "other", "new"),
            store.check(["nothing"]),
            store.compare_set("flag", "one", "three"),
            store.check(["flag"]),
            store.check(["flag", "missing"]),
            store.get("flag"),
            store.delete_key("flag"),
            store.delete_key("flag"),
        ]
        assert results[:6] == [2, -3, b"one", b"one", b"other", False]
        assert results[6:] == [b"three", True, False, b"three", True, False]


@pytest.mark.parametrize(
    ("method", "values"),
    [("compare_set", ("flag", "", "two")), ("set", ("flag", "two")), ("get", ("flag",))],
)
def test_the_launcher_waits_for_a_request_in_progress(server, method, values):
    """Its own calls could come between the comparison and the setting of a rank's."""
    thread = threading.Thread(target=getattr(server, method), args=values)
    with server._lock:
        thread.start()
        thread.join(0.02)
        assert thread.is_alive()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_waiting_ends_at_the_timeout(server):
    """The error is of the class that torch's stores raise."""
    store = UnixStore(server.path)
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.wait(["missing"], timedelta(milliseconds=1))


def test_a_server_that_has_ended_is_an_error_of_the_network(server):
    """The board of a rank takes it for the end of the run."""
    store = UnixStore(server.path)
    store.set("key", "value")
    server.close()
    with pytest.raises(dist.DistNetworkError, match="launcher"):
        store.get("key")


def test_a_server_without_descriptors_accepts_again_when_it_has_some(tmp_path, monkeypatch):
    """Ranks that connect later would wait forever."""
    accept = socket.socket.accept
    errors = [OSError(errno.EMFILE, "Too many open files")]

    def accept_or_fail(listener):
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    with StoreServer(tmp_path / "store") as server:
        client = UnixStore(server.path)
        client._socket.settimeout(HANG_S)
        client.set("key", "value")
    assert errors == []


def test_an_interrupted_request_ends_the_connection(server, monkeypatch):
    """Its answer would be taken for that of the next request."""
    store = UnixStore(server.path)
    store.set("key", "value")

    receive = unix_store._receive

    def interrupt(connection):
        if connection is store._socket:
            raise KeyboardInterrupt
        return receive(connection)

    with monkeypatch.context() as patch:
        patch.setattr(unix_store, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.check(["missing"])
    with pytest.raises(dist.DistNetworkError, match="launcher"):
        store.check(["key"])
    assert UnixStore(server.path).check(["key"])


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\0\0\0\2[]", b'\0\0\0\6["no"]', b"x"])
def test_garbage_ends_its_own_connection_alone(server, monkeypatch, content):
    """Other clients go on."""
    client = UnixStore(server.path)
    client.set("key", "value")
    monkeypatch.chdir(server.path.parent)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(server.path.name)
        stranger.sendall(content)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(64) == b""
    assert client.get("key") == b"value"


def test_only_its_user_can_connect(server):
    """Nothing of the socket is open to the group or to others."""
    assert server.path.stat().st_mode & 0o077 == 0


def test_a_rank_of_another_launcher_does_not_use_the_store(server, monkeypatch):
    """torchrun within a rank of `launch` inherits the variable, and sets another port."""
    monkeypatch.setenv(VARIABLE, f"123:{server.path}")
    monkeypatch.setenv("MASTER_PORT", "124")
    assert launch_store() is None
    monkeypatch.setenv("MASTER_PORT", "123")
    assert isinstance(launch_store(), UnixStore)
