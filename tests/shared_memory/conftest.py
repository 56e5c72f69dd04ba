"""Shared memory between two sides in one process."""

from __future__ import annotations

import os

import pytest

from penstock.shared_memory.mailbox import Mailbox


@pytest.fixture
def mailboxes():
    """A mailbox for three ranks, as its owner has it and as a sender opens it."""
    owned = Mailbox.make(3)
    yield owned, Mailbox.open(os.getpid(), owned.segment.fd)
    owned.segment.close()
