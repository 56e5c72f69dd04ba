"""Files of a checkpoint that are on the disks of other hosts: each host gets its missing ones."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from tests.checkpoint.ranks_in_threads import in_ranks

from penstock.checkpoint import fetch
from penstock.checkpoint.checkpoint_index import INDEX, Checkpoint, FileSum, write_index
from penstock.checkpoint.fetch import fetch_missing, unseen_files
from penstock.errors import CheckpointDamaged, FileError

NAMES = tuple(f"step-00000003-stage-000{n}-0123456789abcdef.safetensors" for n in range(3))
CONTENTS = {NAMES[0]: b"a" * 10, NAMES[1]: bytes(range(256)), NAMES[2]: b""}


def index_of(*, separate=True):
    """Return the index of a checkpoint of three files, on separate disks or on a shared one."""
    sums = {name: FileSum(len(content), "ab", "cd") for name, content in CONTENTS.items()}
    hosts = dict.fromkeys(NAMES, "a") if separate else {}
    return Checkpoint(3, "f", NAMES, identity="1f" * 16, sums=sums, hosts=hosts)


def make_disks(root, rows, **options):
    """Write folders `0`, `1`, ... with the files of these numbers; "i" stands for the index."""
    for number, row in enumerate(rows):
        folder = root / str(number)
        folder.mkdir()
        for letter in row:
            if letter == "i":
                write_index(folder, index_of(**options))
            else:
                (folder / NAMES[int(letter)]).write_bytes(CONTENTS[NAMES[int(letter)]])


def files_of(folder):
    """Return the content of all files in a folder, but that of the index."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != INDEX}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that fetches on every rank, whose folder is that of its disk."""

    def start(disks):
        worlds = {}

        def job(world):
            worlds[world.rank] = world
            return fetch_missing(tmp_path / disks[world.rank], world)

        results = in_ranks(len(disks), job, monkeypatch)
        calls = [worlds[rank].calls for rank in range(len(disks))]
        assert calls == calls[:1] * len(disks), "every rank makes the same calls"
        return results

    return start


@pytest.mark.parametrize("chunk", [100, 128, 64 * 2**20])
@pytest.mark.parametrize(
    ("rows", "disks"),
    [
        (("0i", "1i", "2i"), "012"),
        (("012i", ""), "01"),
        (("", "012i"), "01"),
        (("0i", "12i"), "0101"),
        (("12i", "0i"), "0110"),
        (("01i", "12i", "02"), "2210"),
    ],
)
def test_every_disk_has_all_files_to_the_byte_afterwards(
    tmp_path, run, monkeypatch, rows, disks, chunk
):
    """Also the index, and files that are longer than what is sent at once, or empty."""
    monkeypatch.setattr(fetch, "_CHUNK", chunk)
    make_disks(tmp_path, rows)
    assert run(disks) == [None] * len(disks)
    texts = [(tmp_path / disk / INDEX).read_text() for disk in sorted(set(disks))]
    assert texts == texts[:1] * len(rows)
    for disk in sorted(set(disks)):
        assert files_of(tmp_path / disk) == CONTENTS


def test_one_rank_of_a_disk_writes_and_files_that_are_there_stay(tmp_path, run, monkeypatch):
    """Two ranks that write one file could mix their parts."""
    make_disks(tmp_path, ("02i", "1i"))
    named = []
    finish = fetch._Copy.finish

    def finish_and_note(self):
        if self.receives:
            named.append((self.file.parent.name, self.file.name))
        finish(self)

    monkeypatch.setattr(fetch._Copy, "finish", finish_and_note)
    before = (tmp_path / "1" / NAMES[1]).stat().st_mtime_ns
    assert run("0111") == [None] * 4
    assert named == [
        ("1", NAMES[0]),
        ("0", NAMES[1]),
        ("1", NAMES[2]),
    ]
    assert (tmp_path / "1" / NAMES[1]).stat().st_mtime_ns == before


def test_processes_that_fetch_one_file_at_the_same_time_write_copies_of_their_own(
    tmp_path, run, monkeypatch
):
    """Several pipelines of one job may load a checkpoint; the last copy stays."""
    make_disks(tmp_path, ("012i", ""))
    sync_file, partials = fetch.sync_file, []

    def sync_and_note(path):
        partials.append(path.name)
        sync_file(path)

    monkeypatch.setattr(fetch, "sync_file", sync_and_note)
    assert run("01") == [None, None]
    assert partials == [f"{name}.{os.getpid()}.partial" for name in (*NAMES, INDEX)]


def test_the_index_comes_last_so_that_a_folder_with_one_has_its_files(tmp_path, run, monkeypatch):
    """An interrupted transfer leaves no index that names missing files."""
    make_disks(tmp_path, ("012i", ""))
    named = []
    finish = fetch._Copy.finish

    def finish_and_note(self):
        finish(self)
        if self.receives:
            named.append(self.file.name)

    monkeypatch.setattr(fetch._Copy, "finish", finish_and_note)
    assert run("01") == [None, None]
    assert named == [*NAMES, INDEX]


@pytest.mark.parametrize("rows", [("012i", "012i"), ("", ""), ("01", "2")])
def test_nothing_is_sent_where_all_see_everything_or_none_an_index(tmp_path, run, rows):
    """`load` then reads, or refuses with what is wrong."""
    make_disks(tmp_path, rows)
    before = [files_of(tmp_path / disk) for disk in "01"]
    assert run("01") == [None, None]
    assert [files_of(tmp_path / disk) for disk in "01"] == before


def test_ranks_that_see_different_checkpoints_send_nothing(tmp_path, run):
    """`load` refuses them; files of one would else be mixed with those of the other."""
    make_disks(tmp_path, ("01i", ""))
    (tmp_path / "1" / NAMES[2]).write_bytes(b"")
    write_index(tmp_path / "1", replace(index_of(), identity="2e" * 16))
    before = [files_of(tmp_path / disk) for disk in "01"]
    assert run("01") == [None, None]
    assert [files_of(tmp_path / disk) for disk in "01"] == before


def test_a_file_that_no_host_has_is_named_with_all_hosts(tmp_path, run):
    """The host that has it may have no rank now."""
    make_disks(tmp_path, ("0i", "2i"))
    results = run("010")
    for disk, error in zip("010", results, strict=True):
        assert type(error) is CheckpointDamaged
        assert str(error) == (
            f"{NAMES[1]} of the checkpoint {tmp_path / disk} is on none of the hosts host0, host1, "
            "host2: every host wrote to its own disk. Start a rank on the host that has it, copy "
            "it here, or load an older checkpoint; to be safe from the loss of a host, save on a "
            "disk that all hosts share"
        )


def test_a_file_that_is_missing_in_a_shared_folder_is_left_to_the_readers(tmp_path, run):
    """Each of them reports that it is damaged."""
    make_disks(tmp_path, ("02i", "02i"), separate=False)
    assert run("01") == [None, None]
    assert files_of(tmp_path / "0").keys() == {NAMES[0], NAMES[2]}


def test_files_of_a_checkpoint_on_a_shared_disk_are_fetched_where_a_copy_lacks_them(tmp_path, run):
    """A folder was copied to the disk of one host."""
    make_disks(tmp_path, ("012i", ""), separate=False)
    assert run("01") == [None, None]
    assert files_of(tmp_path / "1") == CONTENTS


def test_files_of_a_checkpoint_of_schema_1_are_fetched_too(tmp_path, run):
    """It has no identity: its content tells it from others."""
    make_disks(tmp_path, ("012", ""))
    old = Checkpoint(3, "f", NAMES, schema=1)
    (tmp_path / "0" / INDEX).write_text(json.dumps(asdict(old)))
    assert run("01") == [None, None]
    assert files_of(tmp_path / "1") == CONTENTS
    (tmp_path / "1" / NAMES[0]).unlink()
    (tmp_path / "1" / INDEX).write_text(json.dumps(asdict(replace(old, step=4))))
    assert run("01") == [None, None]
    assert files_of(tmp_path / "1").keys() == {NAMES[1], NAMES[2]}


def test_a_damaged_index_is_as_none(tmp_path, run):
    """It is replaced by that of another host, which is whole."""
    make_disks(tmp_path, ("012i", "0"))
    (tmp_path / "1" / INDEX).write_text("{")
    assert run("01") == [None, None]
    assert (tmp_path / "1" / INDEX).read_text() == (tmp_path / "0" / INDEX).read_text()
    assert files_of(tmp_path / "1") == CONTENTS


@pytest.mark.parametrize("fails", ["read", "write", "name"])
def test_an_error_of_one_host_is_raised_by_all_and_leaves_no_part(
    tmp_path, run, monkeypatch, fails
):
    """The others are in the same transfer, and go on to its end."""
    make_disks(tmp_path, ("012i", ""))
    target = tmp_path / "1" / NAMES[0]
    if fails == "read":
        real = fetch._Copy.begin

        def begin(self):
            real(self)
            if self.sends and self.file.name == NAMES[1]:
                self.file.unlink()
                self.file.mkdir()

        monkeypatch.setattr(fetch._Copy, "begin", begin)
        reason = rf"rank 0 on host host0: cannot copy .*{NAMES[1]} between hosts: Is a directory"
    else:
        if fails == "write":
            monkeypatch.setattr(fetch, "sync_file", refuse)
        else:
            target.mkdir()
            (target / "x").write_text("")
            monkeypatch.setattr(type(target), "exists", lambda path: path.is_file())
        reason = rf"rank 1 on host host1: cannot copy .*{NAMES[0]} between hosts: "
    for error in run("01"):
        assert type(error) is FileError
        assert str(error).endswith("(nothing was loaded on any rank)")
        with pytest.raises(FileError, match=reason):
            raise error
    assert not [path for path in tmp_path.rglob("*.partial") if path.is_file()]


def refuse(path):
    """Stand for a full disk."""
    raise OSError(28, "No space left on device")


def test_ranks_of_one_process_see_the_same_files(tmp_path):
    """Nothing is exchanged."""
    world = SimpleNamespace(local_ranks=(0, 1), size=2)
    assert fetch_missing(tmp_path, world) is None


def test_files_that_no_rank_sees_are_listed_on_every_rank(tmp_path, monkeypatch):
    """In the order of their names; without an index nothing but the index is known."""
    make_disks(tmp_path, ("0i", "", "2"))

    def job(disks):
        return lambda world: unseen_files(tmp_path / disks[world.rank], world)

    assert in_ranks(2, job("01"), monkeypatch) == [[NAMES[1], NAMES[2]]] * 2
    assert in_ranks(2, job("10"), monkeypatch) == [[NAMES[1], NAMES[2]]] * 2
    assert in_ranks(2, job("12"), monkeypatch) == [[INDEX]] * 2
    (tmp_path / "0" / NAMES[2]).write_bytes(b"")
    write_index(tmp_path / "1", index_of())
    (tmp_path / "1" / NAMES[1]).write_bytes(b"")
    assert in_ranks(2, job("01"), monkeypatch) == [[]] * 2


def test_what_a_rank_reads_and_writes_is_in_parts(tmp_path):
    """A short file is filled with zeros to the length that the others expect; the error is kept."""
    (tmp_path / "x").write_bytes(b"abcdef")
    source = fetch._Copy(tmp_path / "x", tmp_path / "p", sends=True, receives=False)
    assert bytes(source.read(2, 3).tolist()) == b"cde"
    assert bytes(source.read(5, 3).tolist()) == b"f\0\0"
    assert source.read(0, 2).dtype is torch.uint8
    other = fetch._Copy(tmp_path / "y", tmp_path / "p", sends=False, receives=False)
    assert other.read(0, 3) is None
    other.begin()
    other.write(torch.zeros(2, dtype=torch.uint8))
    other.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]
    (tmp_path / "p").write_bytes(b"of an earlier attempt")
    target = fetch._Copy(tmp_path / "new" / "y", tmp_path / "new" / "p", False, True)
    target.begin()
    target.write(torch.tensor([1, 2], dtype=torch.uint8))
    target.begin()
    target.write(torch.tensor([3], dtype=torch.uint8))
    target.finish()
    assert (tmp_path / "new" / "y").read_bytes() == b"\3"


def test_an_error_while_a_file_is_copied_is_raised_at_its_end(tmp_path):
    """The other ranks are in the same broadcast. The first error counts."""
    missing = fetch._Copy(tmp_path / "none", tmp_path / "none.partial", True, False)
    assert missing.read(0, 3).tolist() == [0, 0, 0]
    with pytest.raises(FileError, match=r"cannot copy .*none between hosts: No such file"):
        missing.finish()
    (tmp_path / "none").mkdir()
    missing.read(3, 3)
    with pytest.raises(FileError, match=r"cannot copy .*none between hosts: No such file"):
        missing.finish()
    (tmp_path / "file").write_text("")
    blocked = fetch._Copy(tmp_path / "file" / "x", tmp_path / "file" / "x.partial", False, True)
    blocked.begin()
    blocked.write(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(FileError, match=r"cannot copy .* hosts: (File exists|Not a direct)"):
        blocked.finish()


def test_hosts_of_ranks_have_names_of_their_own(monkeypatch):
    """The worlds of these tests do not take each other's values."""

    def job(world):
        first = world.broadcast([world.rank], 1)
        return first, socket.gethostname(), threading.current_thread() is threading.main_thread()

    assert in_ranks(2, job, monkeypatch) == [([1], "host0", False), ([1], "host1", False)]
