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
from safetensors import safe_open
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
        "is no state_dict that can be read without running code",
    ),
    "a list": (pickled([torch.ones(1)]), "w.pt", "holds a list, and not a state_dict"),
    "a trainer's": (
        pickled({"model": {"a": torch.ones(1)}}),
        "w.pt",
        "holds a dict as 'model', and a state_dict holds tensors by name",
    ),
    "a number as a name": (
        pickled({1: torch.ones(1)}),
        "w.pt",
        "holds a Tensor as '1', and a state_dict holds tensors by name",
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
    "another kind of file": (
        shards('{"weight_map": {"a": "weights.bin"}}'),
        "",
        r"names 'weights\.bin', which is no file beside it",
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
    assert str(caught.value).startswith("cannot read") == ("cannot read" in message)
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
    for name in ("safetensors", "state-dict"):
        with pytest.raises(FileError, match="cannot write the weights to"):
            save_weights({"a": torch.ones(1)}, tmp_path, name)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            OSError(5, "Input/output error"),
            FileError,
            r"cannot read the weights in .*: Input/output",
        ),
        (MemoryError("no memory"), MemoryError, "no memory"),
    ],
)
def test_a_file_that_cannot_be_read_is_not_taken_for_a_damaged_one(
    tmp_path, monkeypatch, error, kind, words
):
    """A disk that fails, or a machine without memory, says nothing about the file."""

    def fail(*_, **options):
        raise error

    pickled({"a": torch.ones(1)})(tmp_path)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(kind, match=words):
        load_weights(tmp_path / "w.pt")


def views():
    """Return tensors that share memory: equal ones, parts of one, and empty ones."""
    base = torch.arange(12.0)
    return {
        "whole": base,
        "again": base,
        "begin": base[:4],
        "middle": base[2:6],
        "end": base[6:],
        "shape": base.reshape(3, 4),
        "turned": base.reshape(3, 4).t(),
        "empty": torch.zeros(0),
        "empty too": torch.zeros(0, 2),
        "trained": nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 50])
def test_tensors_that_share_memory_come_back_to_the_bit(tmp_path, monkeypatch, name, shard_bytes):
    """Views of one flat memory too. Hugging Face's layout leaves out equal ones, and nothing else."""
    monkeypatch.setattr(weight_files, "SHARD_BYTES", shard_bytes)
    expected = views()
    target = tmp_path / ("w.safetensors" if name == "safetensors" else "new/folder/w")
    assert all(file.exists() for file in save_weights(views(), str(target), name))
    if name == "huggingface":
        del expected["again"]
    read = load_weights(str(target))
    assert differences(read, {key: tensor.detach() for key, tensor in expected.items()}) == []


def test_one_memory_as_two_dtypes_is_two_tensors(tmp_path):
    """Of equal shape; torch.save refuses them."""
    base = torch.arange(3.0)
    tensors = {"numbers": base, "bits": base.view(torch.int32)}
    for name in ("huggingface", "safetensors"):
        save_weights(tensors, tmp_path / f"{name}.safetensors", name)
        assert differences(load_weights(tmp_path / f"{name}.safetensors"), tensors) == []


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([4, 4, 2], [[0, 1, 2]]),
        ([4, 4, 3], [[0, 1], [2]]),
        ([20, 1, 9, 1], [[0], [1, 2], [3]]),
        ([1, 20, 1], [[0], [1], [2]]),
        ([10, 10], [[0], [1]]),
    ],
)
def test_files_of_hugging_faces_layout_are_filled_in_order(tmp_path, monkeypatch, sizes, files):
    """Up to the limit, and a larger tensor has a file of its own; the index comes with several."""
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 40)
    tensors = {f"t{number}": torch.ones(size) for number, size in enumerate(sizes)}
    written = save_weights(tensors, tmp_path, "huggingface")
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
        names.append("model.safetensors.index.json")
        index = json.loads((tmp_path / names[-1]).read_text())
        assert index["metadata"] == {"total_size": 4 * sum(sizes)}
        assert index["weight_map"] == {
            f"t{number}": names[place] for place, row in enumerate(files) for number in row
        }
    assert [path.name for path in written] == names
    for name, row in zip(names, files, strict=False):
        assert list(load_file(tmp_path / name)) == [f"t{number}" for number in row]
        with safe_open(tmp_path / name, framework="pt") as content:
            assert content.metadata() == {"format": "pt"}


def test_a_tied_weight_counts_once_in_the_size_of_a_model(tmp_path, monkeypatch):
    """It is in one file, and the index does not name it twice."""
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 40)
    weight = torch.ones(8)
    save_weights({"a": weight, "b": torch.zeros(8), "c": weight}, tmp_path, "huggingface")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 64}
    assert list(index["weight_map"]) == ["a", "b"]


def test_a_model_replaces_the_files_of_an_earlier_one_in_hugging_faces_layout(
    tmp_path, monkeypatch
):
    """An index of the earlier one would be read instead, by transformers its only file; other files
    stay.
    """
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 40)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-of-mine.safetensors").write_bytes(b"")
    for number, count in enumerate((3, 1, 2, 3, 1)):
        tensors = {f"t{place}": torch.full((8,), float(number)) for place in range(count)}
        written = save_weights(tensors, tmp_path, "huggingface")
        assert differences(load_weights(tmp_path), tensors) == []
        names = {"config.json", "model-of-mine.safetensors", *(file.name for file in written)}
        assert {file.name for file in tmp_path.iterdir()} == names


def test_only_tensors_that_an_index_names_are_read(tmp_path):
    """In its order; its files may have more."""
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"c": torch.ones(3)}, tmp_path / "y.safetensors")
    shards('{"weight_map": {"c": "y.safetensors", "a": "x.safetensors"}}')(tmp_path)
    assert list(load_weights(tmp_path)) == ["c", "a"]


def test_an_index_comes_before_a_single_file(tmp_path):
    """It says which files belong together."""
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "part.safetensors")
    shards('{"weight_map": {"b": "part.safetensors"}}')(tmp_path)
    assert differences(load_weights(tmp_path), {"b": torch.zeros(2)}) == []


def test_a_checkpoint_in_a_folder_comes_before_other_formats_and_is_verified(tmp_path):
    """A damaged number would only be noticed in the results."""
    trained(1, "mlp", 2).save(tmp_path)
    expected = load_weights(tmp_path)
    save_file({"of the file": torch.ones(1)}, tmp_path / "model.safetensors")
    shards('{"weight_map": {"of the file": "model.safetensors"}}')(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"of other weights")
    assert load_weights(tmp_path).keys() == expected.keys()
    file = next(tmp_path.glob("*stage-0001*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(
        FileError, match=f"{file.name} of the checkpoint .* is damaged: its SHA-256"
    ):
        load_weights(tmp_path)
    for name, key in (("checkpoint.json", "of the file"), ("model.safetensors.index.json", "b")):
        (tmp_path / name).unlink()
        assert list(load_weights(tmp_path)) == [key]
        save_file({"b": torch.ones(1)}, tmp_path / "model.safetensors")


def test_a_dtype_that_a_format_does_not_have_is_refused_by_its_name(tmp_path):
    """safetensors has no complex numbers of double precision; PyTorch has."""
    tensors = {"a": torch.ones(1, dtype=torch.complex128)}
    for name in ("safetensors", "huggingface"):
        with pytest.raises(
            SettingError, match=r"^safetensors cannot hold tensors of torch\.complex128$"
        ):
            save_weights(tensors, tmp_path / name, name)
    save_weights(tensors, tmp_path / "w", "state-dict")
    assert differences(load_weights(tmp_path / "w"), tensors) == []
