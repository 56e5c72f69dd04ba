"""`SaveJob`: all ranks write, then each disk gets its index, then what it replaces is removed."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from tests.checkpoint.ranks_in_threads import in_ranks
from tests.time_limits import HANG_S

from penstock.checkpoint.checkpoint import Progress
from penstock.checkpoint.checkpoint_files import file_sum, write_file
from penstock.checkpoint.checkpoint_index import INDEX, Checkpoint, read_index
from penstock.checkpoint.disks import Disks
from penstock.checkpoint.save_job import (
    GatheredSave,
    Publication,
    SaveJob,
    in_place,
    make_identity,
)
from penstock.errors import FileError, SettingError
from penstock.ranks.thread_world import ThreadWorld

IDENTITY = "0123456789abcdef" * 2


def name_of(rank):
    """Return the name of the file of a rank."""
    return f"step-00000012-stage-{rank:04d}-0123456789abcdef.safetensors"


class Writer:
    """Writes one file for each of some ranks, and notes all calls in a common list.

    Attributes:
        refuses: raised by `capture`.
        fails: raised by `write`.
        keeps: whether the file has state of a weight rule.
    """

    def __init__(self, folder, names, log, **options):
        self.folder, self.names, self.log = folder, names, log
        self.progress = Progress(12)
        self.refuses, self.fails, self.keeps = (
            options.get(key) for key in ("refuses", "fails", "keeps")
        )

    def capture(self, rank):
        """Return the state of a rank."""
        self.log.append(("capture", rank))
        if self.refuses:
            raise self.refuses
        return {name: rank for name in self.names if name == name_of(rank)}

    def write(self, contents):
        """Write the files of a rank."""
        if self.fails:
            raise self.fails
        files = {}
        for name, rank in contents.items():
            texts = {"identity": IDENTITY}
            sums = write_file(self.folder / name, {"a": torch.tensor(rank)}, texts)
            files[name] = list(vars(sums).values())
            self.log.append(("write", rank))
        return {"files": files, "keeps": bool(self.keeps)}

    def index(self, sums, hosts, *, keeps):
        """Return the index of all files."""
        self.log.append(("index", keeps))
        names = tuple(self.names)
        return Checkpoint(12, "f", names, identity=IDENTITY, sums=dict(sums), hosts=dict(hosts))

    def remove(self):
        """Note that the files would be removed."""
        self.log.append(("remove", self.folder.name))

    def publication(self):
        """Return a publication that notes its calls, and whether there was an index."""

        def note(call):
            return lambda *args: self.log.append(
                (call, self.folder.name, (self.folder / INDEX).exists(), *args)
            )

        return Publication(self.folder, note("publish"), note("clean"), note("discard"))


def save(root, disks, monkeypatch, *, leaders=None, writers=(), names=None, **options):
    """Save on one rank per letter of `disks`; return the results and the log of all calls.

    Args:
        root: where the folders of the disks are.
        disks: by rank, the name of its folder.
        monkeypatch: the fixture.
        leaders: by rank, its leader, if not that of its folder.
        writers: ranks whose writers have the options.
        names: names of the files, if not one for each rank.
        options: see `Writer`.
    """
    log = []
    leaders = leaders or tuple(disks.index(disk) for disk in disks)
    names = names or [name_of(rank) for rank in range(len(disks))]

    def job(world):
        local = options if world.rank in writers else {}
        writer = Writer(root / disks[world.rank], names, log, **local)
        job = SaveJob(writer, world, Disks(leaders), writer.publication())
        assert job.step == 12
        results = []
        while not results or not results[-1]:
            results.append(job.advance())
        return results

    return in_ranks(len(disks), job, monkeypatch), log


def test_a_phase_begins_when_all_ranks_have_ended_the_one_before(tmp_path, monkeypatch):
    """No index is there before all files, and nothing is removed before all disks have theirs."""
    results, log = save(tmp_path, "abab", monkeypatch, writers=[2], keeps=True)
    assert results == [[False, False, True]] * 4
    kinds = [row[0] for row in log if row[0] not in ("capture", "index")]
    assert kinds == ["write"] * 4 + ["publish"] * 2 + ["clean"] * 2
    assert sorted(row for row in log if row[0] == "capture") == [("capture", n) for n in range(4)]
    assert [row for row in log if row[0] == "index"] == [("index", True)] * 4
    for disk in "ab":
        index = read_index(tmp_path / disk)
        assert ("publish", disk, True) in log
        (cleaned,) = [row for row in log if row[:2] == ("clean", disk)]
        assert cleaned[3].files == index.files == tuple(name_of(rank) for rank in range(4))
        assert index.hosts == {name_of(rank): f"host{rank}" for rank in range(4)}
        for rank in range(4):
            path = tmp_path / "abab"[rank] / name_of(rank)
            assert index.sums[name_of(rank)] == file_sum(path)


def test_on_a_shared_disk_one_rank_completes_and_hosts_do_not_matter(tmp_path, monkeypatch):
    """A later run may have other hosts."""
    results, log = save(tmp_path, "aaa", monkeypatch)
    assert results == [[False, False, True]] * 3
    assert [row[0] for row in log if row[0] in ("publish", "clean")] == ["publish", "clean"]
    assert read_index(tmp_path / "a").hosts == {}
    assert [row for row in log if row[0] == "index"] == [("index", False)] * 3


def test_a_disk_without_a_stage_has_an_index_too(tmp_path, monkeypatch):
    """Its ranks look for one when they load."""
    results, _ = save(tmp_path, "ab", monkeypatch, names=[name_of(0)])
    assert results == [[False, False, True]] * 2
    assert read_index(tmp_path / "b") == read_index(tmp_path / "a")
    assert [path.name for path in (tmp_path / "b").iterdir()] == [INDEX]


@pytest.mark.parametrize("when", ["refuses", "fails"])
def test_if_one_rank_cannot_write_nothing_is_completed_and_files_are_removed(
    tmp_path, monkeypatch, when
):
    """Whether its state cannot be captured, or its disk is full; all ranks raise the same."""
    results, log = save(
        tmp_path, "aab", monkeypatch, writers=[1], **{when: SettingError("it is too odd")}
    )
    for error in results:
        assert type(error) is SettingError
        assert str(error).startswith("rank 1 on host host1: it is too odd\n")
        assert "(the previous checkpoint in " in str(error)
        assert str(error).endswith(" is unchanged)")
    kinds = [row[0] for row in log]
    assert "publish" not in kinds
    assert "index" not in kinds
    assert (kinds.count("remove"), kinds.count("discard")) == (3, 3)
    assert kinds.index("remove") > max(n for n, kind in enumerate(kinds) if kind == "write")


def test_a_file_that_the_leader_of_its_disk_does_not_see_is_refused(tmp_path, monkeypatch):
    """Ranks that seemed to share a disk wrote into different folders: none could load them."""
    results, log = save(tmp_path, "ab", monkeypatch, leaders=(0, 0))
    for error in results:
        assert type(error) is FileError
        assert (
            f"rank 1 on host host1 wrote {name_of(1)} into {tmp_path / 'a'}, which rank 0 on host "
            "host0 does not see: no rank could load this checkpoint. Save into one folder"
        ) in str(error)
    assert not list(tmp_path.glob("*/checkpoint.json"))
    assert [row[0] for row in log if row[0] == "discard"] == ["discard"] * 2


def test_an_unexpected_error_of_the_thread_is_raised_and_the_others_are_told(tmp_path):
    """They are about to wait for the report of this rank."""
    calls = []
    world = SimpleNamespace(
        size=1, local_ranks=(0,), run=lambda job: {0: job(0)}, abandon=calls.append
    )
    error = ZeroDivisionError("a defect")
    writer = Writer(tmp_path, [name_of(0)], [], fails=error)
    job = SaveJob(writer, world, Disks((0,)), writer.publication())
    with pytest.raises(ZeroDivisionError, match="a defect"):
        job.wait()
    assert calls == [error]


def test_the_ranks_of_a_process_write_in_one_thread_that_training_does_not_wait_for(tmp_path):
    """`ready` tells when the part of this process is done."""
    gate, threads = threading.Event(), set()
    log = []

    class Slow(Writer):
        def write(self, contents):
            assert gate.wait(HANG_S)
            threads.add(threading.current_thread().name)
            return super().write(contents)

    world = ThreadWorld(3, torch.device("cpu"), 10.0)
    writer = Slow(tmp_path, [name_of(rank) for rank in range(3)], log)
    job = SaveJob(writer, world, Disks((0, 0, 0)), in_place(tmp_path))
    assert not job.ready
    assert [row[0] for row in log] == ["capture"] * 3
    gate.set()
    job.wait()
    assert job.ready
    assert threads == {"penstock-checkpoint"}
    assert len(read_index(tmp_path).files) == 3
    assert job.advance()
    world.close()


def test_in_one_folder_files_of_the_checkpoint_before_are_removed(tmp_path):
    """It is complete under the name that it has; a failure removes nothing more."""
    for name in (name_of(0), "step-00000011-stage-0000-aa.safetensors", "notes.txt"):
        (tmp_path / name).write_text("")
    publication = in_place(tmp_path)
    assert publication.folder == tmp_path
    publication.publish()
    publication.discard()
    assert len(list(tmp_path.iterdir())) == 3
    publication.clean(Checkpoint(12, "f", (name_of(0),)))
    assert {path.name for path in tmp_path.iterdir()} == {name_of(0), "notes.txt"}


def test_a_process_that_only_gives_its_part_has_nothing_to_wait_for():
    """Others of its stage write; the capture is collective."""
    captured = []
    world = SimpleNamespace(run=lambda job: {rank: job(rank) for rank in (2, 3)})
    writer = SimpleNamespace(progress=Progress(9), capture=captured.append)
    job = GatheredSave(writer, world)
    assert (job.step, captured, job.ready, job.advance()) == (9, [2, 3], True, True)
    job.wait()


def test_a_checkpoint_has_one_random_identity_on_all_ranks(monkeypatch):
    """Of 16 bytes; its half is part of the names of files."""
    first, second = (in_ranks(3, make_identity, monkeypatch) for _ in range(2))
    assert len(set(first)) == 1
    assert first != second
    assert len(bytes.fromhex(first[0])) == 16
