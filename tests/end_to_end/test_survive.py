"""A run that loses a rank, goes on without it, gets it back, and is ended by a signal: as if nothing
had happened.

One run of real processes makes all claims, as every start takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys

import psutil
import torch
from tests.time_limits import HANG_S
from tests.training.run_metrics import lines_of

from penstock.checkpoint.checkpoint_index import read_index
from penstock.checkpoint.series import step_folders
from penstock.plan.plan import Plan
from penstock.training.rank import profile_rank, train_on
from penstock.training.run_checkpoints import request_ranks
from penstock.training.sources.user_settings import load_settings

RANKS = 3

WORDS = {
    "model": "mlp",
    "image": 8,
    "channels": 1,
    "batch": 128,
    "lr": 0.05,
    "ranks": RANKS,
    "stages": RANKS,
    "schedule": "1f1b",
    "micro_batches": 4,
    "recompute": "never",
    "epochs": 100_000,
    "self_check": False,
    "baseline_steps": 0,
    "profile_repeats": 1,
}


def start(folder, profile, *more):
    """Start `penstock train` in a session of its own; its output comes through one pipe."""
    flags = []
    for name, value in WORDS.items():
        flag = name.replace("_", "-")
        flags += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    command = [sys.executable, "-m", "penstock", "train", *flags, "--profile", str(profile)]
    return subprocess.Popen(
        [*command, "--out", str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_to(process, pattern, seen):
    """Read lines up to one that matches; it must come."""
    for line in process.stdout:
        seen.append(line)
        match = re.search(pattern, line)
        if match:
            return match
    raise AssertionError(f"no {pattern!r} in: {''.join(seen)}")


def process_of_rank(process, rank):
    """Return the process of a rank of a run."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == str(rank))


def test_a_run_loses_a_rank_goes_on_gets_it_back_and_ends_at_a_signal_with_the_same_losses(
    tmp_path,
):
    """Three ranks, two, three again: every step is there once, with the loss that a run has that
    nothing has happened to. SIGTERM goes to all processes, as a scheduler sends it.
    """
    profile, folder = tmp_path / "profile.json", tmp_path / "run"
    profile_rank(load_settings(None, WORDS), 1).save(profile)
    seen: list[str] = []
    process = start(
        folder, profile, "--max-restarts", "2", "--min-ranks", "2", "--checkpoint-every", "20"
    )
    try:
        read_to(process, "^epoch 2:", seen)
        first_plan = Plan.load(folder / "plan.json")
        process_of_rank(process, RANKS - 1).send_signal(signal.SIGKILL)
        lost = int(
            read_to(process, f"^restart 1 of 2: {RANKS - 1} ranks continue from step (.*)", seen)[1]
        )
        read_to(process, "^epoch", seen)
        assert Plan.load(folder / "plan.json").ranks == RANKS - 1
        request_ranks(folder, RANKS)  # as `penstock resize` does
        grown = int(read_to(process, f"^{RANKS} ranks continue from step (.*)", seen)[1])
        read_to(process, "^epoch", seen)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has saved and ended already
                child.send_signal(signal.SIGTERM)
        ended = int(read_to(process, "^SIGTERM has ended the run after step ([0-9]+), ", seen)[1])
        assert process.wait(HANG_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.stdout.close()
    assert not psutil.wait_procs(children, HANG_S)[1], "no process may be left"
    assert any(
        f"rank {RANKS - 1} (pid" in line and "was killed by SIGKILL" in line for line in seen
    )
    assert 12 <= lost < grown < ended
    steps = [read_index(saved).step for saved in step_folders(folder / "checkpoints")]
    assert steps[0] == ended
    assert len(steps) <= 4, "three and the best"
    log = [json.loads(line) for line in (folder / "restarts.jsonl").read_text().splitlines()]
    assert [(line["step"], line["ranks"]) for line in log] == [(lost, RANKS - 1), (grown, RANKS)]
    reference = tmp_path / "reference"
    reference.mkdir()
    config = load_settings(None, {**WORDS, "limit_steps": ended, "checkpoint": "never"})
    train_on(config, first_plan, reference, True, torch.device("cpu"), "threads")
    losses, _ = lines_of(folder)
    assert losses == lines_of(reference)[0]
    assert [step for step, _ in losses] == list(range(1, ended + 1))
