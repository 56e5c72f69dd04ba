"""The files of a checkpoint: how they are written so that they outlast a failure, and checked
before anything is taken from them.

Every file has a SHA-256 in `checkpoint.json`, which has one of its own. SHA-256 and not a cyclic
checksum: `sha256sum` checks it by hand, it tells any two files apart, and processors with
instructions for it read 1.5 GB/s, about what a disk gives.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import FileError, SettingError
from penstock.runtime.own_state import Facts
from penstock.store import read_json, sync_file, sync_folder, write_json

#: Schema 1, of version 0.1, has neither identity nor checksums.
SCHEMAS = (1, 2)
INDEX = "checkpoint.json"
_NAME = re.compile(r"step-\d{8,}-stage-\d{4,}(-copy-\d+)?-[0-9a-f]{16}\.safetensors")
_MOST_STEPS = 2**53
#: Bytes of a header that are read at most; safetensors itself has this limit.
_MOST_HEADER = 100_000_000


@dataclass(frozen=True)
class FileSum:
    """Size and checksums of a file; `header_sha256` is of what comes before the tensors: names,
    shapes and metadata.
    """

    bytes: int
    sha256: str
    header_sha256: str


@dataclass(frozen=True)
class RuleFacts:
    """The weight rule of an asynchronous run.

    Attributes:
        name: of the rule.
        pipelines: copies of the weights that take turns.
        copies: how many of each stage have optimizers of their own.
        keeps: whether the checkpoint has anything of it.
    """

    name: str
    pipelines: int
    copies: int
    keeps: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint consists of: the content of `checkpoint.json`.

    Attributes:
        step: batches trained.
        fingerprint: of the model's layers and shapes.
        files: names, in the order of the stages.
        scaler: the loss scaler's state.
        schedulers, scheduler_kinds: the state of learning-rate schedulers as JSON, and the names of
        their classes. identity: the same in every file of the checkpoint, and in no other one's.
        sums: by file, its size and checksums. rule: the weight rule of an asynchronous run.
        checksum: SHA-256 of all that is above.
    """

    step: int
    fingerprint: str
    files: tuple[str, ...]
    scaler: dict[str, float] | None = None
    schedulers: tuple[str, ...] = ()
    schema: int = SCHEMAS[-1]
    identity: str = ""
    sums: dict[str, FileSum] = field(default_factory=dict)
    scheduler_kinds: tuple[str, ...] = ()
    rule: RuleFacts | None = None
    checksum: str = ""

    def sum(self) -> str:
        """What `checksum` has to be."""
        content = {key: value for key, value in asdict(self).items() if key != "checksum"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Header:
    """What stands before the tensors of a file: their dtypes and shapes by name, and its metadata."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    metadata: Mapping[str, str]

    @property
    def facts(self) -> dict[str, Facts]:
        """By parameter, what its optimizer keeps besides tensors."""
        from pydantic import TypeAdapter  # loaded here, as in the store: most runs load nothing

        return TypeAdapter(dict[str, Facts]).validate_json(self.metadata.get("optimizer", "{}"))


# -- writing
# ------------------------------------------------------------------------------------------------------------------


def write_file(target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileSum:
    """Write one file, whole or not at all, and wait until the disk has it.

    Raises:
        FileError: it cannot be written.
        SettingError: a tensor is of a dtype that no file can hold.
    """
    partial = target.with_suffix(".partial")
    plain, doubled = dict(tensors), []
    for name, tensor in tensors.items():
        if tensor.dtype is torch.complex128:  # safetensors has no such dtype: as pairs of doubles
            plain[name] = torch.view_as_real(tensor.resolve_conj())
            doubled.append(name)
    more = {"complex128": json.dumps(doubled)} if doubled else {}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file(plain, partial, metadata={**metadata, **more})
        sync_file(partial)
        sums = file_sum(partial)
        partial.rename(target)
        sync_folder(target.parent)
    except KeyError as error:
        raise SettingError(f"a checkpoint cannot hold tensors of {error.args[0]}") from error
    except (OSError, SafetensorError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write the checkpoint {target.parent}: {reason}") from error
    finally:
        with suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
    return sums


def write_index(folder: Path, index: Checkpoint) -> None:
    """Complete a checkpoint: from here on it is the one in the folder."""
    whole = asdict(index) | {"sums": index.sums, "rule": index.rule, "checksum": index.sum()}
    write_json(folder / INDEX, Checkpoint(**whole), durable=True)
    sync_folder(folder.parent)  # the folder itself may be new


def remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove the files of other checkpoints, and what a save that was stopped has left."""
    with suppress(OSError):
        for file in folder.glob("step-*"):
            if file.name not in names and file.suffix in (".safetensors", ".partial"):
                file.unlink(missing_ok=True)


def file_sum(path: Path) -> FileSum:
    """Size and checksums of a file as it is on the disk.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as content:
        header = hashlib.sha256(_header_bytes(content.read(8), content)).hexdigest()
        content.seek(0)
        whole = hashlib.file_digest(content, "sha256").hexdigest()
        return FileSum(content.tell(), whole, header)


# -- reading
# ------------------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Checkpoint:
    """The index of the checkpoint in a folder, once it is what was written.

    Raises:
        FileError: there is no checkpoint, or its index is damaged.
    """
    try:
        has_index = (folder / INDEX).exists()
        files = not has_index and any(folder.glob("step-*.safetensors"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read the checkpoint {folder}: {reason}") from error
    if not has_index:
        more = " The files there are of a save that did not come to its end." if files else ""
        raise FileError(
            f"{folder} holds no checkpoint: there is no {INDEX}, which is written when all else is.{more}"
        )
    index = read_json(folder / INDEX, Checkpoint, SCHEMAS)
    where = folder / INDEX
    new = (index.identity, index.sums, index.scheduler_kinds, index.rule, index.checksum)
    if index.schema == 1 and any(new):
        raise FileError(f"{where} is damaged: it says schema 1 and has what schema 2 has")
    if index.schema > 1 and index.checksum != index.sum():
        raise FileError(
            f"{where} is damaged: its content has the checksum {index.sum()[:12]}…, and it says {index.checksum[:12]}…. Load "
            "another checkpoint, or put back this file as it was written"
        )
    strange = [name for name in index.files if not _NAME.fullmatch(name)]
    if strange:
        raise FileError(
            f"{where} is damaged: it names {strange[0][:80]!r}, which is no file of a checkpoint"
        )
    if not index.files or len(set(index.files)) < len(index.files):
        raise FileError(f"{where} is damaged: it names no file, or one of them twice")
    if not 0 <= index.step < _MOST_STEPS:
        raise FileError(f"{where} is damaged: its step is {index.step:.6g}")
    if index.schema > 1 and set(index.sums) != set(index.files):
        raise FileError(f"{where} is damaged: it has not one checksum for each file")
    return index


def read_header(folder: Path, name: str, index: Checkpoint) -> Header:
    """The header of a file that the index names, checked: size, checksum, and which checkpoint it
    belongs to.

    Raises:
        FileError: it is missing, damaged, or of another checkpoint.
    """
    try:
        with (folder / name).open("rb") as content:
            raw = _header_bytes(content.read(8), content)
            size = content.seek(0, 2)
        header = _parsed(raw)
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise _unreadable(folder, name, error) from error
    identity = header.metadata.get("identity", "")
    if index.schema > 1 and identity != index.identity and identity:
        raise FileError(
            f"{name} of {folder}: belongs to the checkpoint of step {header.metadata.get('step', '?')} (identity "
            f"{identity[:12]}), not to that of step {index.step} (identity {index.identity[:12]}), which {INDEX} describes. Put "
            "the files of one checkpoint together"
        )
    expected = index.sums.get(name)
    if expected is not None:
        if size != expected.bytes:
            raise _damaged(folder, name, f"it has {size:,} bytes, and had {expected.bytes:,}")
        if hashlib.sha256(raw).hexdigest() != expected.header_sha256:
            raise _damaged(folder, name, "its header has another checksum than it had")
    return header


def check_content(folder: Path, name: str, index: Checkpoint) -> None:
    """Hold the whole file against its checksum; of schema 1 there is none.

    Raises:
        FileError: it is not what was written.
    """
    expected = index.sums.get(name)
    if expected is None:
        return
    try:
        with (folder / name).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(folder, name, error) from error
    if digest != expected.sha256:
        raise _damaged(
            folder, name, f"its SHA-256 is {digest[:12]}…, and was {expected.sha256[:12]}…"
        )


def read_tensors(folder: Path, name: str, keys: Collection[str]) -> dict[str, Tensor]:
    """Some tensors of a file, by name.

    Raises:
        FileError: it cannot be read.
    """
    try:
        with safe_open(folder / name, framework="pt") as content:
            doubled = set(json.loads((content.metadata() or {}).get("complex128", "[]")))
            # What it returns is a view of the file's pages, and would change, or crash, when the
            # file does.
            tensors = {key: content.get_tensor(key).clone() for key in keys}
    except (OSError, SafetensorError, ValueError) as error:
        raise _unreadable(folder, name, error) from error
    return {
        key: torch.view_as_complex(tensor) if key in doubled else tensor
        for key, tensor in tensors.items()
    }


def is_visible(folder: Path, name: str, expected: FileSum) -> bool:
    """Whether a file that another rank has written is there, as it was written."""
    try:
        with (folder / name).open("rb") as content:
            raw = _header_bytes(content.read(8), content)
            size = content.seek(0, 2)
    except (OSError, ValueError):
        return False
    # The header has the checkpoint's identity: no other file has the same.
    return (size, hashlib.sha256(raw).hexdigest()) == (expected.bytes, expected.header_sha256)


def _header_bytes(length: bytes, content: Any) -> bytes:
    """The header with the 8 bytes that say how long it is."""
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > _MOST_HEADER:
        raise ValueError("its header is cut off, or its length is damaged")
    raw: bytes = content.read(size)
    if len(raw) < size:
        raise ValueError("its header is cut off")
    return length + raw


def _parsed(raw: bytes) -> Header:
    entries = json.loads(raw[8:])
    metadata = entries.pop("__metadata__", {})
    tensors = {
        key: (str(value["dtype"]), tuple(map(int, value["shape"])))
        for key, value in entries.items()
    }
    return Header(tensors, {str(key): str(value) for key, value in metadata.items()})


def _unreadable(folder: Path, name: str, error: BaseException) -> FileError:
    reason = getattr(error, "strerror", None) or error
    more = ""
    if isinstance(error, FileNotFoundError):
        more = ". A checkpoint is in one folder, which all ranks and hosts see"
    return FileError(f"cannot read {name} of the checkpoint {folder}: {reason}{more}")


def _damaged(folder: Path, name: str, what: str) -> FileError:
    return FileError(
        f"{name} of the checkpoint {folder} is damaged: {what}. Load another checkpoint, or put back this file as it was written"
    )
