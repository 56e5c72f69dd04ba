"""A system and a study for tests, importable by the processes that a study starts."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from penstock.errors import SettingError
from penstock.peers.catalogue import register as register_system
from penstock.report.document import Page, Report, Section
from penstock.study.catalogue import register as register_study
from penstock.study.cell import Cell
from penstock.study.records import Outcome
from penstock.study.tables import record_table


@register_system(
    "fake",
    imports=("fake_systems",),
    schedules=("good", "raises", "dies"),
    options={"note": ("", "x")},
    processes="alone",
)
def make(job):
    """A system whose schedule says what happens."""
    if job.setup.schedule == "raises":
        raise ValueError("the fake raised")

    def step(inputs, targets):
        if job.setup.schedule == "dies":
            os._exit(3)
        return job.loss(inputs[:, :10], targets)

    return step


def measure(cell: Cell, folder: Path) -> Outcome:
    """Do what the cell's schedule says; every call leaves a line in the folder."""
    with (folder / "calls.txt").open("a") as file:
        file.write(f"{cell.schedule} {cell.repetition}\n")
    if cell.schedule == "hangs":
        child = subprocess.Popen(["sleep", "600"])
        (folder / "child.txt").write_text(str(child.pid))
        child.wait()
    if cell.schedule == "refuses":
        raise SettingError("the fake refuses")
    if cell.schedule == "misses":
        import no_such_package  # noqa: F401
    if cell.schedule == "fails":
        raise ZeroDivisionError("the fake failed")
    if cell.schedule == "kills":
        os.kill(os.getppid(), 9)
        time.sleep(600)
    seconds = (1.0 + cell.repetition, 2.0 + cell.repetition, 9.0)
    return Outcome(seconds, (2.0, 1.0), (100, 200), extra={"pid": os.getpid()})


@register_study("fake-study", about="A study for tests.", measure=measure, limit_s=30.0)
class FakeStudy:
    """A cell per behaviour."""

    behaviours = ("works", "refuses", "misses", "fails")

    def cells(self, settings):
        cells = []
        for behaviour in self.behaviours:
            for repetition in range(settings.repeat(1, 2)):
                cells.append(Cell("fake-study", "fake", behaviour, repetition=repetition))
        return cells

    def report(self, settings, records):
        table = record_table("cells", "Cells", records)
        return Report("Fake", (Page("fake", "Fake", (Section("Cells", (table,)),)),))
