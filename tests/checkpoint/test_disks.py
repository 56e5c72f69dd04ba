"""Which ranks share a disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.checkpoint.ranks_in_threads import in_ranks
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.checkpoint import disks as disks_module
from penstock.checkpoint.disks import Disks, find_disks
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


def test_processes_find_those_that_see_the_same_folder(tmp_path):
    """All have one host here, so that its name cannot decide."""
    assert ps.launch(leaders_of, 3, tmp_path, "aba", threads=1) == [(0, 1, 0)] * 3
    assert list(tmp_path.glob("*/folder/.probe*")) == []


@pytest.mark.parametrize(
    ("disks", "leaders"),
    [
        ("aaaa", (0, 0, 0, 0)),
        ("aabb", (0, 0, 2, 2)),
        ("abab", (0, 1, 0, 1)),
        ("abca", (0, 1, 2, 0)),
        ("abbbbbbbbbca", (0, *[1] * 9, 10, 0)),
        ("aabbbbbbbbbbbb", (0, 0, *[2] * 12)),
    ],
)
def test_the_lowest_rank_of_a_disk_leads_it(tmp_path, monkeypatch, disks, leaders):
    """By number, whatever probes a killed run has left; no probe of this one stays."""
    left = [tmp_path / disk / ".probe-0123456789abcdef-0" for disk in sorted(set(disks))]
    for probe in left:
        probe.parent.mkdir()
        probe.touch()
    rows = in_ranks(
        len(disks), lambda world: find_disks(world, tmp_path / disks[world.rank]), monkeypatch
    )
    assert rows == [Disks(leaders)] * len(disks)
    assert sorted(tmp_path.glob("*/*")) == left
    assert Disks(leaders).shared == (set(leaders) == {0})
    for leader in set(leaders):
        members = [rank for rank, disk in enumerate(disks) if disk == disks[leader]]
        assert Disks(leaders).members(leader) == members


def test_only_ranks_that_see_no_probe_write_one(tmp_path, monkeypatch):
    """Usually one file is enough. The folder is created."""
    written = []
    write = disks_module._write

    def note(probe):
        written.append((probe.parent.name, int(probe.name.rpartition("-")[2])))
        write(probe)

    monkeypatch.setattr(disks_module, "_write", note)
    for disks, probes in (("aaa", [("a", 0)]), ("bcb", [("b", 0), ("c", 1)])):
        written.clear()
        in_ranks(
            3,
            lambda world, disks=disks: find_disks(world, tmp_path / disks[world.rank]),
            monkeypatch,
        )
        assert sorted(written) == probes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_one_rank_cannot_write_is_refused_by_all(tmp_path, monkeypatch, rank):
    """The message has the rank and its host; probes of the others are removed."""
    names = ["good", "good"]
    names[rank] = "file/x"
    (tmp_path / "file").write_text("")
    errors = in_ranks(2, lambda world: find_disks(world, tmp_path / names[world.rank]), monkeypatch)
    for error in errors:
        assert type(error) is FileError
        assert str(error).startswith(
            f"rank {rank} on host host{rank}: cannot write the checkpoint {tmp_path / 'file/x'}: "
        )
        assert str(error).endswith("(nothing was written)")
    assert list(tmp_path.glob("good/*")) == []


def test_ranks_of_one_process_see_one_disk_and_write_no_probe(tmp_path):
    """Threads."""
    world = ThreadWorld(3, torch.device("cpu"), 10.0)
    assert find_disks(world, tmp_path) == Disks((0, 0, 0))
    assert list(tmp_path.iterdir()) == []
    world.close()
