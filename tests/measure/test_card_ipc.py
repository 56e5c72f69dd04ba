"""Memory that another process reads. Shared host memory stands for a card's: handles of both are
opened by torch's own methods.
"""

from __future__ import annotations

import pytest
import torch

from penstock.measure.card_ipc import sum_in_another_process


def test_another_process_reads_exported_memory():
    """Its sum is that of the values here, not of a copy's zeros."""
    storage = torch.arange(64, dtype=torch.float32).untyped_storage()
    handle = storage._share_filename_cpu_()
    assert sum_in_another_process("_new_shared_filename_cpu", handle) == 64 * 63 / 2


def test_what_the_other_process_raises_is_raised_here():
    """In its words: what a driver says to a handle is what `penstock doctor` has to report."""
    with pytest.raises(RuntimeError, match="no_such_memory"):
        sum_in_another_process("_new_shared_filename_cpu", (b"", b"/no_such_memory", 256))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_a_handle_of_cuda_memory_is_refused_in_words():
    """No traceback, and no wait for the deadline."""
    with pytest.raises(RuntimeError, match=r"^(RuntimeError|AssertionError): .*(CUDA|NVIDIA)"):
        sum_in_another_process("_new_shared_cuda", (0, b"", 256, 0, b"", 0, b"", False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_another_process_reads_memory_of_a_card():
    """CUDA IPC, between two processes on one card."""
    storage = torch.arange(64, dtype=torch.float32, device="cuda").untyped_storage()
    assert sum_in_another_process("_new_shared_cuda", storage._share_cuda_()) == 64 * 63 / 2
