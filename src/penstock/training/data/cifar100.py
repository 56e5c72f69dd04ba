"""CIFAR-100 in its binary form, from files that the user has; nothing is downloaded.

A file is records of 3,074 bytes and nothing else:

    | coarse label | fine label | red 32x32 | green 32x32 | blue 32x32 |
    |  1 byte 0-19 | 1 byte 0-99| 1024 bytes, row by row, each colour    |

Source: https://www.cs.toronto.edu/~kriz/cifar.html, "CIFAR-100 binary version"; Krizhevsky 2009.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import FileError, SettingError
from penstock.files.regular import check_regular, open_file
from penstock.training.data.batches import Dataset
from penstock.training.data.catalogue import register

if TYPE_CHECKING:
    import torch

#: md5 of the published cifar-100-binary.tar.gz, as its page says.
ARCHIVE_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
#: Bytes of one record.
RECORD_BYTES = 2 + 3 * 32 * 32
#: Mean and standard deviation of red, green and blue over the published training images, of values
#: 0..1.
MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)

_FOLDER, _TRAIN, _TEST = "cifar-100-binary", "train.bin", "test.bin"
_PUBLISHED = {_TRAIN: 50_000, _TEST: 10_000}


@register(
    "cifar100",
    usage="cifar100:PATH",
    takes=("check",),
    source=(
        "a folder with train.bin and test.bin, or cifar-100-binary.tar.gz from "
        "www.cs.toronto.edu/~kriz/cifar.html"
    ),
)
def cifar100(path: str | Path, *, check: bool = False) -> Dataset:
    """Colour images: inputs (n, 3, 32, 32) float32, normalised by `MEAN` and `STD`, targets the
    fine labels (n,) in 0..99.

    The published files have 50,000 images to train and 10,000 to test (737 MB as float32); any
    other number of records is accepted too, and the description says so. It also has the sha256 of
    both files.

    Args:
        path: the folder of train.bin and test.bin, or one of the two, or cifar-100-binary.tar.gz,
            which is read in place.
        check: compare the archive's md5 with the published one first.

    Raises:
        FileError: a file is missing, truncated, or of another kind, or `check` is set and the
            archive is not the published one.
        SettingError: `check` is set with files that are no archive.
    """
    source = Path(path)
    if source.name in _PUBLISHED:
        source = source.parent
    if source.is_dir():
        if check:
            raise SettingError(
                f"check compares the md5 of the whole archive, but {source} is a folder: "
                "give cifar-100-binary.tar.gz, or leave check out"
            )
        raw = {name: _read(source / name) for name in _PUBLISHED}
    else:
        raw = _read_archive(source, check=check)
    train_inputs, train_targets = _parse(raw[_TRAIN], f"{source}: {_TRAIN}")
    test_inputs, test_targets = _parse(raw[_TEST], f"{source}: {_TEST}")
    checked = ", archive as published" if check else ""
    return Dataset(
        name="cifar100",
        train_inputs=train_inputs,
        train_targets=train_targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        classes=100,
        task="classify",
        description=(
            f"CIFAR-100 from {source}{checked}, 3x32x32 pixels, 100 classes: "
            f"{_describe_file(_TRAIN, raw)} to train, {_describe_file(_TEST, raw)} to test"
        ),
    )


def _describe_file(name: str, raw: dict[str, bytes]) -> str:
    """Describe a file as in `2 (published: 50,000; sha256 of train.bin …)`."""
    records = len(raw[name]) // RECORD_BYTES
    differs = f"published: {_PUBLISHED[name]:,}; " if records != _PUBLISHED[name] else ""
    return f"{records:,} ({differs}sha256 of {name} {hashlib.sha256(raw[name]).hexdigest()})"


def _read(path: Path) -> bytes:
    """Return the contents of a file. Raises FileError if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> FileError:
    """Return the error for a file that cannot be read."""
    return FileError(
        f"cannot read {path}: {error.strerror or error}. "
        f"CIFAR-100 is a folder with {_TRAIN} and {_TEST}, or {_FOLDER}.tar.gz"
    )


def _read_archive(path: Path, *, check: bool) -> dict[str, bytes]:
    """Return the contents of both files in an archive. Nothing is extracted to disk, so a member's
    name, link or mode can do no harm.
    """
    name_of_member = {f"{_FOLDER}/{name}": name for name in _PUBLISHED}
    try:
        check_regular(path)
        if check:
            _check_md5(path)
        with tarfile.open(path, "r:gz") as archive:
            raw = _read_members(path, archive, name_of_member)
    except (FileNotFoundError, PermissionError) as error:
        raise _unreadable(path, error) from error
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise FileError(
            f"{path} is no complete .tar.gz: {error}. Download it again, or give the folder of "
            f"{_TRAIN} and {_TEST}"
        ) from error
    missing = [member for member, name in name_of_member.items() if name not in raw]
    if missing:
        raise FileError(
            f"{path} has no member {' and no member '.join(missing)}: it is not CIFAR-100's binary "
            "version"
        )
    return raw


def _read_members(
    path: Path, archive: tarfile.TarFile, name_of_member: Mapping[str, str]
) -> dict[str, bytes]:
    """Return the contents of those members that the archive has, by their short names.

    Raises:
        FileError: a member is not a plain file.
    """
    raw: dict[str, bytes] = {}
    # One pass in the archive's own order: seeking back in a gzip file would decompress it again
    # from the start.
    for member in archive:
        name = name_of_member.get(member.name)
        if name is None or name in raw:
            continue
        if not member.isreg() or member.issparse():
            raise FileError(
                f"{path}: {member.name} is a link or another special member, and must be a plain "
                "file"
            )
        content = archive.extractfile(member)
        assert content is not None, "a plain file has content"
        raw[name] = content.read()
        if len(raw) == len(name_of_member):
            break
    return raw


def _check_md5(path: Path) -> None:
    """Refuse an archive that is not the published one."""
    with path.open("rb") as archive:
        digest = hashlib.file_digest(archive, lambda: hashlib.md5(usedforsecurity=False))
    md5 = digest.hexdigest()
    if md5 != ARCHIVE_MD5:
        raise FileError(
            f"{path} is not the published {_FOLDER}.tar.gz: expected md5 {ARCHIVE_MD5}, found "
            f"{md5}. Download it again, or leave check out if it is meant to differ"
        )


def _parse(raw: bytes, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, 3, 32, 32) float32, normalised, and fine labels (n,) int64.

    Args:
        raw: contents of a file.
        where: the file, for messages.
    """
    import numpy as np
    import torch

    count, remainder = divmod(len(raw), RECORD_BYTES)
    if remainder:
        raise FileError(
            f"{where} has {len(raw):,} bytes, which is {count:,} x {RECORD_BYTES:,} and "
            f"{remainder:,} bytes left over: record {count:,} is cut off, or this is no CIFAR-100 "
            "binary file"
        )
    if not count:
        raise FileError(f"{where} is empty: it needs records of {RECORD_BYTES:,} bytes")
    records = np.frombuffer(raw, dtype=np.uint8).reshape(count, RECORD_BYTES)
    for column, (label_kind, classes) in enumerate((("coarse", 20), ("fine", 100))):
        labels = records[:, column]
        if labels.max() >= classes:
            record = int(np.argmax(labels >= classes))
            raise FileError(
                f"{where}: record {record:,} (from byte {record * RECORD_BYTES:,}) has "
                f"{label_kind} label {labels[record]}, but CIFAR-100 has 0..{classes - 1}: this is "
                "another file"
            )
    images = torch.from_numpy(records[:, 2:].astype(np.float32)).view(count, 3, 32, 32)
    # In place, since a second copy of the published training images would take another 614 MB.
    images.sub_(torch.tensor(MEAN).view(3, 1, 1) * 255).div_(torch.tensor(STD).view(3, 1, 1) * 255)
    return images, torch.from_numpy(records[:, 1].astype(np.int64))
