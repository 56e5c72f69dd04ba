"""Weights in folders of torch.distributed.checkpoint: read exactly, and nothing in them is executed."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import penstock as ps
from penstock.checkpoint.weight_files import load_weights
from penstock.errors import FileError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model():
    """A model with buffers and two dtypes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).to(torch.bfloat16))


def assert_same(weights, state):
    """Compare names, dtypes and bits."""
    assert weights.keys() == state.keys()
    for name, tensor in state.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)


@pytest.mark.parametrize("part", ["", "model", "app"])
def test_the_weights_of_a_training_state_are_found(tmp_path, part):
    """A model alone, beside other values as torchtitan saves it, or within an application's state."""
    trained = model().float()
    optimizer = torch.optim.Adam(trained.parameters())
    trained(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(trained, optimizer)
    content = {
        "": weights,
        "model": {"model": weights, "optimizer": state, "step": 3, "seen": torch.ones(2)},
        "app": {"app": {"model": weights, "optim": state}},
    }[part]
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    assert_same(load_weights(tmp_path), trained.state_dict())


def save_sharded(folder):
    """Save a model whose parameters are sharded over the ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    from penstock.transport.process_group import join

    join()
    sharded = model().float()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder)


def test_weights_that_fsdp2_has_sharded_are_read_whole(tmp_path):
    """One process puts the parts together."""
    ps.launch(save_sharded, 2, tmp_path, threads=1)
    assert_same(load_weights(tmp_path), model().float().state_dict())


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch executed",)


def changed(change):
    """Return a function that changes the metadata of a folder."""

    def write(folder):
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return write


def outside(metadata):
    """Name a file outside of the folder."""
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"


def huge(metadata):
    """Give a tensor a size that would fill the memory."""
    metadata.state_dict_metadata["0.weight"].size = torch.Size([2**40, 2**20])


def transformed(metadata):
    """Say that files are compressed."""
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


def negative(metadata):
    """Give a tensor a size below 0."""
    metadata.state_dict_metadata["0.weight"].size = [-4, 6]


def in_bytes(metadata):
    """Give a tensor fewer elements than all files have bytes, and more bytes."""
    half = sum(info.length for info in metadata.storage_data.values()) // 2
    metadata.state_dict_metadata["0.weight"].size = torch.Size([1, half])


def numbered(metadata):
    """Give a tensor a number in place of a name."""
    metadata.state_dict_metadata[3] = metadata.state_dict_metadata.pop("0.weight")


def number_of_file(metadata):
    """Give a file a number in place of a name."""
    for info in metadata.storage_data.values():
        info.relative_path = 3


def linked(folder):
    """Let a file be a link to another one."""
    file = next(folder.glob("*.distcp"))
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def replaced_by_pipe(folder):
    """Let the metadata be a pipe, to which nothing writes."""
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")


PATCH = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x04evil\x8c\x01xstb."
CALL = b"\x80\x04ctorch\nset_num_threads\nK\x01\x85R."
HOSTILE = {
    "code": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Evil())), "system"),
    "a changed class": (
        lambda folder: (folder / ".metadata").write_bytes(PATCH),
        "changes a class",
    ),
    "cut off": (lambda folder: os.truncate(folder / ".metadata", 100), "no metadata that"),
    "a file outside": (changed(outside), "which is no file in the folder"),
    "a huge tensor": (changed(huge), "is larger than all files"),
    "a compressed file": (changed(transformed), r"its files are transformed \(compressed or"),
    "a size below 0": (changed(negative), "'0.weight' is larger than all files"),
    "too many bytes": (changed(in_bytes), "'0.weight' is larger than all files"),
    "a number as name": (changed(numbered), "'3' is larger than all files"),
    "a number as file": (changed(number_of_file), "it names '3', which is no file in the folder"),
    "a link": (linked, "there is no file __0_0"),
    "something else": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})),
        "it names|it holds something else",
    ),
    "another function": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(torch.load)),
        r"it names torch\.serialization\.load",
    ),
    "a function of torch": (
        lambda folder: (folder / ".metadata").write_bytes(CALL),
        r"it names torch\.set_num_threads",
    ),
    "a pipe": (replaced_by_pipe, "cannot read the weights in .*: it is not a regular file"),
    "no file": (lambda folder: next(folder.glob("*.distcp")).unlink(), "there is no file"),
    "damaged": (lambda folder: os.truncate(next(folder.glob("*.distcp")), 1000), "cannot read the"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_and_hostile_folders_are_refused(tmp_path, monkeypatch, name):
    """With one message, and nothing is executed."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "saved"
    dcp.save(model().state_dict(), checkpoint_id=folder, no_dist=True)
    damage, message = HOSTILE[name]
    damage(folder)
    with pytest.raises(FileError, match=message):
        load_weights(folder)
    assert not (tmp_path / "executed").exists()


def test_a_folder_without_weights_says_what_it_has(tmp_path):
    """Such as the state of an optimizer alone."""
    dcp.save({"optim": {"state": torch.ones(1)}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(
        FileError, match=r"holds no weights of a model: its tensors are optim\.state"
    ):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"model_state_dict": {"a": 1, "b": {"c": 2}}, "other": {"d": 3}}, {"a": 1, "b.c": 2}),
        ({"x": {"model": {"model": {"w": 4}}}, "top": 5}, {"model.w": 4}),
        ({"model": 6, "b": 7, "nested": {"c": 8}}, {"model": 6, "b": 7}),
        ({"model": {"layers": [{"w": 1}, {"w": 2}]}}, {"layers.0.w": 1, "layers.1.w": 2}),
    ],
)
def test_names_are_those_below_the_first_part_that_is_the_model(tmp_path, content, names):
    """Without such a part those at the top of the state; other values are no weights."""

    def tensors(value):
        if isinstance(value, dict):
            return {key: tensors(part) for key, part in value.items()}
        if isinstance(value, list):
            return [tensors(part) for part in value]
        return torch.tensor([float(value)])

    dcp.save(tensors(content) | {"step": 3}, checkpoint_id=tmp_path, no_dist=True)
    read = load_weights(tmp_path)
    assert {name: tensor.item() for name, tensor in read.items()} == names


def test_metadata_of_other_versions_may_lack_what_is_not_needed(tmp_path):
    """Paths within the state, and facts on the storage."""

    def strip(metadata):
        metadata.planner_data = metadata.storage_meta = None

    dcp.save(model().state_dict(), checkpoint_id=tmp_path, no_dist=True)
    changed(strip)(tmp_path)
    assert_same(load_weights(tmp_path), model().state_dict())
