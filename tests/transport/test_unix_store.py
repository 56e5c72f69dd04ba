"""The store of `launch`: torch's semantics, over a socket that only its user can reach."""

from __future__ import annotations

import contextlib
import errno
import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

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


def check_waits_for_lock(server, call, *values):
    """Check that a call ends only when the lock of the server is free."""
    thread = threading.Thread(target=call, args=values)
    with server._lock:
        thread.start()
        thread.join(0.02)
        assert thread.is_alive()
    thread.join(HANG_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("method", "values"),
    [("compare_set", ("flag", "", "two")), ("set", ("flag", "two")), ("get", ("flag",))],
)
def test_the_launcher_waits_for_a_request_in_progress(server, method, values):
    """Its own calls could come between the comparison and the setting of a rank's."""
    check_waits_for_lock(server, getattr(server, method), *values)


@pytest.mark.parametrize("method", ["add", "delete_key"])
def test_a_request_of_a_rank_waits_for_a_call_of_the_launcher(server, method):
    """It could come between the comparison and the setting of the launcher's."""
    store = UnixStore(server.path)
    values = ("count", 1) if method == "add" else ("count",)
    check_waits_for_lock(server, getattr(store, method), *values)


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


def test_keys_are_counted_and_deleted_one_by_one(server):
    """torch counts them to know whether all ranks have come."""
    store = UnixStore(server.path)
    assert store.num_keys() == 0
    for key in ("a", "b", "a"):
        store.set(key, "1")
    assert store.num_keys() == 2
    assert store.delete_key("a")
    assert (store.num_keys(), store.check(["b"]), store.check([])) == (1, True, True)


@pytest.mark.parametrize("value", ["", "é", "text", b"", b"\xff\x00", "\u20ac"])
def test_texts_are_stored_as_their_bytes(server, value):
    """As in torch's stores, also where a comparison sets them."""
    store, expected = UnixStore(server.path), value if isinstance(value, bytes) else value.encode()
    store.set("key", value)
    assert store.get("key") == expected
    assert store.compare_set("other", "", value) == expected
    assert store.compare_set("key", value, b"new") == b"new"


def test_the_launcher_reads_and_writes_values_of_the_ranks(server):
    """It writes the reason of a failure where each rank looks, unless there is one already."""
    store = UnixStore(server.path)
    store.set("world/pid/0", "42")
    store.set("pid/0/other", "43")
    assert server.find("pid/0") == ["world/pid/0"]
    assert (server.get("world/pid/0"), server.get("missing")) == ("42", None)
    server.set("world/pid/0", "\xff")
    assert store.get("world/pid/0") == b"\xff"
    assert server.compare_set("failure", "", "first") == "first"
    assert server.compare_set("failure", "", "second") == "first"
    assert server.compare_set("missing", "expected", "new") == "expected"
    assert server.get("missing") is None
    assert store.get("failure") == b"first"


def test_a_wait_ends_when_all_keys_are_there(server):
    """The others may come one after another; some are there already."""
    store, other = UnixStore(server.path), UnixStore(server.path)
    store.set("a", "")
    thread = threading.Thread(target=other.wait, args=(["a", "b", "c"], timedelta(seconds=HANG_S)))
    thread.start()
    store.set("b", "")
    assert thread.is_alive()
    store.set("c", "late")
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert other.get("c") == b"late"


def test_the_timeout_of_the_store_is_that_of_its_waits(server):
    """`get` waits as well. A time limit of the call comes before it."""
    store = UnixStore(server.path)
    store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(dist.DistStoreError, match=r"\['missing'\] are not in the store after 0:00"):
        store.get("missing")
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.wait(["missing"])
    store.set_timeout(timedelta(hours=1))
    with pytest.raises(dist.DistStoreError, match="missing"):
        store.wait(["missing"], timedelta(0))


def test_pauses_between_requests_double_up_to_a_limit(server, monkeypatch):
    """A wait of minutes must not ask 2,000 times a second."""
    store, pauses = UnixStore(server.path), []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(unix_store, "time", clock)
    with pytest.raises(dist.DistStoreError):
        store.wait(["missing"], timedelta(seconds=0.08))
    assert pauses == [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02, 0.02]


def test_values_longer_than_one_read_arrive_whole(server):
    """Layer profiles are megabytes."""
    store = UnixStore(server.path)
    value = bytes(range(256)) * 10_000
    store.set("key", value)
    assert store.get("key") == value


def test_a_frame_that_claims_to_be_longer_than_allowed_is_not_read():
    """Its length comes from the other side; memory must not be allocated for it."""
    for length, allowed in ((unix_store._MAX_FRAME + 1, False), (2, True)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(length.to_bytes(4, "big") + b"[]")
            if allowed:
                assert unix_store._receive(ours) == []
                continue
            with pytest.raises(OSError, match=f"a frame of {length} bytes"):
                unix_store._receive(ours)


def test_a_rank_has_one_connection_however_often_it_asks_for_the_store(server, monkeypatch):
    """torch's side does not keep the object, which must live as long as the process."""
    monkeypatch.setenv(VARIABLE, f"123:{server.path}")
    monkeypatch.setenv("MASTER_PORT", "123")
    assert launch_store() is launch_store()
    for text in ("", "123", "123:", f":{server.path}"):
        monkeypatch.setenv(VARIABLE, text)
        assert launch_store() is None


def test_clients_of_several_threads_get_their_own_answers(server):
    """A rank's board and its main thread share a client."""
    store = UnixStore(server.path)
    for number in range(8):
        store.set(str(number), str(number))

    def read(number):
        return [store.get(str(number)) for _ in range(30)]

    with ThreadPoolExecutor(8) as pool:
        for number, answers in enumerate(pool.map(read, range(8))):
            assert answers == [str(number).encode()] * 30


def test_connections_and_servers_hold_one_descriptor_each(tmp_path):
    """A path longer than a socket's address takes another one, only for a moment."""
    gc.collect()

    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    with StoreServer(tmp_path / "store") as server:
        assert count() == before + 1
        stores = [UnixStore(server.path) for _ in range(3)]
        stores[0].set("key", "value")
        assert count() <= before + 1 + 2 * len(stores)
        stores[0]._socket.close()


def test_the_threads_of_a_closed_server_end(tmp_path):
    """A launcher may launch many times."""
    before = set(threading.enumerate())
    with StoreServer(tmp_path / "store") as server:
        # In a variable: the server ends the thread of a connection that is closed.
        store = UnixStore(server.path)
        store.set("key", "value")
        started = set(threading.enumerate()) - before
        assert len(started) == 2
    for thread in started:
        thread.join(HANG_S)
        assert not thread.is_alive()
