"""Notifiers: a receiver that sleeps, and a sender that wakes it, both in one process."""

from __future__ import annotations

import threading


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
