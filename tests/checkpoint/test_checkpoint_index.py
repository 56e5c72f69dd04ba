"""The index of a checkpoint: what it records comes back, and what contradicts itself is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, replace

import pytest

from penstock.checkpoint import checkpoint_index
from penstock.checkpoint.checkpoint_index import (
    INDEX,
    Checkpoint,
    FileSum,
    RuleFacts,
    read_index,
    write_index,
)
from penstock.errors import CheckpointDamaged, FileError

FIRST = "step-00000012-stage-0000-0123456789abcdef.safetensors"
SECOND = "step-00000012-stage-0001-copy-1-0123456789abcdef.safetensors"


def sums_of(*names):
    """Return sizes and checksums of files."""
    return {name: FileSum(100 + len(name), "ab" * 32, "cd" * 32) for name in names}


FULL = Checkpoint(
    step=12,
    fingerprint="f00",
    files=(FIRST, SECOND),
    scaler={"scale": 8.0, "steps": 3.0, "skipped": 1.0},
    schedulers=('{"last_epoch": 2}',),
    identity="0123456789abcdef" * 2,
    sums=sums_of(FIRST, SECOND),
    scheduler_kinds=("torch.optim.lr_scheduler.StepLR",),
    rule=RuleFacts("stash", 2, 3, keeps=True),
    hosts={FIRST: "a", SECOND: "b"},
    score=0.0,
    averages=(4, 0),
    aliases={"head.weight": "embedding.weight"},
)
PLAIN = Checkpoint(3, "f00", (FIRST,), sums=sums_of(FIRST))


def write_raw(folder, index, **changes):
    """Write the fields of an index as they are, with changed ones."""
    (folder / INDEX).write_text(json.dumps(asdict(index) | changes))


def write_complete(folder, index):
    """Write an index with the checksum that its schema has."""
    checksum = index.content_sha256() if index.schema > 1 else ""
    write_raw(folder, replace(index, checksum=checksum))


def damage_of(folder):
    """Return what the message says of a damaged index."""
    with pytest.raises(CheckpointDamaged) as refusal:
        read_index(folder)
    begin = f"{folder / INDEX} is damaged: "
    assert str(refusal.value).startswith(begin)
    return str(refusal.value).removeprefix(begin)


@pytest.mark.parametrize("index", [FULL, PLAIN], ids=["full", "plain"])
def test_an_index_comes_back_as_it_was_written(tmp_path, index):
    """With the checksum of its other fields as sorted JSON, which other programs can compute."""
    write_index(tmp_path, index)
    back = read_index(tmp_path)
    content = json.loads((tmp_path / INDEX).read_text())
    checksum = content.pop("checksum")
    assert back == replace(index, checksum=checksum)
    text = json.dumps(content, sort_keys=True)
    assert checksum == hashlib.sha256(text.encode()).hexdigest()
    assert content["schema"] == 3
    write_index(tmp_path, replace(index, step=13))
    assert read_index(tmp_path).step == 13


def test_an_index_and_the_name_of_its_folder_are_on_the_disk_when_it_is_complete(
    tmp_path, monkeypatch
):
    """Files that it replaces are deleted next. The folder may be new."""
    happened = []
    write_json = checkpoint_index.write_json

    def write(path, value, *, durable):
        happened.append((path, durable))
        write_json(path, value, durable=durable)

    def sync(folder):
        assert (tmp_path / INDEX).exists()
        happened.append(folder)

    monkeypatch.setattr(checkpoint_index, "write_json", write)
    monkeypatch.setattr(checkpoint_index, "sync_folder", sync)
    write_index(tmp_path, PLAIN)
    assert happened == [(tmp_path / INDEX, True), tmp_path.parent]


CHANGED = {
    "step": 13,
    "fingerprint": "f01",
    "files": [FIRST],
    "scaler": None,
    "schedulers": [],
    "identity": "",
    "sums": {},
    "scheduler_kinds": [],
    "rule": None,
    "hosts": {},
    "score": 1.0,
    "averages": [0, 4],
    "aliases": {},
    "checksum": "0" * 64,
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_any_field_is_seen_by_the_checksum(tmp_path, name):
    """A step or a learning rate of another run would else be taken silently."""
    assert CHANGED.keys() | {"schema"} == {field.name for field in fields(Checkpoint)}
    write_complete(tmp_path, FULL)
    content = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(content | {name: CHANGED[name]}))
    damage = damage_of(tmp_path)
    assert damage.startswith("its content has the checksum ")
    recorded = ("0" * 64 if name == "checksum" else FULL.content_sha256())[:12]
    assert f"and the recorded one is {recorded}…. Load another checkpoint" in damage


def old(schema, **changes):
    """Return an index as an older version wrote it, with changed fields."""
    new = {"hosts": {}, "score": None, "averages": (), "aliases": {}}
    if schema == 1:
        new |= {"identity": "", "sums": {}, "scheduler_kinds": (), "rule": None}
    return replace(FULL, schema=schema, **(new | changes))


def test_checksums_of_schema_2_do_not_have_later_fields(tmp_path):
    """They were computed before these fields existed, and their files do not have them."""
    index = old(2)
    later = ("hosts", "score", "averages", "aliases", "checksum")
    content = {key: value for key, value in asdict(index).items() if key not in later}
    text = json.dumps(content, sort_keys=True)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / INDEX).write_text(json.dumps(content | {"checksum": checksum}))
    assert read_index(tmp_path) == replace(index, checksum=checksum)
    write_raw(tmp_path, replace(index, step=13, checksum=checksum))
    assert damage_of(tmp_path).startswith("its content has the checksum ")


def test_an_index_of_schema_1_has_neither_checksums_nor_an_identity(tmp_path):
    """It is read as it is."""
    write_complete(tmp_path, old(1))
    assert read_index(tmp_path) == old(1)


LATER = {
    "hosts": {FIRST: "a"},
    "score": 0.0,
    "averages": (0,),
    "aliases": {"a": "b"},
}
SECOND_SCHEMA = {
    "identity": "ab",
    "sums": sums_of(FIRST, SECOND),
    "scheduler_kinds": ("StepLR",),
    "rule": RuleFacts("stash", 1, 1),
    "checksum": "ab",
}


@pytest.mark.parametrize(
    ("schema", "later", "name"),
    [(1, 2, name) for name in SECOND_SCHEMA]
    + [(schema, 3, name) for schema in (1, 2) for name in LATER],
)
def test_fields_of_a_later_schema_are_refused(tmp_path, schema, later, name):
    """An index of schema 1 has no checksum, so that a changed schema would switch all checks off."""
    index = old(schema, **{name: (SECOND_SCHEMA | LATER)[name]})
    checksum = index.checksum or (index.content_sha256() if schema == 2 else "")
    write_raw(tmp_path, replace(index, checksum=checksum))
    assert damage_of(tmp_path) == f"its schema is {schema}, and it has fields of schema {later}"


@pytest.mark.parametrize(
    "name",
    [
        "step-00000012-stage-0000-0123456789abcdef.safetensors",
        "step-123456789-stage-12345-0123456789abcdef.safetensors",
        "step-00000012-stage-0000-copy-12-0123456789abcdef.safetensors",
    ],
)
def test_names_of_files_have_step_stage_copy_and_identity(tmp_path, name):
    """Numbers may be longer than usual."""
    write_complete(tmp_path, replace(PLAIN, files=(name,), sums=sums_of(name)))
    assert read_index(tmp_path).files == (name,)


@pytest.mark.parametrize(
    "name",
    [
        "../step-00000012-stage-0000-0123456789abcdef.safetensors",
        "step-0000012-stage-0000-0123456789abcdef.safetensors",
        "step-00000012-stage-000-0123456789abcdef.safetensors",
        "step-00000012-stage-0000-copy--0123456789abcdef.safetensors",
        "step-00000012-stage-0000-0123456789abcde.safetensors",
        "step-00000012-stage-0000-0123456789ABCDEF.safetensors",
        "step-00000012-stage-0000-0123456789abcdef.safetensors\n",
        "step-00000012-stage-0000-0123456789abcdefxsafetensors",
        "step-00000012-stage-0000-0123456789abcdef",
        "x" * 300,
    ],
)
def test_other_names_are_refused_though_the_checksum_is_right(tmp_path, name):
    """A name with a path would lead out of the folder; the message has its first 80 characters."""
    write_complete(tmp_path, replace(PLAIN, files=(FIRST, name), sums=sums_of(FIRST, name)))
    assert damage_of(tmp_path) == f"it names {name[:80]!r}, which is not a file of a checkpoint"


CONTRADICTIONS = {
    "no file": ({"files": (), "sums": {}}, "it names no file, or names a file twice"),
    "a file twice": ({"files": (FIRST, FIRST)}, "it names no file, or names a file twice"),
    "no checksum of a file": (
        {"files": (FIRST, SECOND)},
        "its checksums are not those of its files, one for each",
    ),
    "a checksum of no file": (
        {"sums": sums_of(FIRST, SECOND)},
        "its checksums are not those of its files, one for each",
    ),
    "no checksums in schema 2": (
        {"sums": {}, "schema": 2},
        "its checksums are not those of its files, one for each",
    ),
    "a step below 0": ({"step": -1}, "its step is -1"),
    "a step that doubles do not have": ({"step": 2**53}, "its step is 9.0072e+15"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_index_that_contradicts_itself_is_refused_though_its_checksum_is_right(tmp_path, name):
    """Any program can compute the checksum of what it has made up."""
    changes, message = CONTRADICTIONS[name]
    write_complete(tmp_path, replace(PLAIN, **changes))
    assert damage_of(tmp_path) == message


@pytest.mark.parametrize("step", [0, 2**53 - 1])
def test_all_steps_that_doubles_have_are_accepted(tmp_path, step):
    """Of a run that has not begun, and of the longest one."""
    write_complete(tmp_path, replace(PLAIN, step=step))
    assert read_index(tmp_path).step == step


def test_a_folder_without_an_index_is_no_checkpoint(tmp_path):
    """The index is written last: files without one are of a save that was interrupted."""
    message = f"{tmp_path} holds no checkpoint: there is no checkpoint.json, which is written last."
    with pytest.raises(CheckpointDamaged) as refusal:
        read_index(tmp_path)
    assert str(refusal.value) == message
    (tmp_path / "step-notes.txt").write_text("of the user")
    with pytest.raises(CheckpointDamaged) as refusal:
        read_index(tmp_path)
    assert str(refusal.value) == message
    (tmp_path / FIRST).write_text("")
    with pytest.raises(CheckpointDamaged) as refusal:
        read_index(tmp_path)
    assert str(refusal.value) == (f"{message} Its step files are from a save that was interrupted.")


def test_a_folder_that_cannot_be_looked_into_is_no_damage(tmp_path, monkeypatch):
    """The reason is that of the system, and the checkpoint may be whole."""

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "exists", refuse)
    with pytest.raises(
        FileError, match=r"cannot read the checkpoint .*: Permission denied$"
    ) as seen:
        read_index(tmp_path)
    assert not isinstance(seen.value, CheckpointDamaged)
