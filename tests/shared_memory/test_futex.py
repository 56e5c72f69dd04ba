"""Notifiers: a receiver that sleeps, and a sender that wakes it, both in one process."""

from __future__ import annotations

import os
import threading

import pytest

from penstock.shared_memory.mailbox import Mailbox


@pytest.fixture
def mailboxes():
    """A mailbox for three ranks, as its owner has it and as a sender opens it."""
    owned = Mailbox.make(3)
    yield owned, Mailbox.open(os.getpid(), owned.segment.fd)
    owned.segment.close()


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
