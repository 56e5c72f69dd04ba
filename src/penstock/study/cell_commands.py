"""Command of a cell's process: run the cell's own function."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.errors import SettingError
from penstock.files.read import validate
from penstock.peers.commands import command
from penstock.study.catalogue import study_entry
from penstock.study.cell import Cell


@command("measure")
def measure(state: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the study's `measure` on a cell and return its outcome as plain values."""
    import torch

    del state
    torch.set_num_threads(1)
    cell = validate(json.dumps(arguments["cell"]), Cell, "a message")
    entry = study_entry(cell.study)
    if entry.measure is None:
        raise SettingError(f"the study {cell.study} has no function that runs a cell")
    return asdict(entry.measure(cell, Path(arguments["folder"])))
