"""A study of a minute: does every system that is installed train here?"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.peers.catalogue import systems
from penstock.report.document import Page, Report, Section
from penstock.study.catalogue import register
from penstock.study.cell import Cell, options
from penstock.study.records import Record
from penstock.study.settings import Settings
from penstock.study.tables import record_table

_STAGES = 2
_MICRO_BATCHES = 4


@register("smoke", about="Does every system and schedule that is installed train a small model?")
class Smoke:
    """Every system with every schedule, on a small MLP."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return a cell per system and schedule."""
        cells = []
        for name, system in systems().items():
            for schedule in system.schedules or ("",):
                for repetition in range(settings.repeat(1, 3)):
                    cells.append(
                        Cell(
                            "smoke",
                            name,
                            schedule,
                            stages=_STAGES,
                            micro_batches=_MICRO_BATCHES,
                            balance="uniform",
                            model="mlp",
                            model_options=options(layers=6),
                            data="random",
                            batch=32,
                            steps=3,
                            repetition=repetition,
                        )
                    )
        return cells

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return one table."""
        del settings
        table = record_table("systems", "Systems", records)
        trained = sum(record.ok for record in records)
        summary = (f"{trained} of {len(records)} runs trained.",)
        page = Page("smoke", "Systems", (Section("Systems", (table,)),), summary=summary)
        return Report("Systems that train here", (page,))
