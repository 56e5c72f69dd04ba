"""Which ranks share a disk; how files pass between hosts is in test_checkpoint_whole.py."""

from __future__ import annotations

import pytest
import torch

from penstock.checkpoint.disks import Disks, _leaders, find_disks
from penstock.checkpoint.fetch import _Copy
from penstock.errors import FileError
from penstock.ranks.processes.rank_reports import Report
from penstock.ranks.thread_world import ThreadWorld


@pytest.mark.parametrize(
    ("hosts", "visible", "leaders"),
    [
        ("aabb", "1111", (0, 0, 0, 0)),
        ("aabb", "1100", (0, 0, 2, 2)),
        ("abab", "1010", (0, 1, 0, 1)),
        ("abc", "101", (0, 1, 0)),
        ("aa", "10", (0, 1)),
    ],
)
def test_ranks_that_do_not_see_the_probe_share_a_disk_with_their_host(hosts, visible, leaders):
    """The lowest rank on each disk completes the checkpoint there."""
    reports = [
        Report(rank, host, seen == "1")
        for rank, (host, seen) in enumerate(zip(hosts, visible, strict=True))
    ]
    assert _leaders(reports) == leaders
    assert Disks(leaders).shared == (set(leaders) == {0})
    assert 0 in Disks(leaders).members(0)


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
