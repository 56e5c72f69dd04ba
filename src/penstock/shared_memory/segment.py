"""A segment of memory that two processes of one host share.

Segments are made with `memfd_create`: they have no name in /dev/shm (which containers keep small),
and they disappear with the last process that maps them, however it ends. Memory is reserved when a
segment is made, so that a shortage is an error there and not a signal (SIGBUS) at the first access.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

#: Bytes of a cache line: also the alignment of torch's own tensors.
LINE = 64


class Segment:
    """A segment of shared memory, as a tensor of bytes and as 8-byte words. Its first line is its
    head.

    The receiver sets the head's first word once it has opened the segment: until then the sender
    must live, since a file descriptor of a dead process cannot be opened.
    """

    __slots__ = ("bytes", "fd", "memory", "words")

    def __init__(self, fd: int, nbytes: int, owned: bool) -> None:
        self.fd = fd if owned else -1
        # MAP_POPULATE: page faults would otherwise delay the first message in every page.
        self.memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.words = memoryview(self.memory).cast("Q")
        # An inference tensor could not be written to outside inference mode.
        with torch.inference_mode(mode=False):
            self.bytes: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """Create a segment of `nbytes` zero bytes.

        Raises:
            OSError: there is not enough memory, or the system has no `memfd_create`.
        """
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
        try:
            # Reserves the memory now: without it, a write to a full tmpfs would end the process by
            # SIGBUS.
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes, owned=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, pid: int, fd: int) -> Segment:
        """Open the segment that process `pid` has made as its file descriptor `fd`.

        Raises:
            OSError: the process has ended, or its memory may not be opened.
        """
        descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, os.fstat(descriptor).st_size, owned=False)
        finally:
            os.close(descriptor)

    @property
    def opened(self) -> bool:
        """Whether the receiver has opened the segment."""
        return self.words[0] != 0

    def close(self) -> None:
        """Close the segment to new readers. Its memory is freed when no process maps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
