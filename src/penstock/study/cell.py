"""A cell: one experiment of a study, in plain values."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.peers.catalogue import label
from penstock.peers.plain import Plain

#: Options as they are stored: pairs of a name and a value, in alphabetical order.
Options = tuple[tuple[str, Plain], ...]


def options(values: Mapping[str, Plain] | None = None, /, **more: Plain) -> Options:
    """Return options as a cell stores them.

    >>> options(width=8, classes=100)
    (('classes', 100), ('width', 8))
    """
    return tuple(sorted({**(values or {}), **more}.items()))


@dataclass(frozen=True)
class Cell:
    """One experiment of a study. A study uses the fields that it needs.

    Attributes:
        study: name of the study.
        system: name of a system of `penstock.peers`, or of whatever the study compares.
        schedule: name of one of its schedules.
        weights: name of a weight rule; empty: the gradients of a step update the weights at its
            end.
        stages: number of stages.
        micro_batches: per step.
        balance: name of a partitioning method, or stage lengths such as "3-3-2".
        model: name in the zoo.
        model_options: of the model.
        data: name of a data set, or "random".
        batch: samples per step.
        epochs, steps: length of the run; with epochs, times and losses are per epoch.
        repetition: number of the repetition, which is also the seed.
        options: of the system or of the study.
    """

    study: str
    system: str = ""
    schedule: str = ""
    weights: str = ""
    stages: int = 1
    micro_batches: int = 1
    balance: str = ""
    model: str = ""
    model_options: Options = ()
    data: str = ""
    batch: int = 1
    epochs: int = 0
    steps: int = 0
    repetition: int = 0
    options: Options = ()

    @property
    def key(self) -> str:
        """A text that identifies the cell. Fields at their defaults are left out, so that it stays
        the same when fields are added.
        """
        values = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != entry.default:
                values[entry.name] = value
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @property
    def group(self) -> Cell:
        """The cell with repetition 0: what its repetitions have in common."""
        return replace(self, repetition=0)

    @property
    def system_label(self) -> str:
        """The system with its schedule and options, as in tables."""
        return label(self.system, self.schedule, dict(self.options))

    @property
    def file_name(self) -> str:
        """A name for files of the cell: readable, and different for different cells."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:8]
        readable = re.sub(r"[^A-Za-z0-9]+", "-", str(self)).strip("-")[:80]
        return f"{readable}-{digest}"

    def option(self, name: str, default: Plain = None) -> Plain:
        """Return an option."""
        return dict(self.options).get(name, default)

    def __str__(self) -> str:
        parts: list[Any] = [self.system_label, self.model, self.weights]
        parts += [f"S={self.stages}", f"M={self.micro_batches}", self.balance]
        parts.append(f"#{self.repetition}" if self.repetition else "")
        return " ".join(part for part in parts if part)
