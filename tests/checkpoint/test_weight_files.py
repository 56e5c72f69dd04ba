"""Weights in the formats of others: what is written is read again, by Penstock and by its owner, and
nothing that is read is executed.
"""

from __future__ import annotations

import json
import os
import pickle
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.test_checkpoint import differences, trained
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import penstock as ps
from penstock.checkpoint import weight_files
from penstock.checkpoint.weight_files import WEIGHT_FORMATS, load_weights, save_weights
from penstock.errors import FileError, SettingError


@pytest.fixture(scope="module")
def state():
    """The weights of a model, with buffers."""
    return trained(1, "resnet", 2).state_dict()


@pytest.mark.parametrize("name", ["safetensors", "state-dict", "huggingface", "dcp"])
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 2000])
def test_what_is_written_is_read_again_to_the_bit(tmp_path, monkeypatch, state, name, shard_bytes):
    """Each format's own reader reads it too."""
    monkeypatch.setattr(weight_files, "SHARD_BYTES", shard_bytes)
    target = tmp_path / ("model.safetensors" if name == "safetensors" else "model")
    files = save_weights(state, target, name)
    assert all(file.exists() for file in files)
    if name == "state-dict":
        assert differences(torch.load(target, weights_only=True), state) == []
    if name == "huggingface" and shard_bytes == 2000:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == state.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
        assert len(files) == len(set(index["weight_map"].values())) + 1 > 3
    if name == "dcp":
        dcp_to_torch_save(target, tmp_path / "converted.pt")
        assert differences(load_weights(tmp_path / "converted.pt"), state) == []
    assert differences(load_weights(target), state) == []


def test_a_checkpoint_gives_the_weights_under_all_names_of_the_model(tmp_path):
    """A tied weight is saved once, and a plain model expects it under each of its names."""

    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x @ self.weight.t()

    torch.manual_seed(0)
    first = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(first, nn.Tanh(), nn.BatchNorm1d(4), Head(first.weight))
    options = {"loss": nn.functional.mse_loss, "micro_batches": 2, "executor": "threads"}
    pipe = ps.Pipeline(model, balance=[2, 2], **options)
    pipe.save(tmp_path / "saved")
    weights = load_weights(tmp_path / "saved")
    assert differences(weights, pipe.state_dict()) == []
    for name in WEIGHT_FORMATS:
        save_weights(weights, tmp_path / name, name)
    assert list(load_file(tmp_path / "huggingface" / "model.safetensors")).count("3.weight") == 0
    assert torch.equal(load_weights(tmp_path / "state-dict")["3.weight"], first.weight)


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def pickled(value):
    """Return a function that writes a value by `torch.save`."""
    return lambda path: torch.save(value, path / "w.pt")


def shards(content):
    """Return a function that writes an index of shards."""
    return lambda path: (path / "model.safetensors.index.json").write_text(content)


def file_of_header(header):
    """Return the bytes of a safetensors file with this header and one number."""
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


HOSTILE = {
    "code": (pickled({"a": Evil()}), "w.pt", "is no state_dict that can be read without"),
    "a bare pickle": (
        lambda path: (path / "w.pt").write_bytes(pickle.dumps(Evil())),
        "w.pt",
        "is no state_dict that can be read without running code",
    ),
    "a pickle of nothing": (
        lambda path: (path / "w.pt").write_bytes(b"\x80\x02."),
        "w.pt",
        "is no state_dict that can be read without running code",
    ),
    "empty": (
        lambda path: (path / "w.pt").write_bytes(b""),
        "w.pt",
        "is no state_dict|cannot read",
    ),
    "a list": (pickled([torch.ones(1)]), "w.pt", "holds a list, and not a state_dict"),
    "a trainer's": (
        pickled({"model": {"a": torch.ones(1)}}),
        "w.pt",
        "holds a dict as 'model', and a state_dict holds tensors by name",
    ),
    "no file": (lambda path: None, "w.pt", "cannot read the weights in .*: No such file"),
    "no weights": (lambda path: None, "", "holds no weights: there is neither"),
    "cut off": (
        lambda path: (path / "w.safetensors").write_bytes(b"\xff" * 20),
        "w.safetensors",
        "cannot read the weights in",
    ),
    "outside": (
        shards('{"weight_map": {"a": "../w.safetensors"}}'),
        "",
        r"names '\.\./w\.safetensors', which is no file beside it",
    ),
    "not there": (shards('{"weight_map": {"a": "w.safetensors"}}'), "", "cannot read the weights"),
    "a dtype that cannot be printed": (
        lambda path: (path / "w.safetensors").write_bytes(
            file_of_header('{"a": {"dtype": "\ufeffF32", "shape": [1], "data_offsets": [0, 4]}}')
        ),
        "w.safetensors",
        r"cannot read the weights in .*: Error while deserializing header: .* variant `\?F32`",
    ),
    "a long name": (
        lambda path: (
            save_file({"b": torch.ones(2)}, path / "w.safetensors"),
            shards(f'{{"weight_map": {{"{"a" * 5000}": "w.safetensors"}}}}')(path),
        ),
        "",
        r"has no 'aaa\S{0,100}, which model\.safetensors\.index\.json names",
    ),
    "no map": (shards('{"weight_map": 3}'), "", "weight_map"),
}
# Opening a pipe would wait for a writer for ever. By format: the pipe, and what is loaded.
for pipe, loaded in (
    ("w.safetensors", "w.safetensors"),
    ("w.pt", "w.pt"),
    ("model.safetensors", ""),
    (".metadata", ""),
):
    HOSTILE[f"a pipe as {pipe}"] = (
        lambda path, pipe=pipe: os.mkfifo(path / pipe),
        loaded,
        "cannot read the weights in .*: it is not a regular file",
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_executed_and_the_file_is_named(tmp_path, monkeypatch, name):
    """Weights come from strangers."""
    monkeypatch.chdir(tmp_path)
    write, file, message = HOSTILE[name]
    write(tmp_path)
    with pytest.raises(FileError, match=message) as caught:
        load_weights(tmp_path / file)
    assert re.search(str(tmp_path), str(caught.value))
    assert str(caught.value).isprintable()
    assert not (tmp_path / "executed").exists()


def test_a_tensor_that_an_index_names_and_its_file_lacks_is_named(tmp_path):
    """A download that was mixed up."""
    save_file({"b": torch.ones(2)}, tmp_path / "w.safetensors")
    shards('{"weight_map": {"a": "w.safetensors"}}')(tmp_path)
    with pytest.raises(FileError, match=r"has no 'a', which model\.safetensors\.index\.json names"):
        load_weights(tmp_path)


def test_what_cannot_be_written_is_refused(tmp_path):
    """A format that there is not, a folder where a file is."""
    with pytest.raises(SettingError, match=r"format is safetensors, state-dict, .* not 'tar'"):
        save_weights({}, tmp_path / "x", "tar")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write the weights to"):
        save_weights({"a": torch.ones(1)}, tmp_path / "file" / "x")
