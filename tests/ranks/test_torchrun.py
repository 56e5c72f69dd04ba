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
from tests.time_limits import HANG_S
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.ranks.process_world import started

#: Its layers pass values of its own classes from process to process.
CROSSING = Path(__file__).parents[1] / "conformance" / "crossing_script.py"

#: Follows it in the same processes: each start of them takes seconds. Only the first attempt trains
#: here, and only the second fails at the end.
TRAINING = """
import json
import os
from tests.runtime import jobs

first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first_attempt:
    found = jobs.everything("mlp", {"balance": [3, 4], "micro_batches": 4}, None, "processes")
    if found["state"]:
        print("found " + json.dumps([float(loss) for loss in found["losses"]]), flush=True)
"""

#: Trains 8 steps; on the first attempt rank 1 is killed after step 5.
RESTARTING = """
import signal
from pathlib import Path


def write_line(*words):
    # torchrun starts Python with -u: print writes word by word, and the ranks share the output.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")


folder = Path(sys.argv[1])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
pipe = ps.Pipeline(
    nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]),
    loss=nn.functional.mse_loss,
    optimizer=jobs.Plain,
    balance=[4 // size] * size,
    schedule="1f1b",
    micro_batches=2,
)
with ps.Checkpoints(folder / "checkpoints", every=2) as checkpoints:
    write_line("resumed", rank, checkpoints.resume(pipe))
    while pipe.step < 8:
        generator = torch.Generator().manual_seed(pipe.step)
        loss = pipe.train_batch(
            torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
        )
        if rank == 0:
            write_line("loss", pipe.step, loss.item().hex())
        if pipe.step == 5 and rank == 1 and first_attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.step(pipe)
    checkpoints.finish(pipe)
pipe.close()
jobs.trapped("raise", "B")
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The scripts as one, on two ranks, started twice, on a free port."""
    folder = tmp_path_factory.mktemp("torchrun")
    script = folder / "script.py"
    script.write_text(CROSSING.read_text(encoding="utf-8") + TRAINING + RESTARTING)
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
    }
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, "-m", *command, "--max-restarts", "1", str(script), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_classes_of_a_script_cross_under_torchrun(done):
    """Every rank runs the whole script, and has classes of its own with the same names."""
    lines = [line for line in done.stdout.splitlines() if "differs" in line]
    assert lines == ["differs: []"] * 4, done.stderr  # of two ranks in two attempts


def test_a_script_under_torchrun_trains_as_threads_do(done):
    """The way that clusters start programs; nothing of Penstock's own launcher is needed."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(lines) == 1, done.stderr
    losses = json.loads(lines[0].removeprefix("found "))
    threads = everything("mlp", {"balance": [3, 4], "micro_batches": 4}, None, "threads")
    assert losses == [float(loss) for loss in threads["losses"]]


def test_a_failing_rank_ends_the_run_and_names_rank_stage_and_op(done):
    """torchrun tells which process ended first; what happened there must stand in its own last
    words. No attempt is left by then.
    """
    assert done.returncode != 0
    assert "rank 1 (stage 1) failed in 1B1 of step 0: ValueError: a planted failure" in done.stderr


def test_torchrun_restarts_a_run_which_goes_on_from_its_checkpoint(done):
    """The store of torchrun is that of the attempt before, with its addresses."""
    resumed = sorted(line for line in done.stdout.splitlines() if line.startswith("resumed"))
    first = [line for line in resumed if line.endswith("None")]
    assert [line.split()[1] for line in first] == ["0", "1"], done.stderr
    assert len(resumed) == 4
    steps = {line.split()[2] for line in resumed if line not in first}
    assert steps in ({"2"}, {"4"})
    losses = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("loss")]
    assert {int(step) for step, _ in losses} == set(range(1, 9))
    assert len(dict(losses)) == len({(step, loss) for step, loss in losses}), "each to the bit"


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
    with pytest.raises(
        ps.PenstockError, match="deadline_s is above 0 and at most 1,000,000, not 0"
    ):
        ps.Pipeline(layers, loss=functional.cross_entropy, balance=[1], deadline_s=0)
