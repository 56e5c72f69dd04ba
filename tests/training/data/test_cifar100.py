"""CIFAR-100: the published format, read from a folder or an archive, and refused where it is
anything else.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FileError, SettingError
from penstock.training.data import cifar100 as module
from penstock.training.data.cifar100 import ARCHIVE_MD5, MEAN, STD, cifar100

MEMBER = "cifar-100-binary/"


def members(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files under the names that the published archive gives them."""
    return {MEMBER + name: content for name, content in files.items()}


def test_a_folder_gives_the_fine_labels_and_the_pixels_of_each_record(cifar_folder, cifar_bytes):
    """Byte 0 is the coarse label, byte 1 the fine one, then red, green, blue row by row: a slip of
    one byte shows here.
    """
    data = cifar100(cifar_folder)
    raw = cifar_bytes["train.bin"]
    assert data.train_inputs.shape == (5, 3, 32, 32)
    assert data.test_inputs.shape == (2, 3, 32, 32)
    assert data.train_targets.tolist() == [raw[i * 3074 + 1] for i in range(5)]
    for record, channel, row, column in ((0, 0, 0, 0), (4, 2, 31, 31), (2, 1, 3, 7)):
        byte = raw[record * 3074 + 2 + channel * 1024 + row * 32 + column]
        expected = (byte / 255 - MEAN[channel]) / STD[channel]
        assert data.train_inputs[record, channel, row, column].item() == pytest.approx(
            expected, abs=1e-5
        )
    assert (data.train_inputs.dtype, data.test_targets.dtype) == (torch.float32, torch.int64)
    assert (data.name, data.classes, data.task) == ("cifar100", 100, "classify")


def test_an_archive_and_one_of_the_files_give_the_same_as_the_folder(
    cifar_folder, cifar_bytes, write_archive
):
    """How the data came to the machine must not matter."""
    folder = cifar100(cifar_folder)
    archive = cifar100(
        write_archive({"cifar-100-binary/fine_label_names.txt": b"apple\n", **members(cifar_bytes)})
    )
    file = cifar100(str(cifar_folder / "test.bin"))
    for other in (archive, file):
        assert torch.equal(other.train_inputs, folder.train_inputs)
        assert torch.equal(other.train_targets, folder.train_targets)
        assert torch.equal(other.test_inputs, folder.test_inputs)
        assert torch.equal(other.test_targets, folder.test_targets)


def test_an_archive_with_the_test_file_first_is_read_too(cifar_bytes, write_archive):
    """The order of the members is the packer's choice."""
    reverse = dict(reversed(members(cifar_bytes).items()))
    assert len(cifar100(write_archive(reverse)).train_targets) == 5


def test_the_description_has_both_sha256_and_says_that_the_numbers_differ(
    cifar_folder, cifar_bytes
):
    """A result can be traced to its data, and five images are not taken for fifty thousand."""
    description = cifar100(cifar_folder).description
    for name, content in cifar_bytes.items():
        assert f"sha256 of {name} {hashlib.sha256(content).hexdigest()}" in description
    assert "5 (published: 50,000; " in description
    assert "2 (published: 10,000; " in description
    assert "\n" not in description


def test_the_published_number_of_records_is_not_remarked(cifar_folder, monkeypatch):
    """What is as it should be needs no note."""
    monkeypatch.setattr(module, "_PUBLISHED", {"train.bin": 5, "test.bin": 2})
    assert "published:" not in cifar100(cifar_folder).description


def test_a_folder_without_one_file_says_which_is_missing(cifar_folder):
    """Half a download is the usual accident."""
    (cifar_folder / "test.bin").unlink()
    with pytest.raises(
        FileError,
        match=r"cannot read .*test\.bin: No such file.*a folder with train\.bin and test\.bin",
    ):
        cifar100(cifar_folder)


def test_a_path_that_is_not_there_says_so(tmp_path):
    """And says what should be there."""
    with pytest.raises(
        FileError, match=r"cannot read .*nowhere: No such file.* or cifar-100-binary\.tar\.gz"
    ):
        cifar100(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["train.bin", "archive.tar.gz"])
def test_a_pipe_is_refused(cifar_folder, name):
    """Opening it would wait for its writer."""
    path = cifar_folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(FileError, match="it is not a regular file"):
        cifar100(cifar_folder if name == "train.bin" else path)


@settings(deadline=None, max_examples=25)
@given(records=st.integers(0, 3), left_over=st.integers(1, 3073))
def test_a_short_file_says_how_many_bytes_are_left_over_and_which_record_is_cut(
    records, left_over, tmp_path_factory
):
    """A download that stopped has whole records and then a part of one."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "test.bin").write_bytes(bytes(3074))
    (folder / "train.bin").write_bytes(bytes(3074 * records + left_over))
    with pytest.raises(
        FileError,
        match=rf"train\.bin has .* and {left_over:,} bytes left over: record {records} is cut off",
    ):
        cifar100(folder)


def test_an_empty_file_is_refused(cifar_folder):
    """Its size is a multiple of everything."""
    (cifar_folder / "train.bin").write_bytes(b"")
    with pytest.raises(FileError, match=r"train\.bin is empty: it needs records of 3,074 bytes"):
        cifar100(cifar_folder)


@pytest.mark.parametrize(
    "foreign", [(0, 20, "coarse", 19), (1, 100, "fine", 99)], ids=["coarse", "fine"]
)
def test_a_label_out_of_range_names_the_record(foreign, cifar_folder, cifar_bytes):
    """A foreign file of the right size is told by its labels, and the first bad record is where to
    look.
    """
    byte, label, which, last = foreign
    content = bytearray(cifar_bytes["train.bin"])
    content[3 * 3074 + byte] = label
    content[4 * 3074 + byte] = 255
    (cifar_folder / "train.bin").write_bytes(content)
    with pytest.raises(
        FileError, match=rf"record 3 \(from byte 9,222\) has {which} label {label}, .* 0\.\.{last}:"
    ):
        cifar100(cifar_folder)


def test_the_largest_labels_are_accepted(cifar_folder, cifar_bytes):
    """19 and 99 are classes like the others."""
    content = bytearray(cifar_bytes["train.bin"])
    content[:2] = bytes([19, 99])
    (cifar_folder / "train.bin").write_bytes(content)
    assert cifar100(cifar_folder).train_targets[0] == 99


def test_check_refuses_an_archive_of_another_md5_with_both_sums(cifar_bytes, write_archive):
    """Expected and found, so that the reader can compare with the page."""
    path = write_archive(members(cifar_bytes))
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    with pytest.raises(FileError, match=f"expected md5 {ARCHIVE_MD5}, found {md5}"):
        cifar100(path, check=True)


def test_check_passes_an_archive_of_the_expected_md5_and_says_so(
    cifar_bytes, write_archive, monkeypatch
):
    """The sum is that of the whole file as it lies on disk."""
    path = write_archive(members(cifar_bytes))
    monkeypatch.setattr(module, "ARCHIVE_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    assert "archive as published" in cifar100(path, check=True).description
    assert "archive as published" not in cifar100(path).description


def test_the_recorded_md5_is_the_published_one():
    """From the table of https://www.cs.toronto.edu/~kriz/cifar.html, "CIFAR-100 binary version"."""
    assert ARCHIVE_MD5 == "03b5dce01913d631647c71ecec9e9cb8"


def test_check_with_a_folder_is_refused(cifar_folder):
    """Only the archive has a published sum; to pass in silence would claim what was not looked at."""
    with pytest.raises(
        SettingError, match=r"check compares the md5 of the whole archive, but .* is a folder"
    ):
        cifar100(cifar_folder, check=True)


def test_an_archive_without_a_member_names_it(cifar_bytes, write_archive):
    """The python version of CIFAR-100 is the archive most often taken by mistake."""
    path = write_archive(
        {"cifar-100-python/train": b"x", MEMBER + "test.bin": cifar_bytes["test.bin"]}
    )
    with pytest.raises(
        FileError,
        match=r"has no member cifar-100-binary/train\.bin: it is not CIFAR-100's binary version",
    ):
        cifar100(path)


def test_a_short_member_is_refused_like_a_short_file(cifar_bytes, write_archive):
    """The structure is checked wherever the bytes come from."""
    short = {**cifar_bytes, "test.bin": cifar_bytes["test.bin"][:-1]}
    with pytest.raises(
        FileError,
        match=r"test\.bin has 6,147 bytes, which is 1 x 3,074 and 3,073 bytes left over: record 1 is",
    ):
        cifar100(write_archive(members(short)))


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    """A saved error page often has the archive's name."""
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(FileError, match=r"is no complete \.tar\.gz: not a gzip file"):
        cifar100(path)


def test_an_archive_that_is_cut_off_is_refused_wherever_the_cut_is(cifar_bytes, write_archive):
    """A cut in the header, in a member, or in the checksum: each fails in another library and must
    end in one message.
    """
    path = write_archive(members(cifar_bytes))
    whole = path.read_bytes()
    for length in (0, 5, 30, len(whole) // 3, len(whole) * 9 // 10):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"is no complete \.tar\.gz"):
            cifar100(path)


def test_an_archive_with_spoilt_bytes_is_refused(cifar_bytes, write_archive):
    """Compressed data that cannot be undone is the archive's fault, not a traceback."""
    path = write_archive(members(cifar_bytes))
    spoilt = bytearray(path.read_bytes())
    spoilt[200:400] = bytes([255]) * 200
    path.write_bytes(spoilt)
    with pytest.raises(FileError, match=r"cifar-100-binary\.tar\.gz"):
        cifar100(path)


def test_a_member_that_is_a_link_is_refused(tmp_path, cifar_bytes):
    """A link leads to wherever its maker wants."""
    path = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        link = tarfile.TarInfo(MEMBER + "train.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
        plain = tarfile.TarInfo(MEMBER + "test.bin")
        plain.size = len(cifar_bytes["test.bin"])
        archive.addfile(plain, io.BytesIO(cifar_bytes["test.bin"]))
    with pytest.raises(FileError, match=r"train\.bin is a link or another special member"):
        cifar100(path)


def test_members_by_other_paths_are_not_taken_and_nothing_is_written_to_disk(
    cifar_bytes, write_archive, tmp_path
):
    """Only the two exact names count, and reading in place leaves no file behind."""
    tricks = {"../train.bin": b"x", "/tmp/test.bin": b"x", "cifar-100-binary/../train.bin": b"x"}
    path = write_archive({**tricks, **members(cifar_bytes)})
    assert len(cifar100(path).train_targets) == 5
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
