"""The index of a checkpoint, `checkpoint.json`: what belongs to it, with checksums.

The index is written last: a folder without one holds no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from penstock.errors import CheckpointDamaged, FileError
from penstock.files.read import read_json
from penstock.store import sync_folder, write_json

#: Schema 1, of version 0.1, has neither identity nor checksums; schema 2 has none of `_SCHEMA_3`.
SCHEMAS = (1, 2, 3)
#: Fields that schema 3 has added.
_SCHEMA_3 = ("hosts", "score", "averages", "aliases")
#: Name of the index in a checkpoint's folder. A folder without it is no checkpoint, so that it is
#: written last.
INDEX = "checkpoint.json"
#: Names of the files of an index. Any other is refused: one with a path in it would lead outside of
#: the folder.
_NAME = re.compile(r"step-\d{8,}-stage-\d{4,}(-copy-\d+)?-[0-9a-f]{16}\.safetensors")
#: Below this, JSON readers that hold numbers as doubles read a step exactly.
_MAX_STEPS = 2**53


@dataclass(frozen=True)
class FileSum:
    """Size and checksums of a file.

    Attributes:
        bytes: size of the file.
        sha256: checksum of the whole file.
        header_sha256: checksum of the header before the tensors: names, shapes and metadata.
    """

    bytes: int
    sha256: str
    header_sha256: str


@dataclass(frozen=True)
class RuleFacts:
    """The weight rule of an asynchronous run.

    Attributes:
        name: name of the rule.
        pipelines: number of copies of the weights that take turns.
        copies: number of copies of each stage that have their own optimizers.
        keeps: whether the checkpoint has state of the rule.
    """

    name: str
    pipelines: int
    copies: int
    keeps: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """The index of a checkpoint: the content of `checkpoint.json`.

    Attributes:
        step: number of trained batches.
        fingerprint: fingerprint of the model's layers and shapes.
        files: file names, in the order of the stages.
        scaler: state of the loss scaler.
        schedulers: states of the learning-rate schedulers, as JSON.
        schema: version of this format.
        identity: random text that all files of this checkpoint have, and no others.
        sums: size and checksums by file name.
        scheduler_kinds: class names of the schedulers.
        rule: the weight rule of an asynchronous run.
        hosts: by file name the host that has it, if every host wrote to its own disk; else empty.
        score: how good the weights are, lower is better: the loss on the test set, if it is known.
        averages: number of updates of each running average of the weights (`Pipeline.ema`).
        aliases: further names of tensors that the model has under several, and the name under
            which each is saved.
        checksum: SHA-256 of all other fields.
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
    hosts: dict[str, str] = field(default_factory=dict)
    score: float | None = None
    averages: tuple[int, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    checksum: str = ""

    def content_sha256(self) -> str:
        """Compute the SHA-256 that `checksum` must have."""
        content = asdict(self)
        del content["checksum"]
        if self.schema < 3:
            # Older versions of Penstock did not have these fields when they computed the checksum.
            for name in _SCHEMA_3:
                del content[name]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_index(folder: Path, index: Checkpoint) -> None:
    """Complete a checkpoint: write its index, with its checksum, over that of the previous one."""
    write_json(folder / INDEX, replace(index, checksum=index.content_sha256()), durable=True)
    sync_folder(folder.parent)  # the folder itself may be new


def read_index(folder: Path) -> Checkpoint:
    """Read and verify the index of the checkpoint in a folder.

    Raises:
        FileError: there is no checkpoint, or its index is damaged.
    """
    path = folder / INDEX
    _check_has_index(folder)
    index = read_json(path, Checkpoint, SCHEMAS)
    damage = _index_damage(index)
    if damage:
        raise CheckpointDamaged(f"{path} is damaged: {damage}")
    return index


def _check_has_index(folder: Path) -> None:
    """Check that a folder has an index.

    Raises:
        FileError: it has none, or cannot be read.
    """
    try:
        has_index = (folder / INDEX).exists()
        has_files = not has_index and any(folder.glob("step-*.safetensors"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot read the checkpoint {folder}: {reason}") from error
    if not has_index:
        interrupted = " Its step files are from a save that was interrupted." if has_files else ""
        raise CheckpointDamaged(
            f"{folder} holds no checkpoint: there is no {INDEX}, which is written last."
            f"{interrupted}"
        )


def _index_damage(index: Checkpoint) -> str:
    """Return in what an index contradicts itself; empty if it does not."""
    damage = _checksum_damage(index)
    if damage:
        return damage
    foreign = [name for name in index.files if not _NAME.fullmatch(name)]
    if foreign:
        return f"it names {foreign[0][:80]!r}, which is not a file of a checkpoint"
    if not index.files or len(set(index.files)) < len(index.files):
        return "it names no file, or names a file twice"
    if not 0 <= index.step < _MAX_STEPS:
        return f"its step is {index.step:.6g}"
    if index.schema > 1 and set(index.sums) != set(index.files):
        return "its checksums are not those of its files, one for each"
    return ""


def _checksum_damage(index: Checkpoint) -> str:
    """Return how the schema or the checksum of an index contradicts its content."""
    schema_2_fields = (
        index.identity,
        index.sums,
        index.scheduler_kinds,
        index.rule,
        index.checksum,
    )
    if index.schema == 1 and any(schema_2_fields):
        return "its schema is 1, and it has fields of schema 2"
    schema_3_fields = (index.hosts, index.averages, index.aliases, index.score is not None)
    if index.schema < 3 and any(schema_3_fields):
        return f"its schema is {index.schema}, and it has fields of schema 3"
    if index.schema > 1 and index.checksum != index.content_sha256():
        return (
            f"its content has the checksum {index.content_sha256()[:12]}…, and the recorded one is "
            f"{index.checksum[:12]}…. Load another checkpoint, or restore this file as it was "
            "written"
        )
    return ""
