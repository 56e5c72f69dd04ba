"""`penstock train` as a user runs it: real processes, real data, a folder of results."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from typing import NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.time_limits import HANG_S

from penstock.cli.main import status
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.training.run_checkpoints import newest_checkpoint
from penstock.training.sources.user_settings import load_settings
from penstock.training.task import make_task

PROGRAM = (sys.executable, "-m", "penstock")
TRAIN = (
    "train",
    "--model",
    "mlp",
    "--data",
    "digits",
    "--image",
    "8",
    "--channels",
    "1",
    "--batch",
    "128",
    "--lr",
    "0.1",
    "--stages",
    "2",
    "--micro-batches",
    "4",
    "--baseline-steps",
    "0",
)


class Ran(NamedTuple):
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def penstock(capfd, monkeypatch, tmp_path):
    """The command line in this process, which has imported torch already; ranks are processes.

    Their output is captured too, and relative paths are below `tmp_path`.
    """
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Ran:
        code = status([str(word) for word in words])
        return Ran(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """A profile measured once, so that the other runs need not."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    model = ("--model", "mlp", "--image", "8", "--channels", "1")
    words = ("profile", *model, "--batch", "128", "--repeats", "1", "--out", path)
    assert status([str(word) for word in words]) == 0
    return path


def test_a_run_trains_and_leaves_everything_in_its_folder(tmp_path, penstock):
    """The request, plan, prediction, measurements and the trained model."""
    ran = penstock(*TRAIN, "--epochs", "8", "--baseline-steps", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    folder = tmp_path / outcome["folder"]
    assert outcome["test_accuracy"] > 0.85, "a net of this kind learns the digits"
    assert outcome["speed_up"] > 0
    assert outcome["steps"] == 8 * 12
    config = load_settings(folder / "config.yaml", {})
    assert (config.model, config.stages, config.epochs) == ("mlp", 2, 8)
    assert Plan.load(folder / "plan.json").stages == 2
    assert len(Profile.load(folder / "profile.json")) == 15
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 97))
    assert steps[-1]["loss"] == outcome["loss"] < steps[0]["loss"]
    assert [line["epoch"] for line in lines if "epoch" in line] == list(range(1, 9))
    for name in (
        "predicted.svg",
        "predicted.json",
        "measured.svg",
        "measured.json",
        "predicted-and-measured.svg",
        "cluster.yaml",
        "measured-timeline.json",
        "report.html",
    ):
        assert (folder / name).stat().st_size > 100
    assert f"report: {outcome['folder']}/report.html" in ran.stderr
    page = (folder / "report.html").read_text()
    assert "simulated; " in page, "the prediction stands above the measurement"
    assert all("lr" in line for line in steps)
    assert any((folder / "tensorboard").iterdir())
    weights, task = load_file(folder / "weights.safetensors"), make_task(config)
    model = task.model.to_empty(device="cpu")
    model.load_state_dict(weights, strict=True)
    right = (model(task.data.test_inputs).argmax(1) == task.data.test_targets).double().mean()
    assert float(right) == pytest.approx(outcome["test_accuracy"]), (
        "the weights are those that were tested"
    )
    again = penstock(*TRAIN, "--out", folder)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr, "a second run must not write over the first"


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, profile, penstock):
    """A checkpoint has everything: weights, momentum, the place in the data. It is taken up under
    another cut here.
    """
    common = [*TRAIN, "--profile", profile, "--epochs", "2", "--no-self-check"]
    first = [*common, "--schedule", "1f1b"]  # where a stage has copies, sums have another order
    other_cut = ["--partition", "3,12", "--schedule", "gpipe"]
    for words in (
        [*first, "--out", "whole"],
        [*first, "--limit-steps", "17", "--out", "part"],
        [*common, "--out", "part", "--resume", *other_cut],
    ):
        ran = penstock(*words)
        assert ran.returncode == 0, ran.stderr
    whole, continued = (
        load_file(tmp_path / folder / "weights.safetensors") for folder in ("whole", "part")
    )
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_clipping_mixed_precision_and_accumulation_are_flags(tmp_path, profile, penstock):
    """What most recipes say besides a learning rate."""
    flags = [
        "--clip-grad-norm",
        "0.5",
        "--autocast",
        "float16",
        "--accumulate",
        "2",
        "--limit-steps",
        "5",
    ]
    ran = penstock(
        *TRAIN, "--profile", profile, "--schedule", "1f1b", "--out", tmp_path, *flags, "--json"
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["steps"] == 5
    config = load_settings(tmp_path / "config.yaml", {})
    assert (config.clip_grad_norm, config.autocast, config.accumulate, config.compile) == (
        0.5,
        "float16",
        2,
        False,
    )
    index = json.loads((tmp_path / "checkpoints" / "step-000005" / "checkpoint.json").read_text())
    assert index["scaler"] == {"scale": 65536.0, "steps": 3.0, "skipped": 0.0}


#: What a user's callback does to its rank after the second epoch.
KILLING = """
import os, signal

class Killing:
    def on_evaluation(self, step, loss, accuracy):
        if step == 24:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def is_rank(process):
    """Whether a process is a rank that runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "RANK" in process.environ()
    return False


def test_killing_a_rank_ends_the_run_and_names_the_rank(tmp_path, profile, penstock, monkeypatch):
    """The out-of-memory killer of the kernel leaves no message, and no rank may wait for the dead
    one.
    """
    (tmp_path / "killing.py").write_text(KILLING)
    monkeypatch.syspath_prepend(tmp_path)
    ran = penstock(*TRAIN, "--epochs", "3", "--profile", profile, "--callbacks", "killing:Killing")
    children = psutil.Process().children(recursive=True)
    assert not list(filter(is_rank, children))
    assert ran.returncode == 1
    assert re.search(r"rank 0 \(pid \d+\) was killed by SIGKILL; rank 1 stopped", ran.stderr)
    assert "Traceback" not in ran.stderr


def test_control_c_stops_all_ranks_and_keeps_the_checkpoint(tmp_path, profile):
    """The training so far must not be lost. Started as a program: a run that would go on for ever."""
    out = ("--profile", str(profile), "--out", str(tmp_path / "run"))
    # A session of its own, so that a signal to it is not one to pytest.
    process = subprocess.Popen(
        [*PROGRAM, *TRAIN, "--epochs", "100000", *out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stderr:
        if line.startswith("epoch 2:"):  # the checkpoint of the first epoch is complete by then
            break
    # The ranks, and the fork server that started them.
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = list(filter(is_rank, children))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    assert not psutil.wait_procs(ranks, timeout=HANG_S)[1]
    assert process.returncode == 130
    assert errors.rstrip().endswith("stopped")
    assert newest_checkpoint(tmp_path / "run").step >= 12


def test_a_loss_that_is_not_finite_ends_the_run_with_a_message(profile, penstock):
    """Further training with such weights is useless; the message has remedies."""
    ran = penstock(*TRAIN, "--lr", "1e6", "--epochs", "3", "--profile", profile, "--out", "run")
    assert ran.returncode == 1
    assert re.search(
        r"the loss of micro-batch \d is (nan|inf)|the gradient of .* is not", ran.stderr
    )
    assert "Lower the learning rate" in ran.stderr
    assert "Traceback" not in ran.stderr


#: The cut is said, for what an asynchronous run learns depends on it, and a planner may choose
#: another one the next time.
STREAM = [*TRAIN, "--weights", "stash", "--schedule", "pipedream", "--partition", "6,9"]


def test_an_asynchronous_run_trains_as_a_stream_and_reports_versions_and_memory(
    tmp_path, profile, penstock
):
    """Losses are in order, one line each; the pipeline is drained at the end of an epoch; measured
    versions and memory are beside the predicted ones.
    """
    ran = penstock(*STREAM, "--profile", profile, "--epochs", "8", "--out", "run", "--json")
    assert ran.returncode == 0, ran.stderr
    outcome = json.loads(ran.stdout)
    assert outcome["test_accuracy"] > 0.8, "gradients that are one update old learn the digits too"
    assert (outcome["weights"], outcome["synchronous"]) == ("stash", False)
    assert outcome["predicted_weight_versions"] == outcome["measured_weight_versions"] == [2, 1]
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert (plan.weights, plan.schedule_name, plan.synchronous) == ("stash", "pipedream", False)
    assert outcome["predicted_step_s"] == plan.predicted.step_s
    assert outcome["measured_step_s"] > 0
    assert 0 <= outcome["measured_bubble_ratio"] <= 1
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 97))
    assert all(line["step_s"] > 0 for line in steps)
    epochs = [line for line in lines if "epoch" in line]
    assert [line["step"] for line in epochs] == list(range(12, 97, 12))
    assert all(
        line["weight_versions"] == [2, 1] and len(line["peak_memory"]) == 2 for line in epochs
    )
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    task = make_task(load_settings(tmp_path / "run" / "config.yaml", {}))
    model = task.model.to_empty(device="cpu")
    model.load_state_dict(weights, strict=True)
    right = (model(task.data.test_inputs).argmax(1) == task.data.test_targets).double().mean()
    assert float(right) == pytest.approx(outcome["test_accuracy"]), (
        "what was tested had been drained"
    )


def test_an_asynchronous_run_resumes_where_it_stopped(tmp_path, profile, penstock):
    """This holds also in the middle of an epoch: a run that stops drains first, and continues like
    a run that drained there.
    """

    def losses_after(folder, *words):
        common = ("--profile", profile, "--epochs", "2", "--no-self-check")
        ran = penstock(*STREAM, *common, "--out", folder, *words)
        assert ran.returncode == 0, ran.stderr
        text = (tmp_path / folder / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    whole = losses_after("whole")
    losses_after("part", "--limit-steps", "12")
    steps = losses_after("part", "--limit-steps", "17", "--resume")
    assert steps == whole[:17], (
        "the second epoch starts from the checkpoint that the first one left"
    )
    assert [step for step, _ in losses_after("part", "--resume")] == list(range(1, 25))


def test_the_self_check_of_a_new_run_changes_nothing_and_prints_its_result(profile, penstock):
    """Weights, random numbers and the order of the data are those without it; a run that continues
    from a checkpoint needs none.
    """
    # A planner may choose another schedule the next time, which adds gradients up in another order.
    common = [*TRAIN, "--profile", profile, "--schedule", "1f1b"]
    outcomes = []
    for words in ([], ["--no-self-check"]):
        ran = penstock(*common, "--limit-steps", "3", "--json", *words)
        assert ran.returncode == 0, ran.stderr
        outcomes.append(json.loads(ran.stdout))
        assert ("self-check: as one device to" in ran.stderr) == (not words)
    assert outcomes[0]["loss"] == outcomes[1]["loss"]
    assert outcomes[0]["test_loss"] == outcomes[1]["test_loss"]
