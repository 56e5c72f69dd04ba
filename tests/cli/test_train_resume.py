"""`penstock train --resume`: a run goes on as itself, with other settings only where that is
explicit, and is changed only when accepted.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import yaml
from safetensors import safe_open

from penstock.checkpoint.folder_lock import FolderLock
from penstock.checkpoint.weight_files import load_weights
from penstock.training.rank import profile_rank
from penstock.training.resume import resume_settings
from penstock.training.sources.user_settings import load_settings

WORDS = (
    "--model",
    "mlp",
    "--image",
    "8",
    "--channels",
    "1",
    "--batch",
    "128",
    "--lr",
    "0.05",
    "--seed",
    "3",
    "--stages",
    "1",
    "--micro-batches",
    "2",
    "--schedule",
    "1f1b",
    "--baseline-steps",
    "0",
    "--limit-steps",
    "4",
    "--device",
    "cpu",
)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """A run of four steps, made once."""
    from penstock.cli.main import status

    folder = tmp_path_factory.mktemp("first")
    config = load_settings(
        None, {"model": "mlp", "image": 8, "channels": 1, "batch": 128, "profile_repeats": 1}
    )
    profile_rank(config, 1).save(folder / "profile.json")
    out = folder / "run"
    words = ["train", *WORDS, "--profile", str(folder / "profile.json"), "--out", str(out)]
    assert status(words) == 0
    return out


@pytest.fixture
def folder(first_run, tmp_path):
    """A copy of its folder, to spoil."""
    return shutil.copytree(first_run, tmp_path / "run")


def contents(folder):
    """What lies in a folder, by name."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "96"], "its batch is 128, not 96"),
        (["--seed", "1"], "its seed is 3, not 1"),
        (["--optimizer", "adam"], "its optimizer is sgd, not adam"),
        (["--model", "vgg11_bn"], "its model is mlp, not vgg11_bn"),
        (["--data", "reversed"], "its data is digits, not reversed"),
        (["--image", "16", "--channels", "3"], "its image is 8, not 16; its channels is 1, not 3"),
        (["--model-option", "hidden=3"], "its model_options is {}, not {'hidden': 3}"),
        (["--autocast", "bfloat16"], "its autocast is none, not bfloat16"),
    ],
)
def test_words_that_would_make_another_run_are_refused_with_both_values(
    penstock, folder, words, message
):
    """Data would be seen again or in another order; a state would be of another optimizer. Nothing
    is written before that is said.
    """
    before = contents(folder)
    result = penstock("train", "--out", folder, "--resume", *words)
    assert result.status == 2
    assert (
        f"the run in {folder} cannot continue with these settings: {message}. Leave that out"
        in result.err
    )
    assert contents(folder) == before


def test_a_file_of_settings_is_held_against_the_run_as_flags_are(penstock, folder, tmp_path):
    """`penstock train recipe.yaml --resume`: only what stands in the file is said."""
    file = tmp_path / "recipe.yaml"
    file.write_text("model: mlp\nbatch: 128\nlr: 0.01\nseed: 4\n")
    result = penstock("train", file, "--out", folder, "--resume")
    assert result.status == 2
    assert "its seed is 3, not 4" in result.err
    assert "batch" not in result.err
    file.write_text(f"model: mlp\nlr: 0.01\nout: {folder}\nresume: true\n")
    config, changed = resume_settings(file, {"epochs": 2})
    assert changed == ["epochs: 5 -> 2", "limit_steps: 4 -> none", "lr: 0.05 -> 0.01"]
    assert (config.lr, config.epochs, config.batch, config.seed, config.image) == (
        0.01,
        2,
        128,
        3,
        8,
    )


@pytest.mark.parametrize("how", ["folder", "out", "config"])
def test_without_words_a_run_goes_on_with_its_own_settings(folder, how):
    """Not with the defaults of the command."""
    path = {"folder": folder, "config": folder / "config.yaml", "out": None}[how]
    config, changed = resume_settings(path, {"out": str(folder)} if how == "out" else {})
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    assert changed == ["limit_steps: 4 -> none"], "it has come to that limit"
    assert {**stored, "limit_steps": None, "out": str(folder), "resume": True} == yaml.safe_load(
        config.as_yaml()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--epochs", "1", "--limit-steps", "4"],
            "nothing left to train: the checkpoint in .* is at step 4, and the run ends at step 4",
        ),
        (["--stages", "99"], "99"),
        (["--lr", "-1"], "lr is -1"),
        (["--partition", "1,2"], "1, 2|1,2|layers"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_folder_changes(penstock, folder, words, message):
    """The run's own plan and configuration are what the next try starts from."""
    before = contents(folder)
    result = penstock("train", folder, "--resume", *words)
    assert result.status == 2
    assert "Traceback" not in result.err
    assert re.search(message, result.err), result.err
    assert contents(folder) == before


def test_folders_that_hold_nothing_to_go_on_with_are_named(penstock, folder, tmp_path):
    """No folder, no run, no checkpoint, two folders; and a folder where a file of settings should
    be.
    """
    result = penstock("train", "--resume")
    assert "resume needs the folder of the run to continue" in result.err
    result = penstock("train", "--out", tmp_path / "nowhere", "--resume")
    assert "nowhere holds no run to continue: there is no config.yaml" in result.err
    assert not (tmp_path / "nowhere").exists()
    result = penstock("train", folder, "--out", tmp_path / "other", "--resume")
    assert "two runs to continue: the one in" in result.err
    result = penstock("train", folder)
    assert "is a folder: add --resume to resume the run in it" in result.err
    shutil.rmtree(folder / "checkpoints")
    result = penstock("train", folder, "--resume")
    assert "holds no checkpoint to continue from: there is none in checkpoints" in result.err


def test_a_damaged_checkpoint_leaves_the_folder_as_it_was(penstock, folder):
    """Found when the ranks verify it, after planning: the old configuration and plan still stand."""
    file = next((folder / "checkpoints" / "step-000004").glob("step-*"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    before = contents(folder)
    result = penstock("train", folder, "--resume", "--lr", "0.01")
    assert result.status == 1
    assert f"{file.name} of the checkpoint" in result.err
    assert "is damaged: its SHA-256 is" in result.err
    assert contents(folder) == before


def test_a_new_learning_rate_is_applied_and_said_and_the_old_settings_are_kept(penstock, folder):
    """It was silently left out: the optimizer's state brings the old one back."""
    words = ("--lr", "0.01", "--momentum", "0.5", "--limit-steps", "6", "--micro-batches", "4")
    result = penstock("train", folder, "--resume", *words)
    assert result.status == 0, result.err
    changed = "limit_steps: 4 -> 6, micro_batches: 2 -> 4, lr: 0.05 -> 0.01, momentum: 0.9 -> 0.5"
    assert f"resuming {folder} with changed settings: {changed}" in result.out.replace("\n", " ")
    saved = folder / "checkpoints" / "step-000006"
    checkpoint = json.loads((saved / "checkpoint.json").read_text())
    assert checkpoint["step"] == 6
    with safe_open(saved / checkpoint["files"][0], framework="pt") as content:
        facts = json.loads(content.metadata()["optimizer"])
    assert {(row["options"]["lr"], row["options"]["momentum"]) for row in facts.values()} == {
        (0.01, 0.5)
    }
    assert load_settings(folder / "config.yaml", {}).lr == 0.01
    assert load_settings(folder / "config-00000004.yaml", {}).lr == 0.05
    assert (folder / "plan-00000004.json").exists()
    assert not (folder / ".resume").exists()


def test_the_weights_of_a_run_are_exported(penstock, folder, tmp_path):
    """Of its newest or its best checkpoint, or of one that is named."""
    target = tmp_path / "weights.pt"
    result = penstock("export-weights", folder, target, "--as", "state-dict")
    assert result.out == f"wrote the weights of step 4 to {target}\n"
    result = penstock("export-weights", folder, tmp_path / "hf", "--as", "huggingface", "--best")
    assert result.out == f"wrote the weights of step 4 to {tmp_path}/hf/model.safetensors\n"
    result = penstock("export-weights", folder / "checkpoints" / "step-000004", tmp_path / "x")
    assert result.out == f"wrote the weights to {tmp_path}/x\n"
    plain, other = load_weights(target), load_weights(tmp_path / "hf")
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[name], other[name]) for name in plain)
    result = penstock("export-weights", tmp_path / "hf", tmp_path / "x", "--best")
    assert (result.status, "is for the folder of a run" in result.err) == (2, True)
    result = penstock("export-weights", folder, tmp_path / "x", "--as", "tar")
    assert (result.status, "format is safetensors, state-dict, huggingface, dcp" in result.err) == (
        2,
        True,
    )


def test_another_number_of_ranks_is_asked_for_in_the_folder_of_a_run(penstock, folder, tmp_path):
    """A run that trains looks for the request twice a second."""
    result = penstock("resize", folder, 3)
    assert (result.status, "no run is training in" in result.err) == (2, True), "it has ended"
    assert f"`penstock train --resume {folder} --ranks 3`" in result.err
    assert not (folder / "resize.json").exists()
    with FolderLock(folder):
        result = penstock("resize", folder, 3)
    assert result.out == f"{folder} goes on with 3 ranks after its next checkpoint\n"
    assert json.loads((folder / "resize.json").read_text()) == {"ranks": 3}
    result = penstock("resize", folder, 0)
    assert (result.status, "a run has 1 rank or more, not 0" in result.err) == (2, True)
    result = penstock("resize", tmp_path / "none", 3)
    assert (result.status, "holds no run: its config.yaml is not there" in result.err) == (2, True)


def begun_on_cuda(folder):
    """Let the folder say that its run was begun on a card."""
    file = folder / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    assert settings["device"] == "cpu", "a run records the device that it has"
    file.write_text(yaml.safe_dump({**settings, "device": "cuda"}))


def test_a_run_of_a_card_does_not_go_on_on_the_cpu_by_itself(penstock, folder, monkeypatch):
    """A run that is ten times slower is to be asked for. Nothing is written before that is said."""
    begun_on_cuda(folder)
    before = contents(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = penstock("train", "--out", folder, "--resume", "--limit-steps", "6")
    assert result.status == 2
    assert "device cuda: no CUDA device is visible" in result.err
    assert contents(folder) == before


def test_a_run_of_a_card_goes_on_on_the_cpu_where_that_is_said(penstock, folder):
    """Weights and optimizer state are loaded there, and the report says that the device is another."""
    begun_on_cuda(folder)
    result = penstock("train", "--out", folder, "--resume", "--limit-steps", "6", "--device", "cpu")
    assert result.status == 0, result.err
    assert "device: cuda -> cpu" in result.out
    assert "the run was on cuda and continues on cpu: weights and optimizer state" in result.out
    outcome = json.loads((folder / "outcome.json").read_text())
    assert (outcome["steps"], outcome["device"]) == (6, "cpu")
    assert outcome["measured_peak_allocated"] is None
    assert yaml.safe_load((folder / "config.yaml").read_text())["device"] == "cpu"
    assert yaml.safe_load((folder / "config-00000004.yaml").read_text())["device"] == "cuda"


def test_a_run_that_does_not_exist_is_one_message(penstock, tmp_path):
    """A typing error in the name of a run is not a file that cannot be read."""
    result = penstock("train", "--resume", tmp_path / "none")
    assert result.status == 2
    assert result.err == (
        f"error: {tmp_path}/none does not exist: --resume needs the folder of a run, such as "
        "runs/NAME\n"
    )
