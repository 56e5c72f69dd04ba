"""Peaks of a device, with torch's counters replaced."""

from __future__ import annotations

import torch

from penstock.ranks.device_memory import device_peaks


def test_peaks_are_those_of_the_device_in_order(monkeypatch):
    """First what was allocated, then what was reserved; the CPU has none."""
    device = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda of: 3 if of == device else 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda of: 5 if of == device else 0)
    assert device_peaks(device) == (3, 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", None)
    assert device_peaks(torch.device("cpu")) == (0, 0)
