"""Tables 2 and 3 of Nunez, Romero-Sandi, Rojas and Meneses 2024, "A Study of Pipeline Parallelism
in Deep Neural Networks": VGG-19 on CIFAR-100, 25 epochs of batches of 128, on 2 to 8 A100.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import final

from penstock.files.json_values import json_value

BATCH, EPOCHS, IMAGES = 128, 25, 50_000
#: Steps of 25 epochs, the last batch of an epoch being smaller.
STEPS = EPOCHS * IMAGES / BATCH
GPUS = (2, 4, 6, 8)
CLASSES, IMAGE, CHANNELS = 100, 32, 3
#: Of the model with torchvision's head; the paper says 138 million.
PARAMETERS = 139_979_940


@final
@dataclass(frozen=True)
class PublishedCell:
    """One experiment of the tables.

    Attributes:
        table: 2 or 3.
        library: "torchgpipe", "fairscale" or "deepspeed".
        balance: "size", "time", "uniform" or "parameters".
        gpus: devices, which is the number of stages.
        micro_batches: per batch; the paper's "chunks".
        loss: training loss after 25 epochs.
        seconds: of 25 epochs.
    """

    table: int
    library: str
    balance: str
    gpus: int
    micro_batches: int
    loss: float
    seconds: float

    @property
    def point(self) -> tuple[int, int]:
        """Micro-batches and devices: what distinguishes cells in a simulation of one process."""
        return self.micro_batches, self.gpus

    def __str__(self) -> str:
        return f"{self.library} by {self.balance}, M={self.micro_batches}, {self.gpus} GPUs"


@cache
def published_cells() -> tuple[PublishedCell, ...]:
    """Return the 56 cells, sorted by micro-batches, library, balance and devices."""
    file = resources.files("penstock.study") / "data" / "study_tables.json"
    tables = json_value(file.read_text(encoding="utf-8"), "study_tables.json")
    cells = []
    for row in tables["table3"]["rows"]:
        for library in ("torchgpipe", "fairscale"):
            for balance, by_count in row[library].items():
                for count, (loss, seconds) in by_count.items():
                    cells.append(
                        PublishedCell(3, library, balance, row["gpus"], int(count), loss, seconds)
                    )
    for row in tables["table2"]["rows"]:
        for library in ("torchgpipe", "fairscale", "deepspeed"):
            for balance, (loss, seconds) in row[library].items():
                cells.append(PublishedCell(2, library, balance, row["gpus"], 16, loss, seconds))
    cells.sort(key=lambda cell: (cell.micro_batches, cell.library, cell.balance, cell.gpus))
    return tuple(cells)
