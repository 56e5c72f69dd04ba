"""Loading: what is read is verified and complete before the first weight changes, on all ranks."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from tests.checkpoint.loading import (
    load_into,
    pipeline,
    refusal_of,
    rewrite,
    state_of,
)
from tests.conformance.reference import differences
from torch import nn

import penstock as ps
from penstock.checkpoint.checkpoint import Progress
from penstock.checkpoint.checkpoint_index import RuleFacts, read_index
from penstock.checkpoint.checkpoint_options import parse_skip
from penstock.errors import CheckpointDamaged, FileError
from penstock.stage.stage_state import stage_tensors

# -- what is loaded ------------------------------------------------------------------------------


def test_all_state_is_replaced_and_gradients_are_dropped(original, pipe):
    """A new pipeline, and one that has been trained otherwise, are then the same."""
    folder, tensors = original
    new = pipeline(seed=7)
    for one in (pipe, new):
        assert load_into(one, folder) == Progress(2)
        assert differences(state_of(one), tensors) == []
        for stage in one._assembly.stages:
            assert all(parameter.grad is None for parameter in stage.update.candidates)


def test_a_process_changes_and_verifies_what_it_has(saved, original, pipe):
    """Tensors of the stages of others may be of any value, if all headers are right."""
    file = saved / read_index(saved).files[1]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    before = state_of(pipe)
    load_into(pipe, saved, local=[0])
    after = state_of(pipe)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert not [name for name in changed if "/2." in name]
    mine = {name: tensor for name, tensor in original[1].items() if "/2." not in name}
    assert differences({name: after[name] for name in mine}, mine) == []
    assert "is damaged: its SHA-256" in refusal_of(pipe, saved, CheckpointDamaged, local=[1])
    file.write_bytes(file.read_bytes()[:-1])
    assert "has " in refusal_of(pipe, saved, CheckpointDamaged, local=[0])


def test_group_numbers_of_two_files_are_not_compared(saved, original):
    """Stages count their groups by their own parameters; other stages here have those of both."""

    def renumber(tensors, texts):
        if "model/2.bias" in tensors:
            texts["optimizer"] = texts["optimizer"].replace('"group": 0', '"group": 1')

    rewrite(saved, renumber)
    one = pipeline(balance=(3,))
    load_into(one, saved)
    assert differences(state_of(one), original[1]) == []

    def renumber_one(tensors, texts):
        texts["optimizer"] = texts["optimizer"].replace('"group": 0', '"group": 1', 1)

    rewrite(saved, renumber_one)
    assert "were in two parameter groups when it was saved" in refusal_of(one, saved)


def test_a_process_reads_a_tied_weight_from_the_file_of_another_stage(tmp_path):
    """It is saved once, under its first name; its own optimizer does not step it."""

    def tied(value):
        first = nn.Linear(3, 3, bias=False)
        nn.init.constant_(first.weight, value)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3, bias=False))
        model[2].weight = first.weight
        options = {"balance": [2, 1], "micro_batches": 2, "executor": "threads"}
        return ps.Pipeline(model, loss=nn.functional.mse_loss, **options)

    tied(2.0).save(tmp_path)
    for local, name in ((0, "0.weight"), (1, "2.weight")):
        pipe = tied(5.0)
        load_into(pipe, tmp_path, local=[local])
        weight = stage_tensors(pipe._assembly.placed.local[local])[name]
        assert (weight == 2.0).all()


def test_without_optimizer_state_is_cleared_and_options_stay(saved, pipe):
    """To start with a new optimizer: what the checkpoint has of the old one does not matter."""

    def spoil(tensors, texts):
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                tensor.fill_(math.nan)
        texts["optimizer"] = texts["optimizer"].replace("torch.optim", "other")

    rewrite(saved, spoil)
    assert "it holds the state of other.adam.Adam" in refusal_of(pipe, saved)
    for stage in pipe._assembly.stages:
        stage.update.optimizer.param_groups[0]["lr"] = 0.5
    load_into(pipe, saved, skip=parse_skip("optimizer"))
    for stage in pipe._assembly.stages:
        assert len(stage.update.optimizer.state) == 0
        assert stage.update.optimizer.param_groups[0]["lr"] == 0.5


def test_a_pipeline_without_an_optimizer_takes_the_weights(saved, original):
    """For evaluation."""
    look = pipeline(None)
    load_into(look, saved)
    model = {name: row for name, row in original[1].items() if name.startswith("model/")}
    assert differences(state_of(look), model) == []


PARTS = {
    "scaler": {"scale": 8.0, "steps": 1.0, "skipped": 0.0},
    "schedulers": ('{"last_epoch": 1}',),
    "scheduler_kinds": ("torch.optim.lr_scheduler.StepLR",),
    "averages": (7,),
}


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ("", PARTS),
        ("scaler", PARTS | {"scaler": None}),
        ("schedulers", PARTS | {"schedulers": (), "scheduler_kinds": ()}),
        ("averages", PARTS | {"averages": ()}),
        ("optimizer", {}),
    ],
)
def test_progress_has_what_was_not_skipped(saved, pipe, skip, expected):
    """What is skipped must not be saved again as if it had been loaded."""
    rewrite(saved, **PARTS)
    progress = load_into(pipe, saved, scaler=True, skip=parse_skip(skip))
    assert progress == Progress(2, **expected)


# -- what does not fit ---------------------------------------------------------------------------


def test_all_that_does_not_fit_is_in_one_message(saved, pipe):
    """Users would else find one mistake after the other; each part can be skipped."""

    def spoil(tensors, texts):
        if "model/2.bias" in tensors:
            tensors["model/2.bias"] = torch.zeros(9)
            tensors["model/stranger"] = torch.zeros(1)
            tensors["optimizer/2.bias/exp_avg"] = torch.zeros(9)

    rule = RuleFacts("avgpipe", 2, 1, keeps=True)
    rewrite(saved, spoil, rule=rule, **PARTS)
    average = SimpleNamespace(averaged=lambda stage: {}, n_averaged=0, restart=print)
    options = {
        "schedulers": [SimpleNamespace(fits=lambda kind, state: False, kind="Other")],
        "rule": RuleFacts("stash", 1, 1),
        "averages": [average, average],
    }
    parts = {
        "": "2.bias has shape (9,) in the state and (2,) in the model",
        "none": "the state has 'stranger', which the model does not have",
        "optimizer": "exp_avg of 2.bias is float32 (9,) in the state",
        "schedulers": "scheduler 0 is Other here",
        "scaler": "it has the state of a loss scaler (scale 8)",
        "weight_rule": "it has the state of weight rule 'avgpipe' with 2 pipelines",
        "averages": "it has 1 running averages of the weights, and this pipeline has 2",
    }
    text = refusal_of(pipe, saved, **options)
    assert text.startswith(f"the checkpoint {saved} does not fit: {parts['']}")
    assert [part for part in parts.values() if part not in text] == []
    for skip in ("schedulers", "scaler", "weight_rule", "averages"):
        text = refusal_of(pipe, saved, skip=parse_skip(skip), **options)
        assert [name for name, part in parts.items() if part not in text] == [skip]
    text = refusal_of(pipe, saved, skip=parse_skip("optimizer"), **options)
    assert [name for name, part in parts.items() if part in text] == ["", "none"]


@pytest.mark.parametrize("name", ["model/0.weight", "optimizer/2.bias/exp_avg_sq", "weights/x"])
def test_nan_is_refused_by_its_name_and_may_be_allowed(saved, pipe, name):
    """The next step would make NaN weights of NaN moments."""

    def spoil(tensors, texts):
        if name in tensors or name == "weights/x":
            tensors[name] = torch.full_like(tensors.get(name, torch.ones(1)), math.nan)

    rewrite(saved, spoil)
    text = refusal_of(pipe, saved)
    assert f"does not fit: NaN values in {name.removeprefix('model/')}: the run had diver" in text
    load_into(pipe, saved, nonfinite=True)
    after = state_of(pipe)
    assert name == "weights/x" or torch.isnan(after[name]).all()
    with suppress(FileError):
        load_into(pipe, saved, skip=parse_skip("optimizer"))
        assert not name.startswith("model/")


def test_nan_in_a_buffer_is_loaded(saved, pipe):
    """Statistics follow from the data; only parameters and what an optimizer keeps are checked."""

    def spoil(tensors, texts):
        if "model/1.running_mean" in tensors:
            tensors["model/1.running_mean"].fill_(math.nan)

    rewrite(saved, spoil)
    load_into(pipe, saved)
    assert state_of(pipe)["model/1.running_mean"].isnan().all()


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(saved):
    """Before its tensors are read."""
    file = saved / read_index(saved).files[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    other = pipeline(sizes=(3, 5, 2))
    index = read_index(saved)
    text = refusal_of(other, saved)
    assert text.startswith(
        f"{saved} is a checkpoint of another model: its layers and shapes have fingerprint "
        f"{index.fingerprint}, this model's have {other._assembly.placed.traced.fingerprint}: "
        "0.weight is float32 (4, 3) in the checkpoint and float32 (5, 3) in the model"
    )


def test_a_damaged_text_of_plain_state_is_named_with_its_file(saved, pipe):
    """Of any file: plain state of a parameter may be in the file of any stage."""

    def spoil(tensors, texts):
        if "model/2.bias" in tensors:
            texts["optimizer"] = '{"2.bias": 3}'

    rewrite(saved, spoil)
    name = read_index(saved).files[1]
    text = refusal_of(pipe, saved, CheckpointDamaged, local=[0])
    assert text.startswith(f"cannot read {name} of the checkpoint {saved}: its optimizer state")
