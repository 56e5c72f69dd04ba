"""Heartbeats: who counts as lost, and what is ignored."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.time_limits import HANG_S
from torch.distributed import FileStore, HashStore

from penstock.errors import RunError
from penstock.transport.liveness import heartbeat_process
from penstock.transport.liveness.heartbeat_process import Peer, Pulse, State, process_state
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
    first.receive(second.encode("running"), 10.0)
    first.delayed(60.0)
    first.delayed(40.0)
    assert first.lost(114.0) == []
    assert first.lost(115.0) != []


def test_a_heartbeat_of_a_rank_whose_address_has_not_come_is_ignored():
    """Ranks start at different times; the sender may know this rank before this one knows it."""
    first, second = pulse_of_two()
    del first.peers[1]
    first.receive(second.encode("dead"), 1.0)
    assert first.peers == {}
    first.peers[1] = Peer(("127.0.0.1", 1))
    first.receive(second.encode("running"), 2.0)
    assert first.unheard() == []


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
    """A process that waits or computes is running; its name may contain what separates fields."""
    # PR_SET_NAME of prctl is 15.
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) T b'); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        assert process_state(child.pid) == "running"
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert process_state(child.pid) == "stopped"
    finally:
        child.kill()
        child.communicate()
    assert process_state(child.pid) == "running"


class Endpoint:
    """A socket that notes what is sent, with the datagrams that have arrived."""

    def __init__(self) -> None:
        self.sent, self.arrived, self.unreachable = [], [], None

    def fileno(self):
        """A number that no other source has."""
        return 77

    def sendto(self, datagram, flags, address):
        """Note the state of a heartbeat, and for whom it is."""
        if address == self.unreachable:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        self.sent.append((json.loads(datagram[16:])[2], address))

    def recv(self, count, flags):
        """Return the next datagram."""
        if not self.arrived:
            raise BlockingIOError
        return self.arrived.pop(0)


@pytest.fixture
def loop(monkeypatch):
    """The loop of the process, whose standard input, clock and reports the test sets."""
    fake = SimpleNamespace(now_s=10.0, reports=[], input=[], parent=5, ends=[])
    system = SimpleNamespace(
        read=lambda fd, count: fake.input.pop(0),
        getppid=lambda: fake.parent,
        write=lambda fd, line: fake.reports.append(json.loads(line)),
    )
    clock = SimpleNamespace(monotonic=lambda: fake.now_s, sleep=fake.ends.append)
    monkeypatch.setattr(heartbeat_process, "os", system)
    monkeypatch.setattr(heartbeat_process, "time", clock)
    monkeypatch.setattr(heartbeat_process, "process_state", lambda pid: State.RUNNING)
    monkeypatch.setattr(heartbeat_process, "_watch_process", lambda pid: 99)
    fake.endpoint = Endpoint()
    fake.pulse = Pulse(0, SECRET, LIMIT_S)
    fake.loop = heartbeat_process._Loop(fake.pulse, 5, fake.endpoint)
    fake.monkeypatch = monkeypatch
    return fake


def test_commands_may_arrive_in_pieces_or_several_at_once(loop):
    """A pipe has no lines. The time of the newest address counts for the warning."""
    text = b'{"peers": {"1": ["a", 11]}}\n{"peers": {"2": ["b", "12"], "3": ["c", 13]}}\n"closed"\n'
    for cut in (1, 10, 28, 29, len(text) - 1):
        loop.loop.pending, loop.loop.ended = b"", None
        loop.pulse.peers.clear()
        loop.input += [text[:cut], text[cut:]]
        loop.loop._read_command(20.0)
        loop.loop._read_command(21.0)
        addresses = {rank: peer.address for rank, peer in loop.pulse.peers.items()}
        assert addresses == {1: ("a", 11), 2: ("b", 12), 3: ("c", 13)}
        assert loop.pulse.peers[3].alive_s == (21.0 if cut < len(text) - 1 else 20.0)
        assert loop.loop.begun_s == loop.pulse.peers[3].alive_s
        assert loop.loop.ended is State.CLOSED
    loop.input.append(b'"failed"\n')
    loop.loop._read_command(22.0)
    assert loop.loop.ended is State.FAILED
    loop.input.append(b"")
    loop.loop._read_command(22.0)
    assert loop.loop.ended is State.DEAD


def select_from(loop, rounds):
    """Let the sources of each round be ready after its seconds."""
    timeouts = []

    def select(sources, _, __, timeout_s):
        seconds, ready = rounds.pop(0)
        timeouts.append(round(timeout_s, 3))
        loop.now_s += seconds
        return ready, [], []

    loop.monkeypatch.setattr(heartbeat_process.select, "select", select)
    return timeouts


def test_a_rank_that_has_closed_is_not_dead_although_its_process_has_ended(loop):
    """Both may be noticed at once; the farewell is said three times to all peers."""
    loop.pulse.peers = {1: Peer(("a", 11)), 2: Peer(("b", 12))}
    loop.input.append(b'"closed"\n')
    select_from(loop, [(0.0, [0, 99])])
    loop.loop.run()
    farewell = [("closed", ("a", 11)), ("closed", ("b", 12))]
    assert loop.endpoint.sent == farewell * 3
    assert loop.ends == [0.05] * 3


@pytest.mark.parametrize("by", ["descriptor", "parent"])
def test_a_rank_that_ends_without_a_word_is_dead(loop, by):
    """Where there is no descriptor of its process, the parent becomes another one."""
    loop.pulse.peers = {1: Peer(("a", 11))}
    if by == "parent":
        loop.parent = 1
    select_from(loop, [(0.0, [99] if by == "descriptor" else [])])
    loop.loop.run()
    assert loop.endpoint.sent == [("dead", ("a", 11))] * 3


def test_heartbeats_are_half_a_second_apart_once_there_are_peers(loop):
    """Before that nothing is sent. Datagrams in between do not move them."""
    peers = b'{"peers": {"1": ["a", 11]}}\n'
    loop.input += [peers, b'"closed"\n']
    rounds = [(0.0, []), (0.125, [0]), (0.25, [77]), (0.125, []), (0.5, []), (0.0, [0])]
    timeouts = select_from(loop, rounds)
    loop.loop.run()
    assert [state for state, _ in loop.endpoint.sent] == ["running"] * 2 + ["closed"] * 3
    assert timeouts == [0.0, 0.5, 0.375, 0.125, 0.5, 0.5]


def test_a_peer_that_cannot_be_reached_keeps_no_heartbeat_from_the_others(loop):
    """The others would take this rank for lost. Every heartbeat has the state of the rank."""
    loop.pulse.peers = {1: Peer(("a", 11)), 2: Peer(("b", 12)), 3: Peer(("c", 13))}
    loop.loop.begun_s, loop.endpoint.unreachable = loop.now_s, ("b", 12)
    pids = []
    state_of = {5: State.STOPPED}
    loop.monkeypatch.setattr(
        heartbeat_process, "process_state", lambda pid: pids.append(pid) or state_of[pid]
    )
    loop.loop._beat(loop.now_s)
    assert loop.endpoint.sent == [("stopped", ("a", 11)), ("stopped", ("c", 13))]
    assert pids == [5]


def test_all_heartbeats_that_have_arrived_are_read_at_once(loop):
    """Of 255 peers, two are heard per period if each look read one."""
    loop.pulse.peers = {rank: Peer(("a", rank)) for rank in (1, 2, 3)}
    loop.endpoint.arrived = [Pulse(rank, SECRET, 1.0).encode("running") for rank in (3, 1, 2)]
    loop.loop._receive(12.0)
    assert loop.pulse.unheard() == []
    assert {peer.alive_s for peer in loop.pulse.peers.values()} == {12.0}


@pytest.mark.parametrize("error", [AttributeError, ProcessLookupError])
def test_without_a_descriptor_of_the_rank_the_parent_is_watched_alone(monkeypatch, error):
    """macOS has none, and the rank may have ended already."""

    def fail(pid):
        raise error

    monkeypatch.setattr(heartbeat_process.os, "pidfd_open", fail, raising=False)
    assert heartbeat_process._watch_process(5) is None


def test_a_report_to_a_rank_that_has_ended_is_no_error(monkeypatch):
    """The farewell to the peers is still to come."""

    def fail(descriptor, line):
        raise BrokenPipeError

    monkeypatch.setattr(heartbeat_process.os, "write", fail)
    heartbeat_process._report({"lost": []})


def test_only_time_in_which_the_process_should_have_run_counts_as_delay(loop):
    """More than two periods after the heartbeat was due, or after a long look that came before."""
    delays = []
    loop.pulse.delayed = delays.append
    loop.loop.begun_s = loop.now_s
    loop.input.append(b'"closed"\n')

    def slow_beat(now_s):
        loop.now_s += 4.0

    rounds = [(0.0, []), (1.4, []), (1.6, []), (0.0, [0])]
    select_from(loop, rounds)
    loop.loop.run()
    assert delays == [pytest.approx(1.1)]
    delays.clear()
    loop.loop.ended = None
    loop.input.append(b'"closed"\n')
    loop.loop._beat = slow_beat
    select_from(loop, [(0.0, []), (0.9, []), (1.1, []), (0.0, [0])])
    loop.loop.run()
    assert delays == [pytest.approx(1.1)]


def test_peers_of_which_nothing_was_heard_are_reported_once_after_the_limit(loop):
    """From when the last address came."""
    loop.pulse.peers = {
        1: Peer(("a", 11), alive_s=0.0),
        2: Peer(("b", 12), sequence=3, alive_s=99.0),
    }
    loop.loop.begun_s = 10.0
    for now_s in (10.0, 14.9, 15.0, 20.0):
        loop.loop._beat(now_s)
        assert loop.reports == ([{"unheard": [1]}] if now_s >= 15.0 else [])
    loop.loop._beat(104.1)
    assert loop.reports[1:] == [{"lost": [{"rank": 2, "age_s": 5.1, "state": "running"}]}]


def give_settings(monkeypatch, address):
    """Let standard input have the settings of rank 3, which listens at an address."""
    settings = {"rank": 3, "pid": 77, "secret": "abcd", "bind": address, "limit_s": 4.5}
    standard_input = SimpleNamespace(buffer=io.BytesIO(json.dumps(settings).encode() + b"\n"))
    monkeypatch.setattr(heartbeat_process, "sys", SimpleNamespace(stdin=standard_input))


@pytest.mark.parametrize(
    ("address", "family"), [("fe80::2", socket.AF_INET6), ("10.0.0.2", socket.AF_INET)]
)
def test_an_address_at_which_the_process_cannot_listen_is_reported(monkeypatch, address, family):
    """The socket is of the family of the address."""
    sockets, reports = [], []

    def bind(target):
        sockets.append(target)
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    def open_socket(*form):
        sockets.append(form)
        return SimpleNamespace(bind=bind)

    give_settings(monkeypatch, address)
    monkeypatch.setattr(heartbeat_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(heartbeat_process.socket, "socket", open_socket)
    monkeypatch.setattr(heartbeat_process, "_report", reports.append)
    heartbeat_process.main()
    assert sockets == [(family, socket.SOCK_DGRAM), (address, 0)]
    assert reports == [{"error": "Cannot assign requested address"}]


def test_the_process_ignores_signals_to_its_group_and_runs_by_its_settings(monkeypatch):
    """A rank may still save after Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP, and is then not lost."""
    ignored, reports, loops = set(), [], []

    def handle(number, action):
        assert action is signal.SIG_IGN
        ignored.add(number)

    def note(loop):
        loops.append(loop)

    give_settings(monkeypatch, "127.0.0.1")
    monkeypatch.setattr(heartbeat_process.signal, "signal", handle)
    monkeypatch.setattr(heartbeat_process, "_report", reports.append)
    monkeypatch.setattr(heartbeat_process._Loop, "run", note)
    heartbeat_process.main()
    assert ignored == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    (loop,) = loops
    with loop.endpoint as endpoint:
        assert endpoint.getsockname() == ("127.0.0.1", reports[0]["port"])
    assert (loop.parent, loop.pulse.rank, loop.pulse.limit_s) == (77, 3, 4.5)
    stranger = Pulse(5, bytes.fromhex("abcd"), 1.0)
    loop.pulse.peers = {5: Peer(("a", 11))}
    loop.pulse.receive(stranger.encode(State.RUNNING), 1.0)
    assert loop.pulse.unheard() == []
