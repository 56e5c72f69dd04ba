"""Files of checkpoints: what is written is read again to the bit, and what has changed is refused."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conformance.reference import differences

from penstock.checkpoint import checkpoint_files
from penstock.checkpoint.checkpoint_files import (
    Header,
    check_content,
    file_sum,
    is_visible,
    read_header,
    read_tensors,
    remove_others,
    write_file,
    write_in_memory,
)
from penstock.checkpoint.checkpoint_index import Checkpoint, FileSum
from penstock.checkpoint.optimizer_checkpoint import Facts
from penstock.errors import CheckpointDamaged, FileError, SettingError

NAME = "step-00000003-stage-0000-0123456789abcdef.safetensors"
IDENTITY = "0123456789abcdef" * 2
TEXTS = MappingProxyType({"identity": IDENTITY, "step": "3", "optimizer": "{}"})
ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def tensors():
    """Return tensors of all dtypes, some of them of unusual shape or layout."""
    row = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in ALL_DTYPES}
    row["number"] = torch.tensor(2.5)
    row["empty"] = torch.zeros(0, 3)
    row["conjugate"] = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj()
    row["complex number"] = torch.tensor(1 - 1j, dtype=torch.complex128)
    return row


def index_of(sums, **changes):
    """Return the index of a checkpoint with one file."""
    fields = {"identity": IDENTITY, "sums": sums} | changes
    return Checkpoint(3, "f00", (NAME,), **fields)


@pytest.fixture
def written(tmp_path):
    """A folder with one file, and its index."""
    sums = write_file(tmp_path / NAME, {"a": torch.arange(9.0), "b": torch.ones(2)}, TEXTS)
    return tmp_path, index_of({NAME: sums})


def refusal_of(function, *args):
    """Return the message of a `CheckpointDamaged`."""
    with pytest.raises(CheckpointDamaged) as refusal:
        function(*args)
    return str(refusal.value)


# -- writing -------------------------------------------------------------------------------------


def test_tensors_of_all_dtypes_come_back_to_the_bit(tmp_path):
    """In files whose checksums are those of `sha256sum`; the folder is created."""
    target = tmp_path / "new" / "folder" / NAME
    sums = write_file(target, tensors(), TEXTS)
    content = target.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert sums == FileSum(
        len(content),
        hashlib.sha256(content).hexdigest(),
        hashlib.sha256(content[: 8 + length]).hexdigest(),
    )
    assert file_sum(target) == sums
    assert list(target.parent.iterdir()) == [target]
    read = read_tensors(target.parent, NAME, tensors().keys())
    assert differences(read, {name: row.resolve_conj() for name, row in tensors().items()}) == []
    header = read_header(target.parent, NAME, index_of({NAME: sums}))
    assert header.metadata.items() >= TEXTS.items()
    assert header.tensors["torch.bfloat16"] == ("BF16", (2, 3))
    assert header.tensors["number"] == ("F32", ())
    assert header.tensors["empty"] == ("F32", (0, 3))
    assert header.tensors.keys() == tensors().keys()


def test_any_reader_of_safetensors_reads_a_file_and_a_second_write_replaces_it(tmp_path):
    """Complex numbers of double precision alone are pairs of numbers to others."""
    target = tmp_path / NAME
    write_file(target, {"a": torch.zeros(5)}, TEXTS)
    write_file(target, tensors(), TEXTS)
    read = load_file(target)
    assert read.keys() == tensors().keys()
    assert torch.equal(read["conjugate"], torch.tensor([[1.0, -2.0], [3.0, 4.0]]).double())
    assert torch.equal(read["torch.float16"], tensors()["torch.float16"])


def test_a_file_in_memory_has_the_content_of_one_on_the_disk(tmp_path):
    """It is written in place, as nothing can be renamed there."""
    target = tmp_path / NAME
    target.write_bytes(b"x" * 100_000)
    node = target.stat().st_ino
    sums = write_in_memory(target, tensors(), TEXTS)
    assert sums == file_sum(target)
    assert (target.stat().st_ino, target.stat().st_size) == (node, sums.bytes)
    assert list(tmp_path.iterdir()) == [target]
    read = read_tensors(tmp_path, NAME, tensors().keys())
    assert differences(read, {name: row.resolve_conj() for name, row in tensors().items()}) == []
    metadata = read_header(tmp_path, NAME, index_of({NAME: sums})).metadata
    assert metadata.items() >= TEXTS.items()


@pytest.mark.parametrize("write", [write_file, write_in_memory])
def test_a_dtype_that_files_do_not_have_is_refused_by_its_name(tmp_path, write):
    """Nothing is left of it."""
    row = {"a": torch.ones(2), "b": torch.zeros(2, dtype=torch.complex32)}
    with pytest.raises(
        SettingError, match=r"^a checkpoint cannot hold tensors of torch\.complex32$"
    ):
        write(tmp_path / NAME, row, TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_its_name_only_when_it_is_on_the_disk(tmp_path, monkeypatch):
    """After a loss of power there is the whole file or none, and the name itself is kept."""
    target = tmp_path / NAME
    happened = []
    rename = Path.rename

    def sync_file(path):
        assert load_file(path).keys() == {"a"}
        assert not target.exists()
        happened.append("file")

    def rename_file(path, other):
        happened.append("name")
        return rename(path, other)

    def sync_folder(path):
        assert path == tmp_path
        assert target.exists()
        happened.append("folder")

    monkeypatch.setattr(checkpoint_files, "sync_file", sync_file)
    monkeypatch.setattr(Path, "rename", rename_file)
    monkeypatch.setattr(checkpoint_files, "sync_folder", sync_folder)
    write_file(target, {"a": torch.ones(1)}, TEXTS)
    assert happened == ["file", "name", "folder"]


def test_two_files_of_one_folder_may_be_written_at_the_same_time(tmp_path, monkeypatch):
    """Ranks of several processes write theirs into one folder."""
    other, sync_file = NAME.replace("stage-0000", "stage-0001"), checkpoint_files.sync_file
    assert other != NAME

    def sync_and_write(path):
        if not (tmp_path / other).exists():
            monkeypatch.setattr(checkpoint_files, "sync_file", sync_file)
            write_file(tmp_path / other, {"b": torch.zeros(2)}, TEXTS)
        sync_file(path)

    monkeypatch.setattr(checkpoint_files, "sync_file", sync_and_write)
    write_file(tmp_path / NAME, {"a": torch.ones(1)}, TEXTS)
    assert differences(read_tensors(tmp_path, NAME, ["a"]), {"a": torch.ones(1)}) == []
    assert differences(read_tensors(tmp_path, other, ["b"]), {"b": torch.zeros(2)}) == []
    assert {path.name for path in tmp_path.iterdir()} == {NAME, other}


def test_a_failed_write_names_the_folder_and_leaves_nothing(tmp_path, monkeypatch):
    """Neither the partial file nor a changed one of the same name."""
    target = tmp_path / NAME
    write_file(target, {"a": torch.ones(1)}, TEXTS)
    before = target.read_bytes()

    def full(path):
        raise OSError(28, "No space left on device")

    message = rf"^cannot write the checkpoint {tmp_path}: No space left on device$"
    for step in ("save_file", "sync_file", "file_sum"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_files, step, lambda *_, **__: full(target))
            with pytest.raises(FileError, match=message):
                write_file(target, {"a": torch.zeros(1)}, TEXTS)
        assert list(tmp_path.iterdir()) == [target]
        assert target.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=f"^cannot write the checkpoint {tmp_path / 'file'}: "):
        write_file(tmp_path / "file" / NAME, {"a": torch.zeros(1)}, TEXTS)


def test_files_of_other_checkpoints_are_removed_and_those_of_the_user_stay(tmp_path):
    """Also what interrupted saves have left."""
    stay = {NAME, "step-notes.txt", "step-2", "notes.safetensors", "checkpoint.json", "x.partial"}
    gone = {"step-00000002-stage-0000-aa.safetensors", "step-00000003-stage-0000-bb.partial"}
    for name in stay | gone:
        (tmp_path / name).write_text("")
    remove_others(tmp_path, {NAME})
    assert {path.name for path in tmp_path.iterdir()} == stay
    remove_others(tmp_path / "nowhere", ())


# -- headers -------------------------------------------------------------------------------------


def test_plain_state_of_an_optimizer_may_be_infinite_or_absent():
    """Such as the best loss so far; files of a stage without an optimizer have none."""
    text = '{"w": {"options": {"lr": 0.5}, "state": {"best": Infinity}, "group": 1, "kind": "K"}}'
    facts = Header({}, {"optimizer": text}).facts
    assert facts == {"w": Facts({"lr": 0.5}, {"best": math.inf}, 1, "K")}
    assert Header({}, {"optimizer": '{"w": {"options": {}, "state": {}}}'}).facts == {
        "w": Facts({}, {})
    }
    assert Header({}, {}).facts == {}
    for text in ("{", "[]", '{"w": {}}', '{"w": {"options": {}, "state": 3}}'):
        with pytest.raises(ValueError, match="its optimizer state"):
            _ = Header({}, {"optimizer": text}).facts


def header_bytes(text, size=None):
    """Return the bytes of a file with this header, and no tensors."""
    content = text.encode()
    return (len(content) if size is None else size).to_bytes(8, "little") + content


NO_HEADERS = {
    "empty": (b"", "its header is cut off, or its length is damaged"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "its header is cut off, or its length is damaged"),
    "a long header": (
        header_bytes("{}", 100_000_001),
        "its header is cut off, or its length is damaged",
    ),
    "less than its length": (header_bytes("{}", 3), "its header is cut off"),
    "no JSON": (header_bytes("{,}"), "its header"),
    "no UTF-8": (b"\1" + bytes(7) + b"\xff", "codec can't decode"),
    "a list": (header_bytes("[]"), "its header"),
    "a tensor without offsets": (header_bytes('{"a": {"dtype": "F32", "shape": [1]}}'), "header"),
    "texts in place of a tensor": (
        header_bytes('{"a": {"x": "y"}}'),
        "its header has an entry that is no tensor",
    ),
    "a tensor in place of texts": (
        header_bytes('{"__metadata__": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        "its header has an entry that is no tensor",
    ),
}


@pytest.mark.parametrize("name", NO_HEADERS)
def test_a_file_without_a_whole_header_is_refused_by_its_name(tmp_path, name):
    """Whatever its index says."""
    content, message = NO_HEADERS[name]
    (tmp_path / NAME).write_bytes(content)
    text = refusal_of(read_header, tmp_path, NAME, index_of({}, schema=1, identity=""))
    begin = f"cannot read {NAME} of the checkpoint {tmp_path}: "
    assert text.startswith(begin)
    assert message in text
    assert not text.endswith("all ranks and hosts can read")


def test_a_header_without_tensors_and_texts_is_one(tmp_path):
    """A stage without parameters has no tensors."""
    (tmp_path / NAME).write_bytes(header_bytes("{}"))
    header = read_header(tmp_path, NAME, index_of({}, schema=1, identity=""))
    assert (header.tensors, header.metadata) == ({}, {})


@pytest.mark.parametrize("read", [read_header, check_content])
def test_a_missing_file_is_named_with_where_it_must_be(written, read):
    """Ranks of other hosts have perhaps written it elsewhere."""
    folder, index = written
    (folder / NAME).unlink()
    assert refusal_of(read, folder, NAME, index) == (
        f"cannot read {NAME} of the checkpoint {folder}: No such file or directory. A checkpoint "
        "must be in one folder that all ranks and hosts can read"
    )


def test_a_whole_file_is_read_without_an_error(written):
    """And by the index of schema 1, which has nothing to compare it with."""
    folder, index = written
    assert read_header(folder, NAME, index).tensors["a"] == ("F32", (9,))
    check_content(folder, NAME, index)
    assert is_visible(folder, NAME, index.sums[NAME])
    (folder / NAME).write_bytes((folder / NAME).read_bytes()[:-1])
    check_content(folder, NAME, index_of({}, schema=1, identity=""))
    read_header(folder, NAME, index_of({}, schema=1, identity=""))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_refused_with_both_sizes(written, change):
    """It was cut off, or something was appended."""
    folder, index = written
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:-1] if change < 0 else content + b"\0")
    assert refusal_of(read_header, folder, NAME, index) == (
        f"{NAME} of the checkpoint {folder} is damaged: it has {len(content) + change} bytes, and "
        f"was written with {len(content)}. Load another checkpoint, or restore this file as it was "
        "written"
    )
    assert not is_visible(folder, NAME, index.sums[NAME])
    assert "is damaged: its SHA-256 is " in refusal_of(check_content, folder, NAME, index)


def test_a_changed_header_and_a_changed_tensor_have_other_checksums(written):
    """The header is compared when a checkpoint is looked for, tensors when they are loaded."""
    folder, index = written
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content.replace(b'"3"', b'"4"'))
    assert "is damaged: the checksum of its header has changed. Load" in refusal_of(
        read_header, folder, NAME, index
    )
    assert not is_visible(folder, NAME, index.sums[NAME])
    (folder / NAME).write_bytes(content[:-1] + b"\1")
    read_header(folder, NAME, index)
    assert is_visible(folder, NAME, index.sums[NAME])
    digest = hashlib.sha256(content[:-1] + b"\1").hexdigest()
    assert refusal_of(check_content, folder, NAME, index).startswith(
        f"{NAME} of the checkpoint {folder} is damaged: its SHA-256 is {digest[:12]}…, and was "
        f"{index.sums[NAME].sha256[:12]}…. Load"
    )


def test_a_file_of_another_checkpoint_is_told_from_a_damaged_one(written):
    """The message has both steps. Schema 1 has no identities, and its files neither."""
    folder, index = written
    other = index_of(index.sums, identity="f" * 32)
    assert refusal_of(read_header, folder, NAME, other) == (
        f"{NAME} of {folder}: belongs to the checkpoint of step 3 (identity {IDENTITY[:12]}), not "
        f"to that of step 3 (identity {'f' * 12}), which checkpoint.json describes. Copy all files "
        "of one checkpoint into a folder of their own"
    )
    read_header(folder, NAME, index_of({}, identity="", schema=1))
    sums = write_file(folder / NAME, {"a": torch.ones(1)}, {"optimizer": "{}"})
    read_header(folder, NAME, index_of({NAME: sums}))


def test_a_file_that_is_not_whole_is_not_visible(tmp_path):
    """Another rank may not have written it yet."""
    sums = write_file(tmp_path / NAME, {"a": torch.ones(3)}, TEXTS)
    content = (tmp_path / NAME).read_bytes()
    for part in (content[:4], content[:20], content[:-4]):
        (tmp_path / NAME).write_bytes(part)
        assert not is_visible(tmp_path, NAME, sums)
    (tmp_path / NAME).unlink()
    assert not is_visible(tmp_path, NAME, sums)


# -- tensors -------------------------------------------------------------------------------------


def test_tensors_are_read_by_name_and_do_not_change_with_the_file(written):
    """A view of a file would crash the process when the file is cut off."""
    folder, _ = written
    read = read_tensors(folder, NAME, {"a"})
    assert read.keys() == {"a"}
    (folder / NAME).write_bytes(bytes((folder / NAME).stat().st_size))
    assert torch.equal(read["a"], torch.arange(9.0))
    assert read["a"].is_contiguous()


def test_tensors_of_a_file_without_texts_are_read(tmp_path):
    """Other programs may have written it."""
    save_file({"a": torch.ones(2), "b": torch.zeros(1)}, tmp_path / NAME)
    read = read_tensors(tmp_path, NAME, ["a"])
    assert list(read) == ["a"]
    assert torch.equal(read["a"], torch.ones(2))


def test_complex_numbers_are_restored_where_they_are_asked_for(tmp_path):
    """A file names all that it has; pairs of numbers that were saved as pairs stay so."""
    row = {"z": torch.ones(2, dtype=torch.complex128), "pairs": torch.ones(2, 2).double()}
    write_file(tmp_path / NAME, row, TEXTS)
    assert differences(read_tensors(tmp_path, NAME, ["pairs"]), {"pairs": row["pairs"]}) == []
    assert differences(read_tensors(tmp_path, NAME, row), row) == []


def test_tensors_that_cannot_be_read_are_refused_by_their_file(written):
    """A name that is not in the file, a text that is no list, a file that is none."""
    folder, _ = written
    begin = f"cannot read {NAME} of the checkpoint {folder}: "
    assert refusal_of(read_tensors, folder, NAME, ["a", "c"]).startswith(begin)
    save_file({"a": torch.ones(1)}, folder / NAME, metadata={"complex128": "a"})
    assert refusal_of(read_tensors, folder, NAME, ["a"]).startswith(begin)
    (folder / NAME).write_bytes(b"\xff" * 40)
    assert refusal_of(read_tensors, folder, NAME, ["a"]).startswith(begin)
    (folder / NAME).unlink()
    assert refusal_of(read_tensors, folder, NAME, ["a"]).startswith(begin)


def test_texts_of_a_file_are_those_that_were_given(tmp_path):
    """The mapping of the caller is not changed by those that the format needs."""
    texts = dict(TEXTS)
    sums = write_file(tmp_path / NAME, {"z": torch.ones(1, dtype=torch.complex128)}, texts)
    assert texts == TEXTS
    header = read_header(tmp_path, NAME, index_of({NAME: sums}))
    assert json.loads(header.metadata["complex128"]) == ["z"]
    write_file(tmp_path / NAME, {"z": torch.ones(1)}, texts)
    assert read_header(tmp_path, NAME, index_of({})).metadata == TEXTS
