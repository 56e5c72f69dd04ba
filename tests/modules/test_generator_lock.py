"""The lock of the random generators: exclusive, re-entrant, and open to device threads only while
its owner waits for them.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from tests.time_limits import HANG_S

from penstock.modules.generator_lock import GeneratorLock


class Visitor(threading.Thread):
    """A thread that holds the lock once."""

    def __init__(self, lock, *, passes):
        super().__init__(daemon=True)
        self.lock, self.passes = lock, passes
        self.inside, self.leave = threading.Event(), threading.Event()
        self.start()

    def run(self):
        """Hold it until told to leave."""
        with self.lock.held(passes=self.passes):
            self.inside.set()
            self.leave.wait(HANG_S)

    def end(self):
        """Let it go, and wait for its end."""
        self.leave.set()
        self.join(HANG_S)
        assert not self.is_alive()


def test_a_thread_may_hold_it_again():
    """A layer that draws may call another one."""
    lock = GeneratorLock()
    with lock.held():
        with lock.held():
            pass
        visitor = Visitor(lock, passes=False)
        assert not visitor.inside.wait(0.05), "the outer block still holds it"
    assert visitor.inside.wait(HANG_S)
    visitor.end()


@pytest.mark.parametrize("passes", [False, True])
def test_threads_wait_for_the_owner(passes):
    """A device thread, too: the owner may be a forward, which draws meanwhile."""
    lock = GeneratorLock()
    with lock.held():
        visitor = Visitor(lock, passes=passes)
        assert not visitor.inside.wait(0.05)
    assert visitor.inside.wait(HANG_S)
    visitor.end()


def test_device_threads_pass_while_the_owner_waits_for_them():
    """Else both would wait for each other; other threads stay outside."""
    lock = GeneratorLock()
    with lock.held():
        early = Visitor(lock, passes=True)
        with lock.opened():
            assert early.inside.wait(HANG_S)
            late, other = Visitor(lock, passes=True), Visitor(lock, passes=False)
            assert late.inside.wait(HANG_S)
            assert not other.inside.wait(0.05)
            early.end()
            late.end()
    assert other.inside.wait(HANG_S)
    other.end()


def test_the_lock_stays_open_until_the_outermost_block_ends():
    """A backward may run another one, and go on to wait for the device threads afterwards."""
    lock = GeneratorLock()
    with lock.held():
        with lock.opened():
            with lock.opened():
                pass
            visitor = Visitor(lock, passes=True)
            assert visitor.inside.wait(HANG_S)
            visitor.end()
        visitor = Visitor(lock, passes=True)
        assert not visitor.inside.wait(0.05)
    assert visitor.inside.wait(HANG_S)
    visitor.end()


def test_the_owner_does_not_go_on_while_a_device_thread_passes():
    """Its seeds would be lost when that thread restores the states."""
    lock, closed = GeneratorLock(), threading.Event()

    def open_and_close(visitors):
        """Open the lock, and close it while a thread passes."""
        with lock.held():
            with lock.opened():
                visitor = Visitor(lock, passes=True)
                assert visitor.inside.wait(HANG_S)
                visitors.put(visitor)
            closed.set()

    visitors = SimpleQueue()
    owner = threading.Thread(target=open_and_close, args=(visitors,), daemon=True)
    owner.start()
    visitor = visitors.get(timeout=HANG_S)
    assert not closed.wait(0.05)
    visitor.end()
    assert closed.wait(HANG_S)
    owner.join(HANG_S)
