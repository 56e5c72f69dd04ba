"""How a rank joins the others, with a store, heartbeats and torch.distributed that note what is asked.

Real groups are joined in tests/ranks and by every test of several processes.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from penstock.errors import RunError, SettingError
from penstock.transport import process_group
from penstock.transport.process_group import (
    heartbeats,
    join,
    lost_ranks,
    naming_lost_ranks,
    started,
)

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_NUM_TASKS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "GLOO_SOCKET_IFNAME",
)


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher has started."""
    for name in VARIABLES:
        # Set first: what the code under test sets is then removed at the end as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(process_group, "_HEARTBEATS", [])
    monkeypatch.setattr(process_group, "launch_store", lambda: None)
    monkeypatch.setattr(process_group, "disable_memory_trimming", lambda: None)
    return monkeypatch


@pytest.fixture
def rank_2(alone):
    """A process with the variables of rank 2 of 3."""
    values = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "6123"}
    for name, value in values.items():
        alone.setenv(name, value)
    return alone


def test_a_process_is_a_rank_by_its_group_or_by_the_variables_of_a_launcher(alone):
    """Each of them alone is enough."""
    assert not started()
    alone.setattr(process_group.dist, "is_initialized", lambda: True)
    assert started()
    alone.setattr(process_group.dist, "is_available", lambda: False)
    assert not started()


@pytest.mark.parametrize(("name", "value"), [("RANK", "0"), ("SLURM_STEP_NUM_TASKS", "2")])
def test_variables_of_a_launcher_start_a_rank(alone, name, value):
    """Those of torchrun or of srun."""
    alone.setenv(name, value)
    assert started()


@pytest.fixture
def clock(monkeypatch):
    """The clock of the module, which only `sleep` moves."""
    fake = SimpleNamespace(now_s=50.0, monotonic=lambda: fake.now_s)
    fake.sleep = lambda seconds: setattr(fake, "now_s", fake.now_s + seconds)
    monkeypatch.setattr(process_group, "time", fake)
    return fake


@pytest.mark.parametrize(
    ("patience_s", "lost_s", "expected"),
    [
        (0.0, 0.0, "gone"),
        (0.0, 0.01, None),
        (1.0, 0.9, "gone"),
        (1.0, 0.995, "gone"),
        (1.0, 1.1, None),
    ],
)
def test_a_loss_is_waited_for_with_patience(alone, clock, patience_s, lost_s, expected):
    """The last look is at the end; without heartbeats there is nothing to wait for."""
    assert lost_ranks(patience_s) is None
    assert clock.now_s == 50.0
    watch = SimpleNamespace(reason=lambda: "gone" if clock.now_s - 50.0 >= lost_s else None)
    process_group._HEARTBEATS.append(watch)
    assert heartbeats() is watch
    assert lost_ranks(patience_s) == expected
    waited_s = clock.now_s - 50.0
    assert waited_s <= (lost_s if expected else patience_s) + 0.021


class Lost(dist.DistError):
    """An error of torch.distributed with a class."""


@pytest.mark.parametrize(
    "error",
    [
        Lost("something"),
        RuntimeError("[gloo/transport/tcp/pair.cc:1] read"),
        RuntimeError("Connection reset by peer\nmore"),
        RuntimeError("connection closed"),
        RuntimeError("Timed out waiting"),
        RuntimeError("timed out"),
        RuntimeError("Timeout of 3 s"),
        ValueError("TCPStore timeout"),
        RuntimeError("write: Broken pipe"),
    ],
)
def test_errors_of_connections_name_the_lost_rank_or_what_this_one_did(alone, clock, error):
    """The first line of torch's message is enough; the heartbeats are asked for 2 s."""
    alone.setenv("RANK", "3")
    with pytest.raises(RunError) as raised, naming_lost_ranks("could not read"):
        raise error
    assert str(raised.value) == f"rank 3 could not read: {str(error).splitlines()[0]}"
    assert raised.value.__cause__ is error
    watch = SimpleNamespace(reason=lambda: "rank 1 is gone" if clock.now_s >= 51.99 else None)
    process_group._HEARTBEATS.append(watch)
    with pytest.raises(RunError, match=r"^rank 1 is gone$"), naming_lost_ranks("could not read"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        SettingError("Connection"),
        RuntimeError("shapes differ\nConnection"),
        ValueError("a number"),
        KeyError("Connection"),
    ],
)
def test_other_errors_are_raised_as_they_are(alone, clock, error):
    """They are this rank's own, whatever the heartbeats say."""
    process_group._HEARTBEATS.append(SimpleNamespace(reason=lambda: "gone"))
    with pytest.raises(type(error)) as raised, naming_lost_ranks("could not read"):
        raise error
    assert raised.value is error


def test_a_process_without_a_rank_or_with_half_of_its_variables_is_refused(alone):
    """The message names those that are missing."""
    with pytest.raises(RunError, match="this process is alone: start it with torchrun"):
        join()
    alone.setenv("RANK", "0")
    alone.setenv("MASTER_ADDR", "a")
    with pytest.raises(RunError, match="RANK is set, but not WORLD_SIZE, MASTER_PORT: start"):
        join()


@pytest.fixture
def notes(rank_2):
    """What `join` does, in order."""
    notes = []
    for name in ("_choose_interface", "_initialise", "_start_heartbeats"):
        rank_2.setattr(process_group, name, lambda *given, name=name: notes.append((name, *given)))

    def limit(*given):
        notes.append(("limit", *given))
        return nullcontext()

    rank_2.setattr(process_group, "disable_memory_trimming", lambda: notes.append("memory"))
    rank_2.setattr(process_group, "_time_limit", limit)
    rank_2.setattr(process_group.dist, "get_world_size", lambda: 3)
    rank_2.setattr(process_group.dist, "get_rank", lambda: 1)
    rank_2.setattr(process_group.dist.distributed_c10d, "_get_default_store", lambda: "store")
    rank_2.setattr(process_group.atexit, "register", notes.append)
    return notes


@pytest.mark.parametrize("launched", [False, True])
def test_a_rank_joins_within_the_limit_and_leaves_at_exit(notes, rank_2, launched):
    """The interface is chosen before gloo is started. A rank of `launch` needs no address."""
    if launched:
        rank_2.delenv("MASTER_ADDR")
        rank_2.setattr(process_group, "launch_store", lambda: "store of launch")
    assert join(7.0) == 3
    assert notes == [
        "memory",
        ("_choose_interface",),
        ("limit", 7.0, 2),
        ("_initialise", 2, 3, 7.0),
        process_group._leave,
    ]


def test_a_task_of_srun_joins_as_the_rank_that_it_is(notes, rank_2):
    """It has none of the variables of torchrun before."""
    slurm = {"PROCID": "1", "LOCALID": "1", "STEP_NUM_TASKS": "4", "JOB_ID": "7", "NODELIST": "a"}
    rank_2.delenv("RANK")
    for name, value in slurm.items():
        rank_2.setenv(f"SLURM_{name}", value)
    join(7.0)
    assert ("_initialise", 1, 3, 7.0) in notes


@pytest.mark.parametrize("error", [RunError("no"), KeyboardInterrupt()])
def test_a_rank_that_cannot_join_tells_those_that_wait_for_it(notes, rank_2, error):
    """Also if the user interrupts it. It has no group to leave at exit."""

    def fail(*_):
        raise error

    rank_2.setattr(process_group, "_initialise", fail)
    with pytest.raises(type(error)):
        join(7.0)
    watch = SimpleNamespace(close=lambda **given: notes.append(given))
    process_group._HEARTBEATS.append(watch)
    with pytest.raises(type(error)):
        join(7.0)
    assert notes[-1] == {"failed": True}
    assert process_group._leave not in notes


def test_ranks_of_a_group_of_the_program_get_heartbeats_once(notes, rank_2):
    """The launcher of `ps.launch` watches its ranks itself; a single rank has nobody to watch."""
    rank_2.setattr(process_group.dist, "is_initialized", lambda: True)
    assert join(7.0) == 3
    assert notes == ["memory", ("limit", 7.0, 1), ("_start_heartbeats", "store", 1, 3, 7.0)]
    del notes[:]
    process_group._HEARTBEATS.append("watch")
    join()
    process_group._HEARTBEATS.clear()
    rank_2.setattr(process_group, "launch_store", lambda: "store of launch")
    join()
    rank_2.setattr(process_group, "launch_store", lambda: None)
    rank_2.setattr(process_group.dist, "get_world_size", lambda: 1)
    assert join() == 1
    assert notes == ["memory"] * 3


def test_gloo_listens_at_the_interface_of_the_address_unless_the_user_names_one(alone):
    """Where no interface is known, gloo chooses."""
    alone.setattr(process_group, "bind_address", lambda: "10.0.0.2")
    alone.setattr(process_group, "interface_of", lambda _: None)
    process_group._choose_interface()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    alone.setattr(process_group, "interface_of", lambda address: f"if of {address}")
    process_group._choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "if of 10.0.0.2"
    alone.setenv("GLOO_SOCKET_IFNAME", "eth7")
    process_group._choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("launched", [False, True])
def test_ranks_meet_in_the_store_before_they_connect(alone, cuda, launched):
    """Under a watch over the store, which ends before torch connects."""
    notes = []
    store = SimpleNamespace(set_timeout=notes.append)

    watch = ExitStack()
    watch.callback(notes.append, "end of watch")

    def note(name):
        return lambda *given: notes.append((name, *given))

    alone.setattr(process_group.torch.cuda, "is_available", lambda: cuda)
    alone.setattr(process_group, "launch_store", lambda: store if launched else None)
    alone.setattr(process_group, "_store", lambda *given: notes.append(given) or store)
    alone.setattr(process_group, "_watching_store", lambda *_: notes.append("watch") or watch)
    alone.setattr(process_group, "_start_heartbeats", note("heartbeats"))
    alone.setattr(process_group, "_wait_for_ranks", note("wait"))
    alone.setattr(
        process_group.dist, "init_process_group", lambda *given, **more: notes.append((given, more))
    )
    process_group._initialise(1, 3, 9.0)
    timeout = timedelta(seconds=9.0)
    assert notes == [
        "watch",
        (1, 3, 9.0),
        timeout,
        ("wait" if launched else "heartbeats", store, 1, 3, 9.0),
        "end of watch",
        (
            ("cpu:gloo,cuda:nccl" if cuda else "gloo",),
            {"store": store, "rank": 1, "world_size": 3, "timeout": timeout},
        ),
    ]
    error = RuntimeError("Connection closed by peer")
    alone.setattr(process_group, "_store", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(RunError, match="could not connect to the other ranks: Connection closed"):
        process_group._initialise(1, 3, 9.0)


@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_store_is_watched_by_all_ranks_that_do_not_host_it(rank_2, rank, agent):
    """A single rank has nobody to wait for, and the store of `ps.launch` is the launcher's."""
    notes = []
    rank_2.setattr(process_group, "launcher_listens", lambda: agent)
    rank_2.setattr(process_group, "wait_for_store", lambda *given: notes.append(("wait", *given)))
    rank_2.setattr(process_group, "StoreWatch", lambda *given: notes.append(given) or nullcontext())
    process_group._watching_store(rank, 3, 9.0)
    host = "torchrun" if agent else "rank 0"
    watched = [("wait", "127.0.0.1", 6123, 9.0), (rank, "127.0.0.1", 6123, host)]
    assert notes == ([] if rank == 0 and not agent else watched)
    del notes[:]
    process_group._watching_store(rank, 1, 9.0)
    rank_2.setattr(process_group, "launch_store", lambda: "store")
    process_group._watching_store(rank, 3, 9.0)
    assert notes == []


@pytest.fixture
def stores(rank_2):
    """The arguments of the stores that are made."""
    stores = []
    rank_2.setattr(process_group, "TCPStore", lambda *given, **more: stores.append((given, more)))
    return stores


def test_rank_0_hosts_the_store_at_its_address_alone(rank_2, stores):
    """torch would listen on all interfaces."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rank_2.setenv("MASTER_PORT", str(port))
    process_group._store(0, 3, 9.0)
    ((given, more),) = stores
    descriptor = more.pop("master_listen_fd")
    assert given == ("127.0.0.1", port, 3)
    assert more == {"is_master": True, "timeout": timedelta(seconds=9.0), "wait_for_workers": False}
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@pytest.mark.parametrize(("rank", "agent"), [(2, False), (2, True), (0, True)])
def test_all_other_ranks_are_clients_of_the_store(rank_2, stores, rank, agent):
    """Rank 0 is one as well where the launcher has the store."""
    rank_2.setattr(process_group, "launcher_listens", lambda: agent)
    process_group._store(rank, 3, 9.0)
    timeout = timedelta(seconds=9.0)
    assert stores == [(("127.0.0.1", 6123, 3), {"is_master": False, "timeout": timeout})]


def test_the_store_of_launch_comes_before_that_of_torchrun(rank_2, stores):
    """A program of torchrun may launch ranks of its own."""
    rank_2.setattr(process_group, "attempt_store", lambda *given: given)
    rank_2.setenv("TORCHELASTIC_RUN_ID", "x")
    assert process_group._store(2, 3, 9.0) == (2, 3, 9.0)
    rank_2.setattr(process_group, "launch_store", lambda: "store")
    assert process_group._store(2, 3, 9.0) == "store"
    assert stores == []


def test_ranks_of_launch_wait_for_each_other_in_its_store(monkeypatch, clock):
    """For all of them, and within the limit."""
    store, waits = HashStore(), []
    monkeypatch.setattr(process_group, "wait_for_keys", lambda *given: waits.append(given))
    process_group._wait_for_ranks(store, 1, 3, 9.0)
    assert store.check(["joined/1"])
    assert not store.check(["joined/0"])
    assert waits == [(store, {0: "joined/0", 1: "joined/1", 2: "joined/2"}, 59.0)]


def test_a_loss_that_the_heartbeats_find_ends_the_waits_of_gloo(alone):
    """Groups of NCCL have an abort of their own; a single rank has no heartbeats."""
    calls, closed = [], []
    watch = SimpleNamespace(on_loss=calls.append)
    alone.setattr(process_group, "Heartbeats", lambda *given: calls.append(given) or watch)
    process_group._start_heartbeats("store", 0, 1, 9.0)
    assert calls == process_group._HEARTBEATS == []
    process_group._start_heartbeats("store", 0, 2, 9.0)
    assert calls == [("store", 0, 2, 9.0), process_group._abort_groups]
    assert [watch] == process_group._HEARTBEATS
    backends = {"a": "cpu:gloo,cuda:nccl", "b": "cuda:nccl", "c": "gloo"}
    world = SimpleNamespace(pg_map=backends)
    alone.setattr(process_group.dist.distributed_c10d, "_world", world)
    alone.setattr(process_group.dist, "get_backend_config", backends.get)
    alone.setattr(process_group.dist, "get_rank", lambda: 5)
    alone.setattr(process_group, "close_gloo_group", lambda *given: closed.append(given))
    calls[-1]()
    assert closed == [("a", 5), ("c", 5)]


@pytest.mark.parametrize("ends", [False, True])
def test_native_code_that_does_not_return_is_ended_two_seconds_after_the_limit(
    monkeypatch, capsys, ends
):
    """A block that ends, also by an error, stops the watch."""
    waits, statuses, targets = [], [], []

    class Done:
        """The end of the block."""

        was_set = False

        def wait(self, seconds):
            """Note the wait."""
            waits.append(seconds)
            return self.was_set

        def set(self):
            """The block has ended."""
            self.was_set = True

    def thread(*, target, daemon, **_):
        assert daemon
        return SimpleNamespace(start=lambda: targets.append(target))

    monkeypatch.setattr(process_group, "threading", SimpleNamespace(Event=Done, Thread=thread))
    monkeypatch.setattr(process_group.os, "_exit", statuses.append)
    with pytest.raises(KeyError), process_group._time_limit(7.4, 3):  # noqa: PT012
        if not ends:
            targets[0]()
        raise KeyError
    if ends:
        targets[0]()
    assert waits == [9.4]
    assert statuses == ([] if ends else [1])
    message = "error: rank 3 could not meet the other ranks within 7 s\n"
    assert capsys.readouterr().err == ("" if ends else message)


def test_at_exit_the_group_is_left_unless_a_rank_is_lost(alone):
    """Connections to a host that is gone would be waited for."""
    left = []
    alone.setattr(process_group.dist, "destroy_process_group", lambda: left.append(1))
    process_group._leave()
    assert left == []
    alone.setattr(process_group.dist, "is_initialized", lambda: True)
    process_group._leave()
    watch = SimpleNamespace(loss=None)
    process_group._HEARTBEATS.append(watch)
    process_group._leave()
    assert left == [1, 1]
    watch.loss = "gone"
    process_group._leave()
    assert left == [1, 1]
