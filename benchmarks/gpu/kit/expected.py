"""Predictions of expected.json beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.results import Row, SectionResult

FILE = Path(__file__).parents[1] / "expected.json"


def compare(sections: Sequence[SectionResult], gpu: str | None, file: Path = FILE) -> list[Row]:
    """Return a row for each prediction, with a verdict.

    It is "as expected", "better", "worse", or "missing": the row was not measured, or the card has
    no prediction.

    Args:
        sections: what was measured.
        gpu: the card's name, such as "NVIDIA H100 80GB HBM3"; its column is the one whose name is
            in it.
        file: predictions.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    card = card_of(gpu, content["cards"])
    measured = {
        (section.name, row["row"]): row
        for section in sections
        for row in section.rows
        if row["status"] == "measured"
    }
    return [_compared(item, card, measured) for item in content["rows"]]


def card_of(gpu: str | None, cards: Sequence[str]) -> str | None:
    """The column of a card."""
    return next((card for card in cards if gpu is not None and card in gpu), None)


def _compared(item: Row, card: str | None, measured: dict[tuple[str, str], Row]) -> Row:
    row = measured.get((item["section"], item["row"]), {})
    value = row.get(item["value"])
    low, high = item.get(card, (None, None)) if card is not None else (None, None)
    name = f"{item['section']}: {item['row']}: {item['value']}"
    verdict = verdict_of(value, low, high, item["better"])
    return {"row": name, "low": low, "high": high, "found": value, "verdict": verdict}


def verdict_of(value: Any, low: float | None, high: float | None, better: str) -> str:
    """The verdict on one number.

    Args:
        found: what was measured, None if nothing was.
        low, high: the range predicted; None for a card without a prediction.
        better: "lower" or "higher", or "inside" where either side of the range is worse.

    >>> verdict_of(3.0, 4.0, 5.0, "lower"), verdict_of(3.0, 4.0, 5.0, "higher")
    ('better', 'worse')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "missing"
    if low is None or high is None:
        return "missing"
    if low <= value <= high:
        return "as expected"
    side = "lower" if value < low else "higher"
    return "better" if side == better else "worse"
