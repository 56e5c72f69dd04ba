"""Another user of the same machine, who tries to read, to join and to stop a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.ranks import stranger
from tests.runtime.jobs import tiny, tiny_batch
from tests.time_limits import HANG_S

import penstock as ps
from penstock.transport.collectives import all_gather
from penstock.transport.unix_store import VARIABLE

#: User "nobody".
NOBODY = 65534

#: Python of the system, since that of an environment may be where the stranger cannot read.
PYTHON = "/usr/bin/python3"


def visit(pids: list[int], paths: list[str]) -> dict:
    """Let the stranger visit a run. Returns what was tried, with the results."""
    job = json.dumps({"pids": pids, "paths": paths})
    done = subprocess.run(
        [PYTHON, "-I", "-", job],
        input=Path(stranger.__file__).read_text(),
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def train(launcher: int | None) -> tuple[list[float], dict]:
    """Train four steps; after two, a stranger visits the ranks and their launcher, if that is given.

    Returns:
        The losses, and on rank 0 what the stranger has tried.
    """
    pipe = tiny()
    losses = [float(pipe.train_batch(*tiny_batch(number))) for number in range(2)]
    seen: dict = {}
    if launcher is not None:
        pids = all_gather(os.getpid(), int)
        if pipe.rank == 0:
            store = Path(os.environ[VARIABLE].partition(":")[2])
            seen = visit([*pids, launcher], [str(store.parent), str(store)])
    return losses + [float(pipe.train_batch(*tiny_batch(number))) for number in range(2, 4)], seen


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not Path(PYTHON).exists(),
    reason="root can become another user",
)
def test_another_user_can_neither_read_nor_join_nor_stop_a_run(monkeypatch):
    """Memory, descriptors, store and folder are refused, and signals too. What strangers send to
    gloo's sockets once the ranks have met changes no result.
    """
    expected = [losses for losses, _ in ps.launch(train, 2, None)]
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        Path(name).chmod(0o755)  # the stranger may enter: the run's own folder keeps it out
        monkeypatch.setattr(tempfile, "tempdir", name)
        disturbed = ps.launch(train, 2, os.getpid())
    assert [losses for losses, _ in disturbed] == expected
    seen = disturbed[0][1]
    assert seen["user"] == NOBODY
    assert len(seen["results"]) == 3 * len(stranger.OF_PROCESS) + 2 * len(stranger.OF_PATH)
    assert {key: text for key, text in seen["results"].items() if "refused" not in text} == {}
