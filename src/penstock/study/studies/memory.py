"""`penstock study memory`: who trains a model that does not fit on one device, and at what cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from penstock.peers.catalogue import systems
from penstock.report.document import (
    Chart,
    Column,
    Page,
    Report,
    Section,
    Series,
    Table,
    Text,
    Value,
)
from penstock.study.catalogue import register
from penstock.study.cell import Cell, options
from penstock.study.records import Record
from penstock.study.settings import Settings
from penstock.study.tables import by_group, peaks_of, reason_of, step_seconds

STUDY = "memory"
_MIB = 2**20
#: Ranks, hidden size of the MLP, and the limit of a process in MiB. Weights, gradients and momentum
#: of all layers take 3 * 4 bytes a parameter: about 200 MiB at the small scale, of which a stage of
#: two needs half.
_SIZES = {"small": (2, 1024, 200), "full": (4, 4096, 2000)}
_LAYERS, _BATCH, _MICRO_BATCHES = 18, 64, 4
#: Systems and schedules that are compared; "": the system has no schedules.
_SYSTEMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plain", ("",)),
    ("ddp", ("",)),
    ("fsdp2", ("",)),
    ("penstock", ("gpipe", "1f1b", "zb-h1", "interleaved")),
    ("torch", ("gpipe", "1f1b", "interleaved")),
    ("deepspeed", ("1f1b",)),
    ("torchgpipe", ("gpipe",)),
    ("fairscale", ("gpipe",)),
    ("penstock-pipe", ("gpipe",)),
)


@register(
    STUDY,
    about="Who trains a model that does not fit on one device, and at what cost?",
    limit_s=90.0,
)
class Memory:
    """Every system without a limit, and with a limit of memory that the kernel enforces."""

    def cells(self, settings: Settings) -> list[Cell]:
        """Return two cells per system and schedule: without and with the limit."""
        _, _, limit_mib = _SIZES[settings.scale]
        cells = []
        for name, schedules in _SYSTEMS:
            for schedule in schedules:
                for limit_bytes in (0, limit_mib * _MIB):
                    cell = _cell(name, schedule, limit_bytes, settings)
                    for repetition in range(settings.repeat(1, 3)):
                        cells.append(replace(cell, repetition=repetition))
        return cells

    def report(self, settings: Settings, records: Sequence[Record]) -> Report:
        """Return a table of systems, with and without the limit."""
        _, hidden, limit_mib = _SIZES[settings.scale]
        pairs = _pairs(records)
        plain_s = _plain_seconds(pairs)
        rows = tuple(_row(name, pair, plain_s) for name, pair in pairs.items())
        text = (
            f"An MLP of {_LAYERS} layers of {hidden} units, batch {_BATCH}, SGD with momentum. "
            f"Each process may have {limit_mib} MiB above what its imports took; the kernel "
            "refuses more (RLIMIT_DATA)."
        )
        caption = (
            "Trains: whether the run with the limit ended. Peaks are resident memory without the "
            "limit; the limit counts reserved memory as well, so that a peak just below it can "
            "fail."
        )
        table = Table(STUDY, "Systems", _COLUMNS, rows, caption, ("records.jsonl",))
        sections = (
            Section("Systems under a memory limit", (Text(text), table, _chart(pairs, limit_mib))),
        )
        command = f"penstock study {STUDY} --scale {settings.scale}"
        title = "Training under a memory limit"
        return Report(title, (Page(STUDY, title, sections, command, _summary(pairs, plain_s)),))


def _cell(name: str, schedule: str, limit_bytes: int, settings: Settings) -> Cell:
    """Return the first repetition of a system with a schedule; a limit of 0 is none."""
    ranks, hidden, _ = _SIZES[settings.scale]
    is_pipeline = systems()[name].pipeline
    return Cell(
        STUDY,
        name,
        schedule,
        stages=ranks if name != "plain" else 1,
        micro_batches=_MICRO_BATCHES if is_pipeline else 1,
        balance="parameters" if is_pipeline else "",
        model="mlp",
        model_options=options(layers=_LAYERS, hidden=hidden),
        data="random",
        batch=_BATCH,
        steps=4,
        options=options(memory_limit=limit_bytes) if limit_bytes else (),
    )


#: By name of a system with its schedule: records without and with the limit.
Pairs = dict[str, tuple[list[Record], list[Record]]]


def _pairs(records: Sequence[Record]) -> Pairs:
    """Return the records without and with the limit, by system and schedule."""
    pairs: Pairs = {}
    for cell, group in by_group(records).items():
        pair = pairs.setdefault(cell.system_label, ([], []))
        pair[1 if cell.option("memory_limit") else 0].extend(group)
    return pairs


def _seconds(records: Sequence[Record]) -> float | None:
    """Return the mean over repetitions of the median step; None without any."""
    seconds = step_seconds(records)
    return statistics.fmean(seconds) if seconds else None


def _plain_seconds(pairs: Pairs) -> float | None:
    """Return the seconds of a step of plain training without the limit."""
    return _seconds(pairs["plain"][0]) if "plain" in pairs else None


_COLUMNS = (
    Column("system"),
    Column("peak of a process", "bytes", about="without the limit, above its imports"),
    Column("step", "seconds", about="without the limit"),
    Column("trains", about="with the limit"),
    Column("step with the limit", "seconds"),
    Column("to plain", "number", 2, "step with the limit over plain training's without it"),
    Column("note"),
)


def _row(
    name: str, pair: tuple[Sequence[Record], Sequence[Record]], plain_s: float | None
) -> tuple[Value, ...]:
    """Return the row of a method: its memory without a limit, and its time with one."""
    free, limited = pair
    seconds = _seconds(limited)
    trains = "" if not limited else "yes" if seconds is not None else "no"
    return (
        name,
        max(peaks_of(free), default=None),
        _seconds(free),
        trains,
        seconds,
        seconds / plain_s if seconds is not None and plain_s else None,
        reason_of([*free, *limited]),
    )


def _chart(pairs: Pairs, limit_mib: int) -> Chart:
    """Return a bar per system: its peak, with the limit as its own bar."""
    categories, peaks = ["limit"], [float(limit_mib)]
    for name, (free, _) in pairs.items():
        peak = max(peaks_of(free), default=None)
        if peak is not None:
            categories.append(name)
            peaks.append(peak / _MIB)
    x = tuple(float(index) for index in range(len(categories)))
    return Chart(
        f"{STUDY}-chart",
        "Peak memory of a process without the limit",
        "system",
        "MiB",
        (Series("peak", x, tuple(peaks)),),
        "bar",
        tuple(categories),
    )


def _summary(pairs: Pairs, plain_s: float | None) -> tuple[str, ...]:
    """Return who trains under the limit, and the fastest of them."""
    training = {name: _seconds(limited) for name, (_, limited) in pairs.items()}
    within = {name: seconds for name, seconds in training.items() if seconds is not None}
    without = [name for name, (_, limited) in pairs.items() if limited and name not in within]
    sentences = []
    if within:
        best = min(within, key=lambda name: within[name])
        cost = f", {within[best] / plain_s:.2f} times a step of plain training" if plain_s else ""
        sentences.append(f"Under the limit {', '.join(within)} train; {best} is the fastest{cost}.")
    if without:
        sentences.append(f"Not under the limit: {', '.join(without)}; the table says why.")
    return tuple(sentences)
