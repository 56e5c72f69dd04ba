"""Cells of `penstock study paper`: the paper's 56, other systems on the same cells, and two
comparisons that test the paper's explanations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.cluster.local import available_cores
from penstock.peers.catalogue import system
from penstock.study.cell import Cell, Options, options
from penstock.study.paper.published import (
    BATCH,
    CHANNELS,
    CLASSES,
    EPOCHS,
    GPUS,
    IMAGE,
    PublishedCell,
    published_cells,
)
from penstock.study.settings import Settings

STUDY = "paper"
#: The paper says "SGD" and no learning rate. At this one VGG-19 without batch norm trains.
LEARNING_RATE, MOMENTUM = 0.01, 0.9
#: At the small scale: channels of the first block (64 in the paper) and steps of a cell, so that
#: all cells end within 10 minutes on two cores.
SMALL_WIDTH, SMALL_STEPS = 4, 3
#: Repetitions of cells at the small scale that mean something on this machine; of others one.
SMALL_REPETITIONS = 3
FULL_REPETITIONS = 10
#: The libraries' schedules and options in the paper's cells. Recomputation: torchgpipe's and
#: FairScale's default "except_last", and every layer in DeepSpeed, as the paper says.
LIBRARIES: dict[str, tuple[str, Options]] = {
    "torchgpipe": ("gpipe", options(checkpoint="except_last")),
    "fairscale": ("gpipe", options(checkpoint="except_last")),
    "deepspeed": ("1f1b", options(recompute=1)),
}
MICRO_BATCHES = (1, 8, 16)
MOST = 16


@dataclass(frozen=True)
class Template:
    """What all cells have in common at a scale."""

    base: Cell
    repetitions: int | None
    cores: int

    def cell(
        self,
        name: str,
        schedule: str = "",
        stages: int = 1,
        micro_batches: int = 1,
        balance: str = "",
        system_options: Options = (),
    ) -> Cell:
        """Return a cell with repetition 0."""
        return replace(
            self.base,
            system=name,
            schedule=schedule,
            stages=stages,
            micro_batches=micro_batches,
            balance=balance,
            options=options(dict(system_options), lr=LEARNING_RATE, momentum=MOMENTUM),
        )

    def repeat(self, cell: Cell) -> list[Cell]:
        """Return the repetitions of a cell."""
        count = self.repetitions
        if count is None:
            count = SMALL_REPETITIONS if cell.stages <= self.cores else 1
        return [replace(cell, repetition=index) for index in range(count)]


def template(settings: Settings) -> Template:
    """Return the common fields of the cells at a scale."""
    small = settings.scale == "small"
    width = {"width": SMALL_WIDTH} if small else {}
    base = Cell(
        STUDY,
        model="vgg19",
        model_options=options(
            classes=CLASSES, image=IMAGE, channels=CHANNELS, head="torchvision", **width
        ),
        data=settings.data or "digits",
        batch=BATCH,
        epochs=0 if small else EPOCHS,
        steps=SMALL_STEPS if small else 0,
    )
    repetitions = settings.repetitions
    if repetitions is None and not small:
        repetitions = FULL_REPETITIONS
    return Template(base, repetitions, available_cores())


def paper_cell(common: Template, published: PublishedCell) -> Cell:
    """Return a published cell as it is run here."""
    schedule, system_options = LIBRARIES[published.library]
    return common.cell(
        published.library,
        schedule,
        published.gpus,
        published.micro_batches,
        published.balance,
        system_options,
    )


def paper_cells(common: Template) -> list[Cell]:
    """Return the paper's 56 cells."""
    return [paper_cell(common, published) for published in published_cells()]


def other_cells(common: Template) -> list[Cell]:
    """Return other systems on the same numbers of devices and micro-batches, on the cut by time
    that the libraries have.
    """
    cells = [common.cell("plain")]
    for stages in GPUS:
        cells.append(common.cell("penstock", "auto", stages))
        cells += [common.cell("penstock", "1f1b", stages, count, "time") for count in MICRO_BATCHES]
        cells += [common.cell("torch", "gpipe", stages, count, "time") for count in MICRO_BATCHES]
        cells.append(common.cell("torch", "1f1b", stages, 8, "time"))
        for schedule in system("torch").schedules:
            if schedule != "gpipe":
                cells.append(common.cell("torch", schedule, stages, MOST, "time"))
        cells.append(common.cell("ddp", stages=stages))
        cells.append(common.cell("fsdp2", stages=stages))
    return cells


def one_process_pairs(common: Template) -> list[tuple[Cell, Cell]]:
    """Return pairs of cells with equal cut, schedule and recomputation: all stages in one process,
    and one process per stage.
    """
    never = options(checkpoint="never")
    pairs = []
    for stages in GPUS:
        one = common.cell("penstock-pipe", "gpipe", stages, MOST, "time", never)
        pairs.append((one, common.cell("penstock", "gpipe", stages, MOST, "time")))
    return pairs


def balance_pairs(common: Template) -> list[tuple[Cell, Cell]]:
    """Return pairs of cells that differ in the balance only: by size, and by time."""
    pairs = []
    for name in ("torchgpipe", "fairscale"):
        schedule, system_options = LIBRARIES[name]
        for stages in GPUS:
            by_size = common.cell(name, schedule, stages, MOST, "size", system_options)
            pairs.append((by_size, replace(by_size, balance="time")))
    for stages in GPUS:
        by_size = common.cell("penstock", "1f1b", stages, MOST, "size")
        pairs.append((by_size, replace(by_size, balance="time")))
    return pairs


def all_cells(settings: Settings) -> list[Cell]:
    """Return all cells in the order of running: those of one library follow each other, and its
    repetitions are spread over the run.
    """
    common = template(settings)
    groups = [*paper_cells(common), *other_cells(common)]
    for pair in (*one_process_pairs(common), *balance_pairs(common)):
        groups += pair
    repeated = [cell for group in dict.fromkeys(groups) for cell in common.repeat(group)]
    # All first repetitions come first: an interrupted study has every row, and a slow minute of the
    # machine does not hit all repetitions of one cell.
    repeated.sort(key=lambda cell: cell.repetition)
    return repeated
