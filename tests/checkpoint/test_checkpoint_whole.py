"""Checkpoints are complete or refused: damaged and mixed files, and values that are no numbers."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.small_runs import (
    adam,
    assert_refused,
    batch,
    everything,
    pipeline,
    refused_by,
    trained,
)
from tests.conformance.reference import differences
from tests.runtime.jobs import checkpoint_verdicts, saved_by_two_ranks
from torch import nn

import penstock as ps
from penstock.checkpoint import checkpoint_files, checkpoint_index
from penstock.errors import FileError, SettingError

# -- damage
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_any_damaged_byte_is_refused_or_changes_nothing(tmp_path, change):
    """A flipped bit in a weight's exponent would only be noticed weeks later, in the results."""
    whole = trained(optimizer=adam)
    whole.save(tmp_path)
    expected = everything(whole)
    pipe = pipeline(adam)
    refused = 0
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        for place in range(change % 7, len(content), 67):
            file.write_bytes(
                content[:place] + bytes([content[place] ^ change]) + content[place + 1 :]
            )
            refusal = refused_by(pipe, tmp_path)
            if refusal is None:
                assert differences(everything(pipe), expected) == []
            else:
                assert file.name in refusal
                refused += 1
        file.write_bytes(content)
    assert refused > 40


def test_loaded_state_does_not_depend_on_the_files(tmp_path):
    """Views of a file would change with it, and truncating it would crash the process."""
    trained(optimizer=adam).save(tmp_path)
    pipe = pipeline(adam)
    pipe.load(tmp_path)
    expected = everything(pipe)
    for file in tmp_path.glob("step-*"):
        with file.open("r+b") as content:
            content.write(bytes(file.stat().st_size))
    assert differences(everything(pipe), expected) == []


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file_is_refused_by_its_name(tmp_path, length):
    """The cause may be an interrupted copy or a full disk."""
    trained().save(tmp_path)
    file = min(tmp_path.glob("*stage-0001*"))
    file.write_bytes(file.read_bytes()[:length])
    assert_refused(tmp_path, rf"(cannot read )?{file.name} of the checkpoint ")


def test_files_of_two_steps_are_not_one_checkpoint(tmp_path):
    """Stage 0 is of step 2 and stage 1 of step 3."""
    pipe = trained(2)
    pipe.save(tmp_path / "a")
    pipe.train_batch(*batch(5))
    pipe.save(tmp_path / "b")
    earlier, later = (min((tmp_path / name).glob("*stage-0001*")) for name in ("a", "b"))
    shutil.copy(earlier, later)
    assert_refused(
        tmp_path / "b",
        (
            rf"{later.name} of .*b: belongs to the checkpoint of step 2 \(identity \w+\), "
            rf"not to that of step 3 "
        ),
    )


def test_files_of_two_runs_at_one_step_are_not_one_checkpoint(tmp_path):
    """Names of tensors, shapes and step are the same: only the identity differs."""
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        trained(2, model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))).save(
            tmp_path / name
        )
    first, second = (min((tmp_path / name).glob("*stage-0000*")) for name in ("a", "b"))
    shutil.copy(first, second)
    assert_refused(tmp_path / "b", rf"{second.name} of .*: belongs to the checkpoint of step 2 ")


def test_an_index_of_another_checkpoint_is_refused(tmp_path):
    """The index is of step 2 and the files are of step 3."""
    pipe = trained(2)
    pipe.save(tmp_path)
    index = (tmp_path / "checkpoint.json").read_bytes()
    pipe.train_batch(*batch(5))
    pipe.save(tmp_path)
    (tmp_path / "checkpoint.json").write_bytes(index)
    assert_refused(
        tmp_path, r"cannot read step-00000002-stage-0000-\w+\.safetensors .*: No such file"
    )


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "step-1", "a" * 500, ""])
def test_an_index_that_names_foreign_files_is_refused_though_its_checksum_is_right(tmp_path, name):
    """A forged index can have the right checksum; no file outside of the folder is read."""
    trained().save(tmp_path)
    index = checkpoint_index.read_index(tmp_path)
    changed = checkpoint_index.Checkpoint(
        index.step, index.fingerprint, (name, *index.files), identity=index.identity, sums={}
    )
    checkpoint_index.write_index(tmp_path, changed)
    assert_refused(
        tmp_path, r"checkpoint\.json is damaged: it names '.*', which is not a file of a"
    )


def test_a_folder_without_an_index_is_refused_with_what_it_has(tmp_path):
    """It may be empty, or have the files of an interrupted save."""
    assert_refused(tmp_path, r"holds no checkpoint: there is no checkpoint\.json[^.]*\.$")
    trained().save(tmp_path)
    (tmp_path / "checkpoint.json").unlink()
    assert_refused(tmp_path, r"Its step files are from a save that was interrupted")
    assert_refused(tmp_path / "a\0b", r"holds no checkpoint")
    with pytest.raises(FileError, match=r"cannot write the checkpoint .*: embedded null byte"):
        trained().save(tmp_path / "a\0b")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", r"file holds no checkpoint")


def test_a_checkpoint_survives_a_loss_of_power(tmp_path, monkeypatch):
    """Files and their names are on the disk before the index is replaced, and the index before old
    files are deleted.
    """
    pipe = trained()
    pipe.save(tmp_path)
    old = set(tmp_path.iterdir())
    happened = []
    monkeypatch.setattr(checkpoint_files, "sync_file", lambda path: happened.append(path.suffix))
    for module in (checkpoint_files, checkpoint_index):
        monkeypatch.setattr(module, "sync_folder", lambda path: happened.append("folder"))
    write = checkpoint_index.write_json

    def write_json(path, value, *, durable):
        assert durable
        assert happened.count("folder") == 2
        assert all(file.exists() for file in old)
        write(path, value, durable=durable)

    monkeypatch.setattr(checkpoint_index, "write_json", write_json)
    pipe.save(tmp_path)
    assert sorted(happened) == [".partial", ".partial", "folder", "folder", "folder"]


# -- values
# ------------------------------------------------------------------------------------------------


def test_nan_weights_do_not_replace_a_good_checkpoint(tmp_path):
    """The run has to resume from the previous one."""
    pipe = trained()
    pipe.save(tmp_path)
    expected = everything(pipe)
    with torch.no_grad():
        pipe._assembly.stages[1].update.parameters[0][0, 0] = math.nan
    with pytest.raises(
        SettingError, match=r"there are NaN values in 2\.weight at step 2: this run has"
    ):
        pipe.save(tmp_path)
    good = pipeline()
    good.load(tmp_path)
    assert differences(everything(good), expected) == []
    pipe.save(tmp_path / "look", allow_nonfinite=True)
    assert_refused(
        tmp_path / "look", r"does not fit: NaN values in 2\.weight: the run had diverged"
    )
    good.load(tmp_path / "look", allow_nonfinite=True)
    assert torch.isnan(good.state_dict()["2.weight"]).sum() == 1


def test_nan_moments_are_refused_and_infinite_buffers_are_not(tmp_path):
    """The next step would make NaN weights of NaN moments.

    Masks are full of infinities, and NaN in a buffer is left to the model.
    """

    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([-math.inf, math.nan]))

        def forward(self, x):
            return x

    torch.manual_seed(0)
    pipe = trained(model=nn.Sequential(nn.Linear(3, 4), Mask(), nn.Linear(4, 1)))
    pipe.save(tmp_path)
    again = pipeline(model=nn.Sequential(nn.Linear(3, 4), Mask(), nn.Linear(4, 1)))
    again.load(tmp_path)
    optimizer = pipe._assembly.stages[0].update.optimizer
    next(iter(optimizer.state.values()))["momentum_buffer"].fill_(math.nan)
    with pytest.raises(
        SettingError, match=r"NaN values in optimizer/0\.(weight|bias)/momentum_buffer at step 2"
    ):
        pipe.save(tmp_path)


def test_a_model_of_another_dtype_is_refused_and_the_message_says_in_what_it_differs(tmp_path):
    """A copy would silently round every weight."""
    trained(
        model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), steps=0
    ).save(tmp_path)
    assert_refused(
        tmp_path,
        (
            r"another model: .*0\.weight is float64 \(4, 3\) in the checkpoint and "
            r"float32 \(4, 3\) in the model"
        ),
    )


def test_complex_weights_of_double_precision_come_back(tmp_path):
    """safetensors does not have this dtype."""

    class Turn(nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.turn = nn.Parameter(torch.full((3,), fill, dtype=torch.complex128))

        def forward(self, x):
            return (x * self.turn).real.float()

    pipe, other = (
        pipeline(balance=[1, 1], model=nn.Sequential(Turn(fill), nn.Linear(3, 1)))
        for fill in (1 + 2j, 0j)
    )
    pipe.save(tmp_path)
    other.load(tmp_path)
    assert torch.equal(
        other.state_dict()["0.turn"], torch.full((3,), 1 + 2j, dtype=torch.complex128)
    )


# -- ranks in processes
# ------------------------------------------------------------------------------------------------


def test_ranks_in_processes_refuse_together_and_change_nothing(tmp_path):
    """One damaged file, a rank that reads another checkpoint, a sharded optimizer. Without a joint
    decision, a rank that finds no fault would already have loaded: a mixture of two steps. Where
    ranks have disks of their own, each has its files, and gets those of the other when it loads.
    """
    by_rank = ps.launch(checkpoint_verdicts, 2, tmp_path, threads=1)
    first, second = by_rank
    assert first["same before and after"] == second["same before and after"] == [True] * 3
    damaged = first["damaged"]
    assert damaged == second["damaged"]
    assert "rank 1 on host " in damaged
    assert "stage-0001" in damaged
    assert "(nothing was loaded on any rank)" in damaged
    assert "rank 0 on host" not in damaged
    for name in ("two steps", "zero"):
        assert first[name] == second[name]
    assert "reads the checkpoint of step 1" in first["two steps"]
    assert "and rank 0 on host" in first["two steps"]
    assert (first["own files"], second["own files"]) == (["stage-0000"], ["stage-0001"])
    assert first["same after fetching"] is second["same after fetching"] is True
    assert first["fetched"] == second["fetched"] == ["stage-0000", "stage-0001"]
    assert "stage-0001" in first["lost"]
    assert "is on none of the hosts" in first["lost"]
    assert "every host wrote to its own disk. Start a rank on the host that has it" in first["lost"]
    assert "cannot hold the state of a ZeroRedundancyOptimizer" in first["zero"]
    assert first["loss after"] == second["loss after"] == first["loss expected"]


def test_files_of_processes_have_their_checksums_in_the_index(tmp_path):
    """They can be verified by `sha256sum` and read by any reader of safetensors."""
    import hashlib

    saved_by_two_ranks(tmp_path)
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    for name, row in index["sums"].items():
        content = (tmp_path / name).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (row["sha256"], row["bytes"])
        assert load_file(tmp_path / name)
