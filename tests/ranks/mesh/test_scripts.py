"""The scripts of docs/mesh.md run as they stand, in four processes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

import penstock as ps
from penstock.ranks.process_world import join

PAGE = Path(__file__).parents[3] / "docs" / "mesh.md"


def _run_scripts(scripts: list[str], folder: str) -> list[float]:
    """Run scripts one after the other, and return the last loss of each."""
    join()
    os.chdir(folder)
    losses = []
    for script in scripts:
        torch.seed()  # as in a process of its own: the script has to seed the initialisation
        names: dict[str, object] = {"__name__": "script"}
        exec(script, names)
        pipe, loss = names["pipe"], names["loss"]
        assert isinstance(pipe, ps.Pipeline)
        losses.append(float(loss))
        pipe.close()
    return losses


def test_scripts_of_the_page_run(tmp_path):
    """All ranks of a pipeline end with the same loss, and every script leaves a checkpoint."""
    scripts = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(scripts) == 4
    results = ps.launch(_run_scripts, 4, scripts, str(tmp_path), threads=1)
    for row in results[1:]:
        assert row[:3] == results[0][:3]
    assert results[0][3] == results[2][3] != results[1][3]
    names = {path.parent.name for path in tmp_path.glob("*/checkpoint.json")}
    assert names == {
        "checkpoint",
        "checkpoint-fsdp",
        "checkpoint-tensor",
        "checkpoint-0",
        "checkpoint-1",
    }
