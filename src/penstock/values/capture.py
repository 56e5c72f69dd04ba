"""Capture of a device's ops as a graph, during which the host may not read or query anything."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether ops on a device are being captured as a CUDA graph. Not yet run on a GPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
