"""Every op that ends the use of saved activations releases them from the meter of its rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock as ps


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "bpipe"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_after_a_batch_no_activation_is_held_and_every_batch_has_the_same_peak(schedule, recompute):
    """B, W and E release what F and L have saved: otherwise each batch would seem to need more."""
    stages = 4
    torch.manual_seed(0)
    pipe = ps.Pipeline(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages))),
        balance=(1,) * stages,
        schedule=schedule,
        micro_batches=8,
        loss=nn.functional.mse_loss,
        executor="threads",
        device="cpu",
        recompute=recompute,
    )
    x = torch.randn(16, 4)
    peaks = []
    for _ in range(4):  # the first batches measure, the others take the fast path
        pipe.train_batch(x, x)
        meters = [
            interpreter.activation_meter for interpreter in pipe._assembly.interpreters.values()
        ]
        assert [meter.now for meter in meters] == [0] * len(meters)
        peaks.append([meter.peak for meter in meters])
    assert peaks[2] == peaks[3]
    assert min(peaks[3]) > 0
