"""Checkpoints of version 0.1 are loaded; incomplete and foreign ones are refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.checkpoint.test_checkpoint import (
    OPTIMIZERS,
    batch,
    pipeline,
    trained,
)
from tests.conformance.reference import differences

from penstock.errors import FileError


def as_schema_1(folder):
    """Turn a checkpoint into one of version 0.1, which has no checksums."""
    index_file = folder / "checkpoint.json"
    index = json.loads(index_file.read_text())
    old = ("step", "fingerprint", "files", "scaler", "schedulers")
    index_file.write_text(json.dumps({**{key: index[key] for key in old}, "schema": 1}))
    for name in index["files"]:
        with safe_open(folder / name, framework="pt") as content:
            facts = json.loads(content.metadata()["optimizer"])
        plain = {
            key: {"options": value["options"], "state": value["state"]}
            for key, value in facts.items()
        }
        save_file(
            load_file(folder / name), folder / name, metadata={"optimizer": json.dumps(plain)}
        )


def test_a_checkpoint_of_version_0_1_still_loads(tmp_path):
    """A long run must survive an update of the library."""
    pipe = trained(2, optimizer=OPTIMIZERS["adam on two groups"])
    pipe.save(tmp_path)
    as_schema_1(tmp_path)
    other = pipeline(lengths=3, optimizer=OPTIMIZERS["adam on two groups"])
    other.load(tmp_path)
    for run in (pipe, other):
        run.train_batch(*batch(number=2))
    assert differences(other.state_dict(), pipe.state_dict()) == []


def nan_weight(tensors):
    """Set a weight to NaN, as in a run that has diverged."""
    tensors["model/0.0.weight"][0] = torch.nan


CHANGES = {
    "double": lambda tensors: tensors.update(
        {"model/0.0.weight": tensors["model/0.0.weight"].double()}
    ),
    "nan": nan_weight,
    "more": lambda tensors: tensors.update({"model/stranger": torch.zeros(1)}),
    "moments": lambda tensors: tensors.update(
        {"optimizer/0.0.weight/momentum_buffer": torch.zeros(2)}
    ),
}


def damaged(tmp_path, how):
    """Write a checkpoint of the VGG case as version 0.1 did, and damage it."""
    trained(1).save(tmp_path)
    as_schema_1(tmp_path)
    index_file = tmp_path / "checkpoint.json"
    index = json.loads(index_file.read_text())
    first = tmp_path / index["files"][0]
    if how == "no index":
        index_file.unlink()
    elif how == "truncated":
        first.write_bytes(first.read_bytes()[:-100])
    elif how == "header only":
        first.write_bytes(first.read_bytes()[:4])
    elif how == "missing file":
        first.unlink()
    elif how == "no tensors":
        save_file({"model/other": torch.zeros(1)}, first)
    elif how == "wrong shape":
        tensors = load_file(first)
        save_file({**tensors, "model/0.0.weight": torch.zeros(2)}, first)
    elif isinstance(how, str) and how in CHANGES:
        tensors = load_file(first)
        CHANGES[how](tensors)
        save_file(tensors, first)
    elif how == "metadata":
        save_file(load_file(first), first, metadata={"optimizer": '{"0.0.weight": {"options": 3}}'})
    else:
        index_file.write_text(json.dumps({**index, **how}) if isinstance(how, dict) else how)
    return tmp_path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "no index",
            r"holds no checkpoint: there is no checkpoint\.json, which is written last",
        ),
        (
            "truncated",
            r"cannot read step-00000001-stage-0000-\w+\.safetensors of the checkpoint .*: .*",
        ),
        ("header only", r"cannot read step-00000001-stage-0000"),
        (
            "missing file",
            (
                r"cannot read step-00000001-stage-0000-\w+\.safetensors of the checkpoint "
                r".*: No such file"
            ),
        ),
        ("no tensors", r"does not fit: the state has no '0\.0\.weight', which stage 0 needs"),
        (
            "wrong shape",
            (
                r"does not fit: 0\.0\.weight has shape \(2,\) in the state and \(6, 3, 3, "
                r"3\) in the model"
            ),
        ),
        ("metadata", r"cannot read step-00000001-stage-0000"),
        ({"schema": 7}, r"is no checkpoint of schema 1 or 2 or 3: its schema is 7"),
        ({"step": "one"}, r"is no checkpoint: at step: "),
        (
            {"fingerprint": "abc"},
            r"is a checkpoint of another model: its layers and shapes have fingerprint abc",
        ),
        (
            {"files": ["../../../etc/passwd"]},
            (
                r"is damaged: it names '\.\./\.\./\.\./etc/passwd', which is not a file "
                r"of a checkpoint"
            ),
        ),
        ({"step": -5}, r"is damaged: its step is -5"),
        ({"step": 10**18}, r"is damaged: its step is 1e\+18"),
        ({"files": []}, r"is damaged: it names no file"),
        ({"identity": "ab"}, r"is damaged: its schema is 1, and it has fields of schema 2"),
        (
            "double",
            (
                r"0\.0\.weight is float64 in the state and float32 in the model \(build "
                r"the model in that dtype"
            ),
        ),
        ("nan", r"does not fit: NaN values in 0\.0\.weight: the run had diverged"),
        (
            "more",
            r"does not fit: the state has 'stranger', which the model does not have",
        ),
        (
            "moments",
            (
                r"momentum_buffer of 0\.0\.weight is float32 \(2,\) in the state, and the "
                r"parameter is of shape \(6, 3, 3, 3\)"
            ),
        ),
        ("{", r"checkpoint\.json is not JSON"),
    ],
)
def test_incomplete_checkpoints_are_refused_and_change_nothing(how, message, tmp_path):
    """Loading half of a checkpoint would only be noticed weeks later, in the results."""
    damaged(tmp_path, how)
    pipe, untouched = trained(2), trained(2)
    with pytest.raises(FileError, match=message):
        pipe.load(tmp_path)
    assert pipe.step == 2
    assert torch.equal(pipe.train_batch(*batch(number=2)), untouched.train_batch(*batch(number=2)))
    assert differences(pipe.state_dict(), untouched.state_dict()) == []


def test_a_missing_folder_and_another_model_are_refused_by_name(tmp_path):
    """These are the two most common mistakes."""
    with pytest.raises(FileError, match=r"nowhere holds no checkpoint"):
        pipeline().load(tmp_path / "nowhere")
    trained(1, "mlp", 2).save(tmp_path)
    with pytest.raises(
        FileError, match=r"is a checkpoint of another model: its layers and shapes have fingerprint"
    ):
        pipeline().load(tmp_path)
