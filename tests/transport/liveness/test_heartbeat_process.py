"""Heartbeats: who counts as lost, and what is ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.time_limits import HANG_S
from torch.distributed import FileStore, HashStore

from penstock.errors import RunError
from penstock.transport.liveness.heartbeat_process import Peer, Pulse, process_state
from penstock.transport.liveness.heartbeats import Heartbeats

SECRET = b"secret"
LIMIT_S = 5.0


def pulse_of_two() -> tuple[Pulse, Pulse]:
    """Return the heartbeats of ranks 0 and 1, which know each other since second 0."""
    pulses = Pulse(0, SECRET, LIMIT_S), Pulse(1, SECRET, LIMIT_S)
    for rank, pulse in enumerate(pulses):
        pulse.peers[1 - rank] = Peer(("127.0.0.1", 1))
    return pulses


def test_a_rank_without_heartbeats_is_lost_after_the_limit_and_reported_once():
    """The report has the age of the last heartbeat."""
    first, second = pulse_of_two()
    first.receive(second.encode("running"), 10.0)
    assert first.lost(10.0 + LIMIT_S - 0.1) == []
    assert first.lost(16.0) == [{"rank": 1, "age_s": 6.0, "state": "running"}]
    assert first.lost(17.0) == []


def test_a_stopped_rank_is_lost_although_its_heartbeats_arrive():
    """The heartbeat process still runs when its rank has been stopped."""
    first, second = pulse_of_two()
    first.receive(second.encode("running"), 0.0)
    for second_s in range(1, 7):
        first.receive(second.encode("stopped"), float(second_s))
    assert first.lost(6.0) == [{"rank": 1, "age_s": 6.0, "state": "stopped"}]


def test_a_rank_that_goes_on_before_the_limit_is_not_lost():
    """A short stop, such as of a debugger, is not the end of a run."""
    first, second = pulse_of_two()
    first.receive(second.encode("running"), 0.0)
    first.receive(second.encode("stopped"), 3.0)
    first.receive(second.encode("running"), 4.5)
    assert first.lost(9.0) == []


@pytest.mark.parametrize("state", ["dead", "failed"])
def test_a_rank_that_has_ended_is_lost_at_once(state):
    """Its heartbeat process outlives it for a farewell."""
    first, second = pulse_of_two()
    first.receive(second.encode(state), 1.0)
    assert [entry["state"] for entry in first.lost(1.0)] == [state]


def test_a_rank_that_has_closed_is_never_lost():
    """The ranks of a run do not all end at the same time."""
    first, second = pulse_of_two()
    first.receive(second.encode("closed"), 1.0)
    assert first.lost(1000.0) == []


def test_a_rank_of_which_nothing_was_ever_heard_is_not_lost_but_named():
    """A firewall that drops the datagrams must not end a run that works."""
    first, _ = pulse_of_two()
    assert first.lost(1000.0) == []
    assert first.unheard() == [1]


def test_forged_and_repeated_heartbeats_are_ignored():
    """Without the secret nobody can end a run, nor keep a lost rank alive."""
    first, second = pulse_of_two()
    beat = second.encode("running")
    first.receive(beat, 1.0)
    stranger = Pulse(1, b"guess", LIMIT_S)
    for datagram in (stranger.encode("dead"), b"", b"\0" * 16, b"\0" * 16 + b"[[[", beat):
        first.receive(datagram, 20.0)
    assert first.lost(5.0) == []
    assert [entry["rank"] for entry in first.lost(20.0)] == [1]


def test_time_in_which_this_process_did_not_run_does_not_count():
    """After Ctrl-Z and fg, all ranks have been silent for as long."""
    first, second = pulse_of_two()
    first.receive(second.encode("running"), 0.0)
    first.delayed(100.0)
    assert first.lost(104.0) == []
    assert first.lost(105.0) != []


def test_an_address_of_another_host_is_refused_with_the_variable_that_sets_it(monkeypatch):
    """The heartbeat process cannot listen there."""
    monkeypatch.setenv("PENSTOCK_BIND", "192.0.2.1")
    with pytest.raises(
        RunError,
        match=r"rank 0 cannot send heartbeats from 192\.0\.2\.1: Cannot assign.*PENSTOCK_BIND",
    ):
        Heartbeats(HashStore(), 0, 2, timeout_s=0.0)


#: A rank that waits for two others until it may end.
EARLY = """
import os, sys, threading
from torch.distributed import FileStore
from penstock.transport.liveness.heartbeats import Heartbeats

path = sys.argv[1]
threading.Thread(target=Heartbeats, args=(FileStore(path, 3), 1, 3, 600.0), daemon=True).start()
FileStore(path, 3).wait(["go"])
os._exit(0)
"""


def test_a_rank_that_is_lost_while_others_are_waited_for_is_named(tmp_path, monkeypatch):
    """One host may be slow to start; the others are watched meanwhile, not only afterwards."""
    store = FileStore(str(tmp_path / "store"), 3)
    add_peer = Heartbeats._add_peer

    def add_and_let_go(self, rank):
        add_peer(self, rank)
        store.set("go", "")

    monkeypatch.setattr(Heartbeats, "_add_peer", add_and_let_go)
    with (
        subprocess.Popen([sys.executable, "-c", EARLY, str(tmp_path / "store")]) as child,
        pytest.raises(RunError, match=r"rank 1 on host .* has ended without a message"),
    ):
        Heartbeats(FileStore(str(tmp_path / "store"), 3), 0, 3, timeout_s=HANG_S)
    assert child.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is in Linux's /proc")
def test_the_state_of_a_process_tells_a_stop_by_a_signal():
    """A process that waits or computes is running."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_state(child.pid) == "running"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_state(child.pid) == "stopped"
    finally:
        child.kill()
        child.communicate()
    assert process_state(child.pid) == "running"
