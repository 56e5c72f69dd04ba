"""Peak memory of a rank's device, as torch's allocator counts it."""

from __future__ import annotations

import torch


def device_peaks(device: torch.device) -> tuple[int, int]:
    """Return the peak bytes that were allocated and reserved on a GPU; zeros elsewhere.

    The peaks are not reset: they belong to the process, whose caller may count, too. Not yet run on
    a GPU.
    """
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
