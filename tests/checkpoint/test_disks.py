"""Which ranks share a disk; how files pass between hosts is in test_checkpoint_whole.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.checkpoint.disks import Disks, find_disks
from penstock.checkpoint.fetch import _Copy
from penstock.errors import FileError
from penstock.ranks.thread_world import ThreadWorld


def leaders_of(root, disks):
    """Return the leaders of the disks, as this rank finds them; the folder is relative."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2) for _ in disks]
    pipe = ps.Pipeline(
        nn.Sequential(*layers), loss=mse_loss, balance=[1] * len(disks), check_data=False
    )
    world = pipe._world
    disk = root / disks[world.local_ranks[0]]
    disk.mkdir(parents=True, exist_ok=True)
    os.chdir(disk)
    return find_disks(world, Path("folder")).leaders


@pytest.mark.parametrize(
    ("disks", "leaders"),
    [
        ("aaaa", (0, 0, 0, 0)),
        ("aabb", (0, 0, 2, 2)),
        ("abab", (0, 1, 0, 1)),
        ("abca", (0, 1, 2, 0)),
    ],
)
def test_ranks_find_those_that_see_the_same_folder(tmp_path, disks, leaders):
    """All ranks have one host here, so that its name cannot decide. No probe stays."""
    rows = ps.launch(leaders_of, 4, tmp_path, disks, threads=1)
    assert rows == [leaders] * 4
    assert list(tmp_path.glob("*/folder/.probe*")) == []
    assert Disks(leaders).shared == (set(leaders) == {0})


def test_ranks_of_one_process_see_one_disk_and_write_no_probe(tmp_path):
    """Threads."""
    world = ThreadWorld(3, torch.device("cpu"), 10.0)
    assert find_disks(world, tmp_path).shared
    assert list(tmp_path.iterdir()) == []
    world.close()


def test_an_error_while_a_file_is_copied_waits_for_the_end_and_is_told(tmp_path):
    """The other ranks are in the same broadcast."""
    missing = _Copy(tmp_path / "none", tmp_path / "none.partial", sends=True, receives=False)
    assert missing.read(0, 3).tolist() == [0, 0, 0]
    with pytest.raises(FileError, match=r"cannot copy .*none between hosts: No such file"):
        missing.finish()
    (tmp_path / "file").write_text("")
    blocked = _Copy(
        tmp_path / "file" / "x", tmp_path / "file" / "x.partial", sends=False, receives=True
    )
    blocked.begin()
    blocked.write(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(
        FileError, match=r"cannot copy .* between hosts: (File exists|Not a direct)"
    ):
        blocked.finish()
    good = _Copy(tmp_path / "x", tmp_path / "x.partial", sends=False, receives=True)
    good.begin()
    good.write(torch.tensor([1, 2], dtype=torch.uint8))
    good.write(torch.tensor([3], dtype=torch.uint8))
    good.finish()
    assert (tmp_path / "x").read_bytes() == b"\1\2\3"
