"""Under torchrun: a Pipeline in a plain script, and a failing rank that ends the run with a word on
where.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.runtime.jobs import everything
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.ranks.process_world import started

SCRIPT = """
import json
import sys
from tests.runtime.jobs import everything, trapped

if sys.argv[1] == "fail":
    trapped("raise", "B")
found = everything("mlp", {"balance": [3, 4], "micro_batches": 4}, None, "processes")
if found["state"]:
    print("found " + json.dumps([float(loss) for loss in found["losses"]]), flush=True)
"""

SOON_S = 120


def torchrun(tmp_path, word):
    """The script on two ranks, on a free port."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        word,
    ]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SOON_S, check=False
    )


def test_a_script_under_torchrun_trains_as_threads_do(tmp_path):
    """The way that clusters start programs; nothing of Penstock's own launcher is needed."""
    done = torchrun(tmp_path, "work")
    assert done.returncode == 0, done.stderr
    results = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("found")).removeprefix(
            "found "
        )
    )
    assert results == [
        float(loss)
        for loss in everything("mlp", {"balance": [3, 4], "micro_batches": 4}, None, "threads")[
            "losses"
        ]
    ]


def test_a_failing_rank_ends_the_run_and_names_rank_stage_and_op(tmp_path):
    """torchrun tells which process ended first; what happened there must stand in its own last
    words.
    """
    done = torchrun(tmp_path, "fail")
    assert done.returncode != 0
    assert "rank 1 (stage 1) failed in 1B1 of step 0: ValueError: a planted failure" in done.stderr


def test_one_rank_alone_needs_neither_torchrun_nor_launch(monkeypatch):
    """A pipeline of one stage is plain training with the same calls: the smallest first run there
    is.
    """
    monkeypatch.delenv("RANK", raising=False)
    assert not started()
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(16, 4)), loss=functional.cross_entropy, balance=[1], micro_batches=2
    )
    pipe.train_batch(torch.randn(4, 16), torch.arange(4))


def test_an_unknown_executor_and_a_deadline_of_nothing_are_refused():
    """Before anything starts."""
    layers = nn.Sequential(nn.Linear(16, 4))
    with pytest.raises(
        ps.PenstockError, match="executor is 'processes' or 'threads', not 'inline'"
    ):
        ps.Pipeline(layers, loss=functional.cross_entropy, balance=[1], executor="inline")
    with pytest.raises(ps.PenstockError, match="deadline_s is above 0, not 0"):
        ps.Pipeline(layers, loss=functional.cross_entropy, balance=[1], deadline_s=0)
