"""A Pipeline in processes and its devices: one line of the log for each rank, and one refusal for
all.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import SettingError
from penstock.ranks.processes.launch import launch

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a card here"),
    pytest.mark.usefixtures("functions_by_value"),
]


class Lines(logging.Handler):
    """The log's lines."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        """Keep the line with its level."""
        self.lines.append((record.levelname, record.getMessage()))


def pipeline(device):
    """A pipeline of two ranks."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return ps.Pipeline(
        layers, loss=functional.mse_loss, balance=[1, 1], micro_batches=2, device=device
    )


def on_a_rank(device):
    """What the log says of a rank that makes a pipeline and trains one batch; or the refusal."""
    log, handler = logging.getLogger("penstock"), Lines()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        pipe = pipeline(device)
    except SettingError as error:
        return str(error)
    pipe.train_batch(torch.ones(4, 4), torch.ones(4, 2))
    return [line for line in handler.lines if "computes on" in line[1]]


@pytest.mark.parametrize(
    ("device", "reason"),
    [(None, "no accelerator is visible"), ("cpu", "as device='cpu' asks")],
)
def test_every_rank_logs_its_device_and_transport_once(device, reason):
    """Who wonders why a run is slow reads there that it was on the CPU, and why."""
    for rank, lines in enumerate(launch(on_a_rank, 2, device, threads=1)):
        expected = f"rank {rank} computes on cpu, {reason}; messages through host memory"
        assert lines == [("INFO", expected)]


def test_a_card_that_no_rank_sees_is_refused_in_the_same_words_on_all():
    """Never the CPU instead of what was asked for."""
    first, second = launch(on_a_rank, 2, "cuda", threads=1)
    assert first == second
    assert first.startswith("ranks 0, 1 on ")
    assert first.endswith("device='cuda' is requested, and no cuda device is visible")
