"""Durable writing and verified reading of the files of a checkpoint.

`checkpoint.json` has the SHA-256 of every file and one of its own content. It is SHA-256 and not a
cyclic checksum because `sha256sum` can verify it by hand, because no two files share it, and
because processors with SHA instructions hash 1.5 GB/s, about the bandwidth of a disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from penstock.checkpoint.checkpoint_index import INDEX, Checkpoint, FileSum
from penstock.checkpoint.optimizer_checkpoint import Facts
from penstock.errors import CheckpointDamaged, FileError, SettingError
from penstock.files.json_values import json_value
from penstock.files.read import parse_json, validate
from penstock.files.regular import open_file
from penstock.files.text import shorten
from penstock.store import sync_file, sync_folder

#: Largest header that is read, in bytes; safetensors itself has this limit.
_MAX_HEADER_BYTES = 100_000_000
#: Values of a header at most: 6 of each tensor, and about 20 of each parameter's optimizer state.
_MAX_HEADER_VALUES = 10_000_000


@dataclass(frozen=True)
class _TensorEntry:
    """A tensor in the header of a safetensors file; the offsets are those of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        tensors: dtype (in the notation of safetensors) and shape by tensor name.
        metadata: the texts that were saved with the tensors.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    metadata: Mapping[str, str]

    @property
    def facts(self) -> dict[str, Facts]:
        """By parameter, the optimizer state that is not tensors.

        Raises:
            ValueError: the metadata does not have the form of `Facts`.
        """
        text = self.metadata.get("optimizer", "{}")
        # States of optimizers may hold infinities, such as the best loss so far.
        return parse_json(text, dict[str, Facts], "its optimizer state", finite=False)


# -- writing -------------------------------------------------------------------------------------


def write_file(target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileSum:
    """Write one file atomically and wait until it is on the disk.

    Args:
        target: the file.
        tensors: tensors on the CPU, by name.
        metadata: texts to be saved with them.

    Returns:
        The size and the checksums of the file.

    Raises:
        FileError: the file cannot be written.
        SettingError: a tensor has a dtype that safetensors does not support.
    """
    partial = target.with_suffix(".partial")
    storable, texts = _storable(tensors, metadata)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(storable, partial, metadata=texts)
        # The name appears only when the content is on the disk: no reader sees a part of a file,
        # even after a loss of power. The folder is synchronised for the name itself.
        sync_file(partial)
        sums = file_sum(partial)
        partial.rename(target)
        sync_folder(target.parent)
    except KeyError as error:
        raise _dtype_error(error) from error
    except (OSError, SafetensorError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write the checkpoint {target.parent}: {reason}") from error
    finally:
        # The error above counts, not this one.
        with suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
    return sums


def write_in_memory(
    target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileSum:
    """Write a file in memory (memfd), by its path in /proc, in the form of `write_file`.

    It is written in place, since nothing can be renamed there.

    Raises:
        OSError, ValueError: the file cannot be written.
        SettingError: a tensor has a dtype that safetensors does not support.
    """
    storable, texts = _storable(tensors, metadata)
    try:
        content = save(storable, texts)
    except KeyError as error:
        raise _dtype_error(error) from error
    target.write_bytes(content)
    return file_sum(target)


def _storable(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors of dtypes that safetensors has, and the texts from which they are restored."""
    storable, complex_names = dict(tensors), []
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128:  # unknown to safetensors: saved as pairs of doubles
            storable[name] = torch.view_as_real(tensor.resolve_conj())
            complex_names.append(name)
    texts = dict(metadata)
    if complex_names:
        texts["complex128"] = json.dumps(complex_names)
    return storable, texts


def _dtype_error(error: KeyError) -> SettingError:
    """Return the error for a dtype that safetensors does not have."""
    return SettingError(f"a checkpoint cannot hold tensors of {error.args[0]}")


def remove_others(folder: Path, names: Collection[str]) -> None:
    """Delete the files of other checkpoints and of interrupted saves.

    Args:
        folder: the folder of the checkpoints.
        names: the names of the files to keep.
    """
    # Files that are in no index only take space.
    with suppress(OSError):
        for file in folder.glob("step-*"):
            if file.name not in names and file.suffix in (".safetensors", ".partial"):
                file.unlink(missing_ok=True)


def file_sum(path: Path) -> FileSum:
    """Read a file and return its size and checksums.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no complete header.
    """
    with open_file(path) as content:
        header_sha256 = hashlib.sha256(_header_bytes(content.read(8), content)).hexdigest()
        content.seek(0)
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        return FileSum(content.tell(), sha256, header_sha256)


# -- reading -------------------------------------------------------------------------------------


def read_header(folder: Path, name: str, index: Checkpoint) -> Header:
    """Read and verify the header of a file.

    Size, header checksum and identity are compared with the index.

    Args:
        folder: the folder of the checkpoint.
        name: a file that the index names.
        index: the index.

    Raises:
        FileError: the file is missing, damaged, or of another checkpoint.
    """
    try:
        with open_file(folder / name) as content:
            raw = _header_bytes(content.read(8), content)
            size = content.seek(0, 2)
        header = _parse_header(raw)
    except (OSError, ValueError) as error:
        raise _read_error(folder, name, error) from error
    identity = header.metadata.get("identity", "")
    if index.schema > 1 and identity != index.identity and identity:
        raise CheckpointDamaged(
            f"{name} of {folder}: belongs to the checkpoint of step "
            f"{header.metadata.get('step', '?')} (identity {identity[:12]}), not to that of step "
            f"{index.step} (identity {index.identity[:12]}), which {INDEX} describes. Copy all "
            "files of one checkpoint into a folder of their own"
        )
    expected = index.sums.get(name)
    if expected is not None:
        if size != expected.bytes:
            damage = f"it has {size:,} bytes, and was written with {expected.bytes:,}"
            raise _damage_error(folder, name, damage)
        if hashlib.sha256(raw).hexdigest() != expected.header_sha256:
            raise _damage_error(folder, name, "the checksum of its header has changed")
    return header


def check_content(folder: Path, name: str, index: Checkpoint) -> None:
    """Verify the checksum of a whole file; checkpoints of schema 1 have none.

    Raises:
        FileError: the file has changed since it was written, or cannot be read.
    """
    expected = index.sums.get(name)
    if expected is None:
        return
    try:
        with open_file(folder / name) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise _read_error(folder, name, error) from error
    if digest != expected.sha256:
        damage = f"its SHA-256 is {digest[:12]}…, and was {expected.sha256[:12]}…"
        raise _damage_error(folder, name, damage)


def read_tensors(folder: Path, name: str, keys: Collection[str]) -> dict[str, Tensor]:
    """Read the named tensors of a file.

    Raises:
        FileError: the file cannot be read.
    """
    try:
        with safe_open(folder / name, framework="pt") as content:
            metadata = content.metadata() or {}
            complex_names = set(parse_json(metadata.get("complex128", "[]"), list[str], name))
            # Cloned, because safetensors returns views of the mapped file: they would change, or
            # crash the process, when the file is overwritten.
            tensors = {key: content.get_tensor(key).clone() for key in keys}
    except (OSError, SafetensorError, ValueError) as error:
        raise _read_error(folder, name, error) from error
    for key in complex_names & tensors.keys():
        tensors[key] = torch.view_as_complex(tensors[key])
    return tensors


def is_visible(folder: Path, name: str, expected: FileSum) -> bool:
    """Whether a file of another rank is visible here with the expected size and header."""
    try:
        with open_file(folder / name) as content:
            raw = _header_bytes(content.read(8), content)
            size = content.seek(0, 2)
    except (OSError, ValueError):
        return False
    # The header contains the checkpoint's identity, so its checksum identifies the file.
    return (size, hashlib.sha256(raw).hexdigest()) == (expected.bytes, expected.header_sha256)


def _header_bytes(length: bytes, content: Any) -> bytes:
    """Read the header after its length field; return both.

    Args:
        length: the first 8 bytes of the file, the header's length in little-endian order.
        content: the open file, positioned after them.

    Raises:
        ValueError: the file ends within the header, or the length is impossible.
    """
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > _MAX_HEADER_BYTES:
        raise ValueError("its header is cut off, or its length is damaged")
    header: bytes = content.read(size)
    if len(header) < size:
        raise ValueError("its header is cut off")
    return length + header


def _parse_header(raw: bytes) -> Header:
    """Parse a header that begins with its 8-byte length.

    Raises:
        ValueError: it is no header of a safetensors file.
    """
    text = raw[8:].decode()
    json_value(text, "its header", max_values=_MAX_HEADER_VALUES)
    kind = "header of tensors"
    entries = validate(text, dict[str, _TensorEntry | dict[str, str]], "its header", kind=kind)
    metadata = entries.pop("__metadata__", {})
    tensors = {
        name: (entry.dtype, entry.shape)
        for name, entry in entries.items()
        if isinstance(entry, _TensorEntry)
    }
    if not isinstance(metadata, dict) or len(tensors) < len(entries):
        raise ValueError("its header has an entry that is no tensor")
    return Header(tensors, metadata)


def _read_error(folder: Path, name: str, error: BaseException) -> CheckpointDamaged:
    """Return the error for a file that cannot be opened or parsed."""
    # The reasons of safetensors quote what stands in the file.
    reason = getattr(error, "strerror", None) or shorten(str(error), 300)
    advice = ""
    if isinstance(error, FileNotFoundError):
        advice = ". A checkpoint must be in one folder that all ranks and hosts can read"
    return CheckpointDamaged(f"cannot read {name} of the checkpoint {folder}: {reason}{advice}")


def _damage_error(folder: Path, name: str, damage: str) -> CheckpointDamaged:
    """Return the error for a file that is not what was written."""
    return CheckpointDamaged(
        f"{name} of the checkpoint {folder} is damaged: {damage}. Load another checkpoint, or "
        "restore this file as it was written"
    )
