"""The fake system and study, here and in the processes that a study starts."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def fake(monkeypatch):
    """The module `fake_systems`, importable by that name in every process that the test starts."""
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("fake_systems")


@pytest.fixture
def light_hosts(monkeypatch):
    """Hosts load what a fake needs, not what a pipeline does: seconds less for each."""
    monkeypatch.setattr("penstock.peers.host.ALWAYS", ("torch", "penstock.peers.rank"))
    monkeypatch.setattr("penstock.study.runner.CELL_MODULES", ("penstock.study.cell_commands",))


class Recorder:
    """Progress that remembers what it was told."""

    def __init__(self):
        self.pending = self.total = None
        self.begun = []
        self.ended = []

    def start(self, pending, total):
        self.pending, self.total = pending, total

    def begin(self, cells):
        self.begun.append(cells)

    def end(self, record, left_s):
        assert left_s >= 0
        self.ended.append(record)


@pytest.fixture
def recorder():
    """Progress that remembers what it was told."""
    return Recorder()
