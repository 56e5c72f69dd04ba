"""Plain values: what options of models and systems are, in files and messages."""

from __future__ import annotations

Plain = str | int | float | bool | None
