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


@pytest.mark.parametrize("nbytes", [64, 4096, 100_000])
def test_a_new_segment_has_exactly_its_bytes_and_all_are_zero(nbytes):
    """Numbers of entries begin at 1, and flags at 0."""
    segment = Segment.make(nbytes)
    other = Segment.open(os.getpid(), segment.fd)
    for side in (segment, other):
        assert len(side.memory) == side.bytes.numel() == 8 * len(side.words) == nbytes // 8 * 8
        assert not side.bytes.any()
    segment.close()


def test_the_reader_of_a_segment_owns_no_descriptor():
    """Closing it must not close a file of the same number in this process."""
    segment = Segment.make(4096)
    other = Segment.open(os.getpid(), segment.fd)
    assert other.fd == -1
    other.close()
    os.fstat(segment.fd)
    segment.close()
    assert segment.fd == -1


def test_a_segment_that_was_made_in_inference_mode_can_be_written_outside():
    """Evaluation may come before training."""
    with torch.inference_mode():
        segment = Segment.make(4096)
        other = Segment.open(os.getpid(), segment.fd)
    for side in (segment, other):
        assert not side.bytes.is_inference()
        side.bytes[200] = 7
    segment.close()


def test_a_segment_is_not_inherited_by_other_programs():
    """Its memory would stay as long as they run."""
    segment = Segment.make(4096)
    assert not os.get_inheritable(segment.fd)
    segment.close()


@pytest.mark.parametrize("fails", ["posix_fallocate", "fstat"])
def test_a_segment_that_cannot_be_made_or_opened_leaves_no_descriptor(monkeypatch, fails):
    """Memory may be short for a while, and the run goes on."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    segment = Segment.make(4096)
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    monkeypatch.setattr(os, fails, refuse)
    with pytest.raises(OSError, match="No space left"):
        Segment.make(4096) if fails == "posix_fallocate" else Segment.open(os.getpid(), segment.fd)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    segment.close()
