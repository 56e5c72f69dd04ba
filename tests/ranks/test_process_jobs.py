"""A world of one process among others, whose links and board note what is asked of them.

Real processes are compared with threads in test_process_world.py.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from penstock.errors import DeadlineExceeded, PeerFailed, RanksDiffer, StageFailed
from penstock.ranks import process_world as module
from penstock.ranks.process_world import DistributedWorld
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport import same_host
from penstock.transport.distributed import LOSS_TAG, MAX_IN_FLIGHT
from penstock.transport.payload import Payload, TensorForm
from penstock.transport.transport import TransportLost, TransportTimeout

CPU = torch.device("cpu")


class Board:
    """The board of a rank: notes statuses and failures, and has the reason of another rank's."""

    def __init__(self, log):
        self.log, self.reason, self.difference = log, None, None

    def doing(self, status):
        """Note the status."""
        self.log.append(status)

    def fail(self, reason, *, differs):
        """Note the failure of this rank."""
        self.log.append(("fail", reason, differs))

    def failure(self, patience_s=0.0):
        """Return why another rank has failed."""
        self.log.append(("failure", patience_s))
        return self.reason

    def check_difference(self):
        """Raise if ranks have made different calls."""
        if self.difference is not None:
            raise RanksDiffer(self.difference)

    def compare_calls(self, patience_s):
        """Note the comparison."""
        self.log.append(("compare", patience_s))

    def describe_others(self):
        """What the others do."""
        return ["rank 0 is at 0F1 since 5 s"]


@pytest.fixture
def ranks(monkeypatch):
    """Make the world of rank 1 of 3, whose processes are 4, 6 and 5 of the job."""
    log = []

    def make(*, near=(), rank=1, device=CPU, receives_on_device=False):
        world = object.__new__(DistributedWorld)
        world.size, world._rank, world.local_ranks = 3, rank, (rank,)
        world._device, world.receives_on_device = device, receives_on_device
        world._board, world._overdue, world._pending_tells = Board(log), None, deque()
        world._wire = SimpleNamespace(
            lost=False,
            deadline_s=7.0,
            ranks=(4, 6, 5),
            shared="shared",
            replica_groups=[],
            wait=lambda work: log.append(("wait", work)),
            abort=lambda: log.append("abort wire"),
            late=lambda: None,
            buffers=SimpleNamespace(peak=77),
        )
        world._near = SimpleNamespace(
            reachable=frozenset(near),
            abort=lambda: log.append("abort near"),
            connects=lambda ranks: set(ranks) <= {*near, rank},
            open_segment="open segment",
            send=lambda peer, message, payload, signature: log.append(
                ("near", peer, payload.leaves[0].tolist())
            ),
        )
        world._collectives = {2: "collectives"}
        world._transport = "transport"
        return world

    def transfer(name):
        def start(tensor, process, *, group, tag=None, async_op=None):
            assert tensor.is_contiguous(), "gloo sends memory as it is"
            log.append((name, process, group, tag, tensor.tolist()))
            return f"{name} {process}"

        return start

    for name in ("isend", "irecv", "broadcast"):
        monkeypatch.setattr(module.dist, name, transfer(name))
    return SimpleNamespace(world=make, log=log)


def test_a_world_has_what_belongs_to_its_rank(ranks):
    """Whatever rank is asked for: there is one."""
    world = ranks.world(near=[0])
    assert (world.device(1), world.transport(1), world.board(1)) == (
        CPU,
        "transport",
        world._board,
    )
    assert (world.buffer_bytes(1), world.deadline_s) == (77, 7.0)
    assert world.replica_collectives(2) == "collectives"
    assert world.replica_collectives(0) is None
    assert world.open_segment([0, 1]) == "open segment"
    assert world.open_segment([0, 1, 2]) is None
    assert ranks.world(near=[0], device=torch.device("meta")).open_segment([0, 1]) is None
    world.watch_group("group")
    assert world._wire.replica_groups == ["group"]


@pytest.mark.parametrize("near", [(), (0,), (2,), (0, 2)])
def test_numbers_are_told_to_every_other_rank_once(ranks, near):
    """Through shared memory where that reaches it, else over gloo, from host memory as doubles."""
    world = ranks.world(near=near)
    world.tell(torch.tensor([1.5, 2.0]))
    expected = [
        ("near", peer, [1.5, 2.0])
        if peer in near
        else ("isend", {0: 4, 2: 5}[peer], "shared", LOSS_TAG, [1.5, 2.0])
        for peer in (0, 2)
    ]
    assert ranks.log == expected
    assert len(world._pending_tells) == 2 - len(near)
    assert all(numbers.dtype is torch.float64 for _, numbers in world._pending_tells)


def test_sends_of_numbers_are_waited_for_from_the_oldest_when_there_are_many(ranks):
    """Their buffers would fill the memory."""
    world = ranks.world()
    for number in range(MAX_IN_FLIGHT * 3 + 1):
        world._pending_tells.append((f"work {number}", None))
    world.tell(torch.zeros(1, dtype=torch.float64))
    assert [entry for entry in ranks.log if entry[0] == "wait"] == [
        ("wait", f"work {number}") for number in range(3)
    ]
    assert len(world._pending_tells) == MAX_IN_FLIGHT * 3


@pytest.mark.parametrize(
    ("error", "lost", "kind"),
    [
        (RuntimeError("Connection closed by peer"), False, TransportLost),
        (RuntimeError("bad dtype"), True, TransportLost),
        (RuntimeError("bad dtype"), False, RuntimeError),
    ],
)
def test_numbers_that_cannot_be_sent_are_a_lost_link_or_an_error_of_this_rank(
    ranks, monkeypatch, error, lost, kind
):
    """As with other messages."""

    def fail(*_, **__):
        raise error

    world = ranks.world()
    world._wire.lost = lost
    monkeypatch.setattr(module.dist, "isend", fail)
    with pytest.raises(kind) as raised:
        world.tell(torch.zeros(1))
    assert type(raised.value) is kind


def test_numbers_are_heard_when_they_are_asked_for(ranks, monkeypatch):
    """The receive is posted before; through shared memory nothing needs to be posted."""
    world = ranks.world(near=[0])
    wait = world.hear(2, 3)
    assert ranks.log[0][:4] == ("irecv", 5, "shared", LOSS_TAG)
    numbers = wait()
    assert (numbers.dtype, numbers.shape) == (torch.float64, (3,))
    assert ranks.log[1:] == ["waits for rank 2", ("wait", "irecv 5")]
    ranks.log.clear()
    payload = Payload("", (torch.tensor([1.0], dtype=torch.float64),), (False,))
    posted = []

    def post(peer, message, signature):
        posted.append(peer)
        return SimpleNamespace(wait=lambda: payload)

    world._near.post = post
    assert world.hear(0, 1)().tolist() == [1.0]
    assert posted == [0]
    assert ranks.log == ["waits for rank 0"]
    # Shared memory puts what arrives on the device of the rank; losses are read on the host.
    on_device = SimpleNamespace(cpu=lambda: "in host memory")
    payload = Payload("", (on_device,), (False,))
    assert world.hear(0, 1)() == "in host memory"


@pytest.mark.parametrize("rank", [0, 1])
def test_tensors_are_gathered_by_rank_0_in_the_order_of_the_ranks(ranks, rank):
    """A rank may have none; what rank 0 has itself is copied, as it goes on."""
    world = ranks.world(rank=rank)
    forms = {2: [TensorForm((2,), "float32", False)], 1: [TensorForm((1,), "int64", False)] * 2}
    mine = [torch.ones(3, requires_grad=True), torch.arange(6).reshape(2, 3).t()]
    gathered = world.gather({rank: mine}, forms)
    if rank == 1:
        assert gathered == {}
        sends = [entry for entry in ranks.log if entry[0] == "isend"]
        assert [entry[1:4] for entry in sends] == [(4, "shared", 0)] * 2
        assert sends[1][4] == mine[1].tolist()
        assert ranks.log.count("waits for rank 0") == 2
        return
    assert list(gathered) == [0, 1, 2]
    assert [tensor.tolist() for tensor in gathered[0]] == [tensor.tolist() for tensor in mine]
    assert gathered[0][0].data_ptr() != mine[0].data_ptr()
    assert not gathered[0][0].requires_grad
    assert [(tensor.dtype, len(tensor)) for tensor in gathered[1]] == [(torch.int64, 1)] * 2
    assert [(tensor.dtype, len(tensor)) for tensor in gathered[2]] == [(torch.float32, 2)]
    receives = [entry[1:4] for entry in ranks.log if entry[0] == "irecv"]
    assert receives == [(6, "shared", 0), (6, "shared", 0), (5, "shared", 0)]


def test_lazily_conjugated_and_negated_tensors_are_sent_with_their_values(ranks, monkeypatch):
    """Their memory has others: a real one would arrive with the opposite sign."""
    numbers = torch.tensor([1 + 2j])
    values = [numbers.conj(), numbers.conj().imag]
    assert (values[0].is_conj(), values[1].is_neg()) == (True, True)
    sent = []

    def send(tensor, source, **_):
        assert not tensor.is_conj()
        assert not tensor.is_neg()
        sent.append(tensor.tolist())

    monkeypatch.setattr(module.dist, "broadcast", send)
    result = ranks.world().broadcast(values, 1)
    assert [value.tolist() for value in result] == [[1 - 2j], [-2.0]]
    assert sent[2:] == [[1 - 2j], [-2.0]]
    monkeypatch.setattr(module.dist, "isend", send)
    ranks.world().gather({1: values}, {})
    assert sent[4:] == [[1 - 2j], [-2.0]]


def test_a_value_is_broadcast_after_its_header_unless_its_form_is_known(ranks, monkeypatch):
    """The receiver must know shapes and nesting."""
    value = {"a": torch.arange(9.0).reshape(3, 3)[:, :2], "b": "text"}
    sent = []

    def send(tensor, source, **_):
        assert tensor.is_contiguous()
        sent.append((source, tensor.clone()))

    monkeypatch.setattr(module.dist, "broadcast", send)
    result = ranks.world().broadcast(value, 1)
    assert torch.equal(result["a"], value["a"])
    assert result["b"] == "text"
    assert {source for source, _ in sent} == {6}
    length, header, content = (tensor for _, tensor in sent)
    assert int(length) == len(header)
    assert content.numel() == 6
    queue = [length, header, content]

    def receive(tensor, source, **_):
        assert source == 6
        tensor.copy_(queue.pop(0))

    monkeypatch.setattr(module.dist, "broadcast", receive)
    received = ranks.world(rank=2).broadcast("of no account here", 1)
    assert torch.equal(received["a"], value["a"])
    assert received["a"].stride() == value["a"].stride()
    assert received["b"] == "text"
    queue[:] = [torch.tensor([3.0, 4.0])]
    form = TensorForm((2,), "float32", False)
    assert ranks.world(rank=2).broadcast(None, 1, form).tolist() == [3.0, 4.0]


def run_failing(world, error):
    """Run a job that raises; return what is raised instead."""

    def job(_):
        raise error

    try:
        return world.run(job)
    except BaseException as raised:
        return raised


def test_a_job_that_succeeds_returns_its_value(ranks):
    """By the one rank of this process."""
    assert ranks.world().run(lambda rank: rank * 10) == {1: 10}
    assert ranks.log == []


@pytest.mark.parametrize(
    ("error", "compares"),
    [
        (ValueError("x"), False),
        (KeyboardInterrupt(), False),
        (StageFailed(1, 1, "1F0", 3, "x"), True),
        (DeadlineExceeded(1, "rank 0", 5.0, []), True),
    ],
)
def test_a_job_that_fails_stops_all_ranks_and_raises_its_error(ranks, error, compares):
    """Where the reason may be that ranks call different methods, their calls are compared before."""
    assert run_failing(ranks.world(), error) is error
    fail = ("fail", module.reason_of(error, 1), False)
    log = [fail, "abort near", "abort wire"]
    assert ranks.log == ([("compare", 1.2)] if compares else []) + log


def test_different_calls_are_the_reason_of_whatever_failed(ranks):
    """The error that followed from them is its cause."""
    world, error = ranks.world(), ValueError("x")
    world._board.difference = "other calls"
    raised = run_failing(world, error)
    assert type(raised) is RanksDiffer
    assert raised.__cause__ is error
    world = ranks.world()
    world._overdue = "1F0"
    raised = run_failing(world, error)
    assert (type(raised), raised.waited_for) == (DeadlineExceeded, "1F0")
    assert run_failing(ranks.world(), RanksDiffer("these")).args == ("these",)
    assert ranks.log[-3] == ("fail", "these", True)


@pytest.mark.parametrize("reason", [None, "rank 0 failed"])
def test_a_lost_link_within_a_job_is_the_failure_of_another_rank(ranks, reason):
    """Its reason may come a little later than the loss."""
    world = ranks.world()
    world._board.reason = reason
    raised = run_failing(world, TransportLost("x"))
    assert type(raised) is PeerFailed
    assert raised.reason == (reason or "a rank has ended without a message")
    assert raised.waited_for == "its message to leave"
    assert ranks.log[0] == ("failure", 2.0)


@pytest.mark.parametrize("reason", [None, "rank 0 failed"])
def test_a_run_that_was_stopped_begins_no_other_job(ranks, reason):
    """Under NCCL what was received since is garbage, also within a job that has just ended."""
    world, calls = ranks.world(receives_on_device=True), []
    world._board.reason = reason
    world._wire.lost = True
    with pytest.raises(PeerFailed) as raised:
        world.run(calls.append)
    assert raised.value.reason == (reason or "an earlier failure closed its links")
    assert raised.value.waited_for == "a new batch"
    assert calls == []

    def lose(world):
        def job(_):
            world._wire.lost = True

        return job

    world = ranks.world(receives_on_device=True)
    with pytest.raises(PeerFailed):
        world.run(lose(world))
    world = ranks.world(receives_on_device=False)
    assert world.run(lose(world)) == {1: None}
    world._overdue = "1F0"
    with pytest.raises(DeadlineExceeded):
        world.run(calls.append)
    world._board.difference = "other calls"
    with pytest.raises(RanksDiffer):
        world.run(calls.append)


def test_waits_are_on_the_board_and_their_errors_name_what_was_waited_for(ranks):
    """Nothing is waited for where torch has nothing to do."""
    world = ranks.world()
    world.wait_for(None, "nothing")
    assert ranks.log == []
    world.wait_for("work", "the others")
    assert ranks.log == ["waits for the others", ("wait", "work")]
    for error, kind in (
        (TransportTimeout("x"), DeadlineExceeded),
        (TransportLost("x"), PeerFailed),
    ):

        def fail(work, error=error):
            raise error

        world._wire.wait = fail
        with pytest.raises(kind) as raised:
            world.wait_for("work", "the others")
        assert (raised.value.rank, raised.value.waited_for) == (1, "the others")
    assert world._wire.deadline_s == 7.0


def test_a_device_that_waits_too_long_ends_the_run_with_what_it_waits_for(ranks):
    """The board's thread asks twice a second; after the end of the run there is nothing to say."""
    world = ranks.world()
    assert world._late() is None
    assert world._overdue is None
    world._wire.late = lambda: "1F3 from rank 0 to rank 1"
    text = world._late()
    assert text.startswith("rank 1 has waited 7 s for 1F3 from rank 0 to rank 1, past its deadline")
    assert text.endswith("rank 0 is at 0F1 since 5 s")
    assert world._overdue == "1F3 from rank 0 to rank 1"
    world = ranks.world()
    world._wire.late = lambda: "1F3"
    world._wire.lost = True
    assert world._late() is None
    assert world._overdue is None


def test_a_closed_world_tells_it_and_closes_board_and_links(ranks, monkeypatch):
    """Other ranks that call something else learn it; at exit there is nothing left to close."""
    world = ranks.world()
    log = ranks.log
    monkeypatch.setattr(module.atexit, "unregister", lambda call: log.append(call.__name__))
    world.calls = SimpleNamespace(enter=log.append)
    world._board.close = lambda: log.append("board")
    world._near.close = lambda: log.append("near")
    world.close()
    assert log == ["close", "close()", "board", "near"]


def test_clocks_are_measured_when_a_timeline_is_asked_for(ranks):
    """By all ranks, within a job."""
    world = ranks.world()
    world._clocks = SimpleNamespace(
        measure=lambda: ranks.log.append("measure"), to_first="to first"
    )
    assert world.to_first_clock() == "to first"
    assert ranks.log == ["measure"]


def test_numbers_that_are_told_have_a_name_that_no_message_of_a_schedule_has():
    """Shared memory matches messages by name; a stage has 20 bits of it."""
    message = module._TELL_MESSAGE
    assert 1 << 10 <= message.stage < 1 << 20
    names = {
        same_host._name(Message(kind, stage, number))
        for kind in Kind
        for stage in range(20)
        for number in range(20)
    }
    assert len(names) == len(Kind) * 400
    assert same_host._name(message) not in names
