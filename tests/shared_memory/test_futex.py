"""Notifiers: a receiver that sleeps, and a sender that wakes it, both in one process."""

from __future__ import annotations

import threading

import pytest

from penstock.shared_memory.futex import _Timespec


def test_a_sleeping_receiver_is_woken(mailboxes):
    """It would sleep for an hour if it were not notified."""
    owned, opened = mailboxes
    notifier = owned.notifier(0)
    notifier.arm()
    thread = threading.Thread(target=notifier.sleep, args=(3600.0,))
    thread.start()
    while thread.is_alive():
        opened.notifier(0).arm()  # whether the thread sleeps already or not
        opened.notifier(0).notify()
    assert owned._words[8] == 0


def test_a_receiver_notified_before_it_sleeps_does_not_sleep(mailboxes):
    """It has armed its notifier and found no message; then the message arrives."""
    owned, opened = mailboxes
    notifier = owned.notifier(2)
    notifier.arm()
    opened.notifier(2).notify()
    notifier.sleep(3600.0)
    notifier.arm()
    notifier.disarm()
    notifier.sleep(3600.0)


def test_a_receiver_wakes_when_its_time_is_over(mailboxes):
    """Otherwise the end of a peer would go unnoticed."""
    notifier = mailboxes[0].notifier(0)
    notifier.arm()
    notifier.sleep(0.001)
    assert mailboxes[0]._words[8] == 1


class Recorder:
    """Stands for the words of a segment and for the lock of a fence; records their order."""

    def __init__(self) -> None:
        self.steps = []

    def __getitem__(self, index):
        """Read a word."""
        self.steps.append("read")
        return 0

    def __setitem__(self, index, value):
        """Write a word."""
        self.steps.append("write")

    def acquire(self):
        """Begin the fence."""
        self.steps.append("fence")

    def release(self):
        """End the fence."""


def test_a_fence_stands_between_the_write_of_a_side_and_its_read(mailboxes):
    """x86 may perform a read before an earlier write is visible: a wake-up would be lost, rarely."""
    notifier, recorder = mailboxes[0].notifier(0), Recorder()
    notifier._words = notifier._lock = recorder
    notifier.notify()  # the message was written before
    assert recorder.steps == ["fence", "read"]
    recorder.steps.clear()
    notifier.arm()  # the queue is read after
    assert recorder.steps == ["write", "fence"]


@pytest.mark.parametrize(
    ("seconds", "parts"),
    [(0.0, (0, 0)), (0.05, (0, 50_000_000)), (2.25, (2, 250_000_000)), (3600.0, (3600, 0))],
)
def test_the_kernel_gets_whole_seconds_and_the_nanoseconds_beside_them(mailboxes, seconds, parts):
    """More than a second of nanoseconds is an error, after which the receiver would not sleep."""
    calls = []

    def record(number, address, operation, value, timeout):
        calls.append((number, operation, value, _Timespec.from_address(timeout)))
        return 0

    notifier = mailboxes[0].notifier(1)
    notifier._syscall = record
    notifier.sleep(seconds)
    ((number, operation, value, timeout),) = calls
    assert (number, operation, value) == (202, 0, 1)
    assert (timeout.seconds, timeout.nanoseconds) == parts


def test_only_one_waits_so_that_only_one_is_woken_and_only_once(mailboxes):
    """The word is cleared before the call: what the receiver arms afterwards counts."""
    owned, opened = mailboxes
    calls = []
    sender = opened.notifier(1)
    sender._syscall = lambda *words: calls.append((words, owned._words[16]))
    sender.notify()
    assert calls == []
    owned.notifier(1).arm()
    assert owned._words[16] == 1
    sender.notify()
    sender.notify()
    ((words, state),) = calls
    assert (words[0], words[2], words[3], words[4], state) == (202, 1, 1, None, 0)
    assert words[1] == opened.segment.bytes.data_ptr() + 8 * 16
