"""Checkpoints of several hosts: any cut, any order of the ranks, disks apart or shared.

Ranks are processes, hosts are names, and disks are folders that ranks make their working directory.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import penstock as ps

pytestmark = pytest.mark.usefixtures("functions_by_value")


def train(root, disks, balance, save):
    """Save after a step, or load, on the disk of this rank; return the next loss and the weights."""
    import os
    import socket

    import torch.distributed as dist

    from penstock.transport.process_group import join

    join()
    number = disks[dist.get_rank()]
    socket.gethostname = lambda: f"host{number}"
    disk = root / f"disk{number}"
    disk.mkdir(parents=True, exist_ok=True)
    os.chdir(disk)
    torch.manual_seed(0 if save else 5)
    pipe = ps.Pipeline(
        [nn.Linear(4, 4) for _ in range(6)],
        loss=nn.functional.mse_loss,
        balance=balance,
        schedule="1f1b",
        micro_batches=3,
        deadline_s=60,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    if save:
        pipe.train_batch(x, x)
        pipe.save("saved")
    else:
        pipe.load("saved")
    return float(pipe.train_batch(x, x)), pipe.state_dict()


@pytest.mark.parametrize(
    ("disks", "order", "balance"),
    [
        ((0, 1, 2), (2, 0, 1), (1, 4, 1)),
        ((0, 0, 1), (2, 1, 0), (4, 1, 1)),
        ((0, 0, 0), (1, 2, 0), (1, 1, 4)),
    ],
)
def test_what_three_hosts_save_is_loaded_under_another_cut_and_order(
    tmp_path, disks, order, balance
):
    """The next step is equal to the bit."""
    loss, weights = ps.launch(train, 3, tmp_path / "one", disks, (2, 2, 2), True, threads=1)[0]
    assert weights
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    new_disks = tuple(disks[rank] for rank in order)
    rows = ps.launch(train, 3, tmp_path / "two", new_disks, balance, False, threads=1)
    assert rows[0][0] == loss
    assert all(torch.equal(rows[0][1][name], tensor) for name, tensor in weights.items())
