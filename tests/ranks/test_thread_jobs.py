"""Jobs of ranks that are threads, without a pipeline: results, failures, deadlines and copies."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from tests.time_limits import HANG_S

from penstock.errors import DeadlineExceeded, PeerFailed, RunError
from penstock.ranks import thread_world as module
from penstock.ranks.thread_world import ThreadWorld
from penstock.transport.in_process import MemoryTransport
from penstock.transport.transport import TransportLost

CPU = torch.device("cpu")


@pytest.fixture
def world():
    """Three ranks, whose threads end with the test."""
    world = ThreadWorld(3, CPU, 30.0)
    yield world
    world.close()


def test_every_rank_runs_its_job_in_the_same_thread_each_time(world):
    """Thread-local states of torch and CUDA stay with the rank."""
    names = [world.run(lambda rank: (rank, threading.current_thread().name)) for _ in range(2)]
    assert names == [{rank: (rank, f"penstock-rank-{rank}") for rank in range(3)}] * 2
    caller = threading.current_thread().name
    assert ThreadWorld(1, CPU, 30.0).run(lambda rank: threading.current_thread().name) == {
        0: caller
    }


def test_ranks_compute_in_the_autocast_and_with_the_threads_of_the_caller(world):
    """Both are thread-local, and results would differ."""

    def state(rank):
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_num_threads(),
        )

    threads = torch.get_num_threads()
    for enabled, dtype in ((True, torch.float16), (False, torch.bfloat16), (True, torch.bfloat16)):
        with torch.autocast("cpu", enabled=enabled, dtype=dtype):
            states = world.run(state)
            expected = enabled, torch.get_autocast_dtype("cpu"), threads
        assert set(states.values()) == {expected}


def test_a_world_of_threads_has_all_ranks_and_nothing_between_processes(world):
    """What is for processes alone does nothing."""
    assert (world.size, world.local_ranks) == (3, (0, 1, 2))
    assert (world.receives_on_device, world.collectives, world.has_replica_collectives) == (
        False,
        None,
        False,
    )
    assert world.device(2) is CPU
    transports = [world.transport(rank) for rank in range(3)]
    assert transports == [MemoryTransport(rank, world._exchange, 30.0) for rank in range(3)]
    assert world.open_segment([0, 1]) is None
    assert world.replica_collectives(0) is None
    assert world.buffer_bytes(1) == 0
    assert world.to_first_clock()(2.5) == 2.5
    value = [torch.ones(1)]
    assert world.broadcast(value, 1) is value
    world.tell(torch.ones(1))
    world.barrier()
    world.abandon(ValueError())
    assert world.run(lambda rank: rank) == {0: 0, 1: 1, 2: 2}


def test_gathered_tensors_are_copies_without_a_graph(world):
    """Ranks go on and change theirs while a checkpoint is written."""
    mine = torch.ones(2, requires_grad=True)
    gathered = world.gather({0: [mine], 2: [mine * 2, mine]}, {})
    assert [len(tensors) for tensors in gathered.values()] == [1, 2]
    assert list(gathered) == [0, 2]
    with torch.no_grad():
        mine.zero_()
    assert [tensor.tolist() for tensor in gathered[2]] == [[2.0, 2.0], [1.0, 1.0]]
    assert not any(tensor.requires_grad for tensors in gathered.values() for tensor in tensors)


def failing_first(world, error, others):
    """Let rank 0 fail, and the other ranks raise what they are given once they notice it."""

    def job(rank):
        if rank == 0:
            raise error
        try:
            world.transport(rank).post(0, ("F", 0, 0), "").wait()
        except TransportLost as lost:
            raise others from lost

    return job


def test_the_error_of_the_rank_that_failed_is_raised_and_not_what_followed(world):
    """Also if its own error is one that follows from another rank: then the first one counts."""
    with pytest.raises(KeyError, match="cause"):
        world.run(failing_first(world, KeyError("cause"), PeerFailed(1, "x", "y")))
    with pytest.raises(PeerFailed, match="first"):
        world.run(failing_first(world, PeerFailed(0, "x", "first"), PeerFailed(1, "x", "second")))
    with pytest.raises(ValueError, match="other"):
        world.run(failing_first(world, PeerFailed(0, "x", "first"), ValueError("other")))
    assert world.run(lambda rank: rank) == {0: 0, 1: 1, 2: 2}


def test_a_run_begins_with_an_empty_board_and_exchange(world):
    """What a failed run has left must not stop the next one."""
    with pytest.raises(ValueError, match="x"):
        world.run(failing_first(world, ValueError("x"), PeerFailed(1, "x", "y")))

    def look(rank):
        return world.board(rank).failure(), world.board(rank).describe_others()[0][:20]

    assert {failure for failure, _ in world.run(look).values()} == {None}
    assert world._exchange._closed is None
    assert world.board(0).failure() is None


def test_a_rank_that_makes_no_progress_is_named_after_the_deadline(monkeypatch):
    """A tenth and half a second later than the transports, which know more."""
    world, waits = ThreadWorld(2, CPU, 10.0), []

    def wait(futures, seconds, *options):
        waits.append(round(seconds, 6))
        return SimpleNamespace(not_done=[1])

    ages = iter([(1, "is at 1F0", 4.0), (0, "is at 0F1", 11.5)])
    monkeypatch.setattr(world._board, "latest", lambda: next(ages))
    monkeypatch.setattr(module, "wait", wait)
    with pytest.raises(DeadlineExceeded) as raised:
        world._watch([SimpleNamespace(done=lambda: False)] * 2)
    assert waits == [11.5, 7.5]
    assert (raised.value.rank, raised.value.seconds) == (0, 11.5)
    assert raised.value.waited_for == "an end to where it is at 0F1"
    assert raised.value.other_ranks == ("rank 1 has not begun since 0 s",)


def test_an_interrupt_comes_before_the_errors_that_it_causes(monkeypatch):
    """The caller must see KeyboardInterrupt, and not the message of a rank that was stopped."""
    world = ThreadWorld(2, CPU, 30.0)
    begun, wait, stop = threading.Barrier(3), module.wait, world._stop
    stopped = threading.Semaphore(0)

    def interrupted(*given):
        monkeypatch.setattr(module, "wait", wait)
        begun.wait(HANG_S)
        raise KeyboardInterrupt

    def stop_and_wait(reason):
        stop(reason)
        if threading.current_thread().name.startswith("penstock-rank"):
            stopped.release()
            return
        for _ in range(2):  # until both ranks have failed
            assert stopped.acquire(timeout=HANG_S)

    monkeypatch.setattr(module, "wait", interrupted)
    monkeypatch.setattr(world, "_stop", stop_and_wait)

    def job(rank):
        begun.wait(HANG_S)
        try:
            world.transport(rank).post(1 - rank, ("F", 0, 0), "").wait()
        except TransportLost as error:
            raise ValueError(str(error)) from error

    with pytest.raises(KeyboardInterrupt):
        world.run(job)
    monkeypatch.undo()
    assert world.run(lambda rank: rank) == {0: 0, 1: 1}
    world.close()


def test_a_rank_that_stays_after_a_failure_makes_the_world_unusable(monkeypatch):
    """Its thread may go on at any time, and would take part in the next batch."""
    monkeypatch.setattr(module, "_GRACE_S", 0.01)
    world, release = ThreadWorld(2, CPU, 30.0), threading.Event()

    def job(rank):
        if rank == 1:
            world.board(1).doing("is at 1F7")
            release.wait(HANG_S)
            return
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        world.run(job)
    with pytest.raises(RunError, match=r"failed: rank 1 is at 1F7 since 0 s\. Make a new Pipeline"):
        world.run(lambda rank: rank)
    release.set()
    world.close()


def test_a_closed_world_starts_threads_again(world):
    """close() frees them, no more."""
    first = world.run(lambda rank: threading.current_thread())
    world.close()
    for thread in first.values():
        thread.join(HANG_S)
        assert not thread.is_alive()
    second = world.run(lambda rank: threading.current_thread())
    assert not set(first.values()) & set(second.values())


def test_a_second_interrupt_makes_the_world_unusable(monkeypatch):
    """Ranks may still run the failed batch, in the exchange that the next one would use."""
    world, running = ThreadWorld(2, CPU, 30.0), threading.Event()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.run(lambda rank: running.wait(HANG_S))
    monkeypatch.undo()
    try:
        with pytest.raises(RunError, match="cannot go on after a batch that failed"):
            world.run(lambda rank: rank)
    finally:
        running.set()
        world.close()
