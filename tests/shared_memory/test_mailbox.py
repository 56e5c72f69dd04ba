"""Mailboxes: both sides in one process."""

from __future__ import annotations

import os

import pytest

from penstock.shared_memory.mailbox import Mailbox


def test_a_sender_identifies_a_mailbox_by_its_nonce(mailboxes):
    """No two mailboxes have the same nonce."""
    owned, opened = mailboxes
    assert owned.nonce == opened.nonce
    assert len(owned.nonce) == 32
    another = Mailbox.make(3)
    assert another.nonce != owned.nonce
    another.segment.close()


def test_the_nonce_has_all_of_its_128_random_bits(monkeypatch):
    """In 32 digits, of which the first ones may be zeros."""
    values = [(0xAB).to_bytes(8, "little"), (0xCD).to_bytes(8, "little")]
    monkeypatch.setattr(os, "urandom", lambda count: values.pop(0))
    mailbox = Mailbox.make(1)
    assert mailbox.nonce == f"{0xAB:016x}{0xCD:016x}"
    mailbox.segment.close()


def test_every_sender_has_a_line_of_its_own(mailboxes):
    """A line holds the place of the first block and the notifier."""
    owned, opened = mailboxes
    for source in range(3):
        opened.set_first_block(source, 1000 + source)
        opened.notifier(source).arm()
    assert [owned.first_block(source) for source in range(3)] == [1000, 1001, 1002]
    opened.notifier(1).notify()
    assert [owned._words[8 * (source + 1)] for source in range(3)] == [1, 0, 1]
    assert not owned.stopped
    assert not opened.closed
    owned.close()
    assert opened.closed


def test_stopping_the_run_wakes_all_waits(mailboxes):
    """On every line."""
    owned, opened = mailboxes
    notifiers = [owned.notifier(source) for source in range(3)]
    for notifier in notifiers:
        notifier.arm()
    opened.stop()
    for notifier in notifiers:
        notifier.sleep(3600.0)
    assert owned.stopped


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_mailbox_has_a_line_for_every_rank_and_one_for_itself(size):
    """A rank more would write beyond the end."""
    mailbox = Mailbox.make(size)
    assert len(mailbox.segment.memory) == 64 * (size + 1)
    assert mailbox.first_block(size - 1) == 0
    mailbox.set_first_block(size - 1, 2**45)
    assert mailbox.first_block(size - 1) == 2**45
    assert not mailbox.stopped
    assert not mailbox.closed
    nonce = mailbox.nonce
    mailbox.stop()
    mailbox.close()
    assert mailbox.stopped
    assert mailbox.closed
    assert mailbox.nonce == nonce
    mailbox.segment.close()


def test_flags_do_not_depend_on_each_other(mailboxes):
    """A rank that has closed at its end has not stopped the run."""
    owned, opened = mailboxes
    owned.close()
    assert (opened.closed, opened.stopped) == (True, False)
    assert not any(owned.first_block(source) for source in range(3))
    other = Mailbox.make(1)
    other.stop()
    assert (other.closed, other.stopped) == (False, True)
    other.segment.close()
