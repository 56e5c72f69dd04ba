"""Ranks that measure together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import RunError


def test_all_ranks_get_one_profile_of_all_layers():
    """Plans are made on every rank, and must be the same."""

    def measured():
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        return ps.profile(
            layers, torch.ones(8, 16), sizes=(2, 8), repeats=1, threads=1, together=True
        )

    first, second = ps.launch(measured, 2, threads=1)
    assert first == second
    assert first.machine["ranks"] == "2"
    assert [layer.output_bytes_per_sample for layer in first] == [64] * 6
    assert all(layer.seconds("forward", 4) > 0 for layer in first)


def test_a_process_that_is_alone_is_told_how_to_have_company():
    """It would wait for others for ever."""
    with pytest.raises(RunError, match=r"^this process is alone: start it with torchrun"):
        ps.profile(nn.Sequential(nn.Linear(2, 2)), torch.ones(2, 2), together=True)
