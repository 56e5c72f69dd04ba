"""What the metrics of a run hold."""

from __future__ import annotations

import json


def lines_of(folder):
    """Return steps with losses, and steps of evaluations, as the metrics have them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    return losses, [(line["step"], line["test_loss"]) for line in lines if "test_loss" in line]
