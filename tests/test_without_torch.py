"""An installation without torch: the planning half works, everything else says what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.time_limits import HANG_S

ROOT = Path(__file__).parents[1]
PROFILE = str(ROOT / "docs" / "funnel.profile.json")
SCHEDULE = ["--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"]
REMEDY = "needs torch; install it with: pip install 'penstock[torch]'"

#: Commands that must work, in this order: a later one reads the files of an earlier one.
PLANNING = {
    "version": ["--version"],
    "list models": ["list", "models"],
    "simulate": ["simulate", *SCHEDULE],
    "draw": ["draw", *SCHEDULE, "drawing.svg"],
    "verify": ["verify", *SCHEDULE],
    "schedules": ["schedules", "--stages", "2", "--micro-batches", "4"],
    "partition": ["partition", PROFILE, "--stages", "2", "--by", "time"],
    "plan": ["plan", PROFILE, "--cluster", "local:2", "--stages", "2", "--out", "plan.json"],
    "show": ["show", "plan.json"],
    "export": ["export", "plan.json", "--as", "torchgpipe"],
    "report": ["report", "plan.json", "--out", "report.html"],
    "doctor": ["doctor"],
    "explore": ["explore", "--help"],
    **{
        f"list {kind}": ["list", kind]
        for kind in ("schedules", "planners", "partitioners", "weights", "clusters", "exports")
    },
}
#: Commands that need torch.
RUNTIME = {
    "train": ["train"],
    "resize": ["resize", "runs/x", "2"],
    "profile a model": ["profile", "--model", "vgg11"],
    "profile for another device": ["profile", "--model", "vgg11", "--on", "V100"],
    "profile a cluster": ["profile", "--cluster", "local:2"],
    "verify gradients": ["verify", "--train", "gpt", "--stages", "2"],
    "study": ["study", "paper"],
    "export-weights": ["export-weights", "checkpoint", "weights.safetensors"],
}
NAMES = [
    "Checkpoints",
    "Namespace",
    "Pipe",
    "Pipeline",
    "analytic",
    "chain",
    "launch",
    "load_weights",
    "pop",
    "profile",
    "save_weights",
    "side_loss",
    "skippable",
    "stash",
    "verify_skippables",
]

#: Runs in a process of its own, in which no import of torch succeeds.
SCRIPT = """
import contextlib, io, json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
sys.modules["torch"] = None  # importlib.util.find_spec answers None, as without an installation
from penstock.cli.main import status
import penstock

results = {}
for name, command in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = status(command)
        except Exception as error:
            code, err = -1, io.StringIO(f"traceback: {error!r}")
    results[name] = [code, out.getvalue(), err.getvalue()]

names = {}
for name in penstock.__all__:
    try:
        getattr(penstock, name)
    except penstock.MissingExtra as error:
        names[name] = str(error)
sys.__stdout__.write(json.dumps([results, names]))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[dict[str, list], dict[str, str]]:
    """Exit status, output and errors of every command, and the message of every name that is
    missing, of one process without torch.
    """
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({**PLANNING, **RUNTIME})],
        cwd=tmp_path_factory.mktemp("without_torch"),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    results, names = json.loads(ran.stdout)
    return results, names


@pytest.mark.parametrize("name", PLANNING)
def test_planning_commands_work(name, outcome):
    """A laptop or a login node has no torch, and plans there."""
    code, out, err = outcome[0][name]
    assert code == 0, err
    assert out or "wrote" in err


@pytest.mark.parametrize("name", RUNTIME)
def test_commands_that_need_torch_say_so_in_one_line(name, outcome):
    """A traceback of imports would tell a user nothing."""
    code, out, err = outcome[0][name]
    assert (code, out) == (2, "")
    assert err == f"error: this command {REMEDY}\n"


def test_names_that_need_torch_say_so(outcome):
    """`ps.Pipeline` raises MissingExtra, an ImportError; every planning name is there."""
    assert outcome[1] == {name: f"penstock.{name} {REMEDY}" for name in NAMES}


def test_doctor_says_what_is_missing(outcome):
    """The first command after an installation must not suggest that all is there."""
    assert "not installed; training and measuring need it" in outcome[0]["doctor"][1]


def test_another_missing_module_is_not_taken_for_torch():
    """A broken installation of another package must show its own name."""
    from penstock.errors import missing_torch

    assert missing_torch(ModuleNotFoundError("no yaml", name="yaml"), "this") is None
    assert missing_torch(ModuleNotFoundError("no name"), "this") is None
    assert str(missing_torch(ModuleNotFoundError("x", name="torch.nn"), "this")) == f"this {REMEDY}"
