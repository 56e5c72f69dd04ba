"""Segments of memory that two processes share; here one process opens its own."""

from __future__ import annotations

import os

import pytest
import torch

from penstock.shared_memory.segment import Segment


def test_what_one_writes_the_other_reads():
    """The same memory, opened by its number in another process's table of files; this one's own
    here.
    """
    mine = Segment.make(4096)
    other = Segment.open(os.getpid(), mine.fd)
    mine.words[8] = 2**63
    mine.bytes[100:104].view(torch.float32).fill_(2.5)
    assert other.words[8] == 2**63
    assert other.bytes[100:104].view(torch.float32).item() == 2.5
    assert not mine.opened
    other.words[0] = 1
    assert mine.opened
    mine.close()
    mine.close()  # twice is once
    assert other.words[8] == 2**63


def test_memory_that_is_closed_cannot_be_opened_any_more():
    """Nor that of a process that is gone."""
    mine = Segment.make(4096)
    fd = mine.fd
    mine.close()
    with pytest.raises(OSError, match="No such file"):
        Segment.open(os.getpid(), fd)
