"""Models of the user, and of transformers, under every command that takes a model."""

from __future__ import annotations

import json

import pytest
from tests.training.user_modules import MODEL, write_module

import penstock as ps
from penstock.training.config import read_settings

#: Nothing but the training itself.
SHORT = ("--no-self-check", "--baseline-steps", 0, "--checkpoint", "never", "--limit-steps", 2)


@pytest.fixture
def words(monkeypatch, tmp_path):
    """The words that name a model and its data."""
    name = write_module(MODEL, monkeypatch, tmp_path)
    return ("--model", f"{name}:make", "--data", f"{name}:load")


def test_a_model_is_planned_in_one_step_verified_and_trained_by_that_plan(
    penstock, words, tmp_path
):
    """The whole way of a user with a module of two functions."""
    plan_file = tmp_path / "plan.json"
    # One rank: ranks in processes would make this test slow, and are tested elsewhere.
    one_rank = ("--cluster", "local:1", "--batch", 8, "--budget", 0.1)
    planned = penstock("plan", *words[1:], *one_rank, "--out", plan_file)
    assert planned.status == 0, planned.err
    plan = ps.Plan.load(plan_file)
    assert (plan.layer_names, plan.batch, plan.stages) == (("stem", "body", "head"), 8, 1)

    verified = penstock("verify", *words, "--plan", plan_file, "--batch", 8, "--threads")
    assert verified.status == 0, verified.err
    assert "on 1 ranks trains as one device does" in verified.out

    run = tmp_path / "run"
    trained = penstock("train", *words, "--plan", plan_file, "--out", run, *SHORT)
    assert trained.status == 0, trained.err
    assert ps.Plan.load(run / "plan.json") == plan
    settings = read_settings(run / "config.yaml")
    assert (settings["model"], settings["batch"]) == (words[1], 8)

    other = penstock(
        "train", *words, "--model-option", "width=9", "--plan", plan_file, "--out", tmp_path / "o"
    )
    assert other.status == 2
    assert "is the plan of another model" in other.err
    assert not (tmp_path / "o").exists()


def test_a_model_is_profiled_or_estimated(penstock, words):
    """The two ways to a profile have the same layers."""
    flags = ("--batch", 4, "--sizes", 2, "--json")
    measured = penstock("profile", *words, *flags, "--repeats", 1, "--device", "cpu")
    estimated = penstock("profile", *words, *flags, "--on", "V100")
    assert measured.status == estimated.status == 0, measured.err + estimated.err
    fingerprints = {json.loads(ran.out)["fingerprint"] for ran in (measured, estimated)}
    assert len(fingerprints) == 1


def test_a_plan_for_a_cluster_that_is_not_here_is_estimated(penstock, words):
    """Layers measured on this CPU say nothing about a V100."""
    planned = penstock("plan", *words, "--cluster", "4xV100-10GbE", "--budget", 0.1)
    assert planned.status == 0, planned.err
    assert "layer times are estimated for V100" in planned.err


@pytest.mark.parametrize(
    "verb",
    [("train",), ("profile",), ("plan",), ("verify",), ("profile", "--on", "V100")],
)
def test_every_command_refuses_the_same_mistake_by_the_same_message(penstock, verb, words):
    """How a model is written is defined in one place."""
    model = words[1]
    result = penstock(*verb, "--model", f"{model}_no_such", *words[2:])
    assert result.status == 2
    assert f"error: --model {model}_no_such: " in result.err
    assert "has no 'make_no_such'; it has Residual, make, load" in result.err
    result = penstock(*verb, "--model", model)
    assert result.status == 2
    assert f"--model {model} needs --data" in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name what to plan for"),
        (("no.json",), "no.json"),
        (("vgg11", "--model", "vgg13"), "two models: vgg11 and --model vgg13"),
        (("a.json", "--model", "vgg13"), "would be its profile"),
        (("a.json", "--tokens", 3), "--tokens belongs to a model"),
        (("a.json", "--model-option", "layers=2"), "--model-option belongs to a model"),
        (("vgg99",), "no model called 'vgg99'. Did you mean"),
    ],
)
def test_plan_takes_profiles_or_a_model(penstock, words, message):
    """Not both, and not neither."""
    result = penstock("plan", *words)
    assert result.status == 2
    assert message in result.err


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--data", "text"), ("--model-option", "layers=2"), ("--channels", 1), ("--loss", "mse_loss")],
)
def test_verify_refuses_flags_of_a_model_without_one(penstock, flag, value):
    """They would be ignored; the message has the flag as the user wrote it."""
    result = penstock("verify", "--schedule", "gpipe", "--stages", 2, flag, value)
    assert result.status == 2
    assert f"{flag} belongs to --model, which is missing" in result.err


def test_numbers_are_learnt_with_a_loss_of_the_user(penstock, monkeypatch, tmp_path):
    """Regression has a test loss and no accuracy, in every place that shows one."""
    text = """
        import torch
        from torch import nn

        def make(features):
            return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 1))

        def load():
            x = torch.ones(20, 3)
            return x, x.sum(1, keepdim=True)

        def loss(output, target):
            return (output - target).abs().mean()
    """
    name = write_module(text, monkeypatch, tmp_path)
    run = tmp_path / "run"
    words = ("--model", f"{name}:make", "--data", f"{name}:load", "--loss", f"{name}:loss")
    sizes = ("--stages", 1, "--batch", 9, "--epochs", 1, "--micro-batches", 3)
    result = penstock("train", *words, *sizes, "--out", run, *SHORT)
    assert result.status == 0, result.err
    assert "2 steps, loss " in result.out
    assert "test loss" in result.out
    assert json.loads((run / "outcome.json").read_text())["test_accuracy"] is None
    assert "and test loss" in (run / "report.html").read_text()
