"""A timeline as a JSON file, so that a report can be made after the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from penstock.errors import FileError, ScheduleError
from penstock.event import Event, EventRow, Timeline
from penstock.files.read import read_json
from penstock.schedule.op import Op
from penstock.schedule.size_limit import check_ops
from penstock.schedule.slicing import Slicing
from penstock.store import write_json

SCHEMA = 1


@dataclass(frozen=True)
class TransferTimes:
    """Transfers of a timeline, as one list for each of their properties."""

    rank: tuple[int, ...]
    to_rank: tuple[int, ...]
    op: tuple[str, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class TimelineFile:
    """Content of a timeline's file.

    Attributes:
        programs: one line of ops per rank, in the order in which they ran.
        start, end: per rank, the seconds of these ops.
        transfers: between ranks.
        stages, title, source, peak_memory, slicing, hosts: see `Timeline`.
        wait_s: per rank, for each op its `Event.wait_s`; empty if none is known.
        schema: version of the file format.
    """

    programs: tuple[str, ...]
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    transfers: TransferTimes
    stages: int
    title: str
    source: str
    peak_memory: tuple[int, ...] | None = None
    slicing: Slicing | None = None
    hosts: tuple[str, ...] = ()
    wait_s: tuple[tuple[float | None, ...], ...] = ()
    schema: int = SCHEMA


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write a timeline; memory over time is not stored, its peak is.

    Raises:
        FileError: the file cannot be written.
    """
    log = timeline.log
    all_ops = [str(op) for op in log.ops.all_ops()]
    programs, start, end = [], [], []
    for first, last in pairwise(log.ops.first.tolist()):
        programs.append(" ".join(all_ops[first:last]))
        start.append(tuple(log.start[first:last].tolist()))
        end.append(tuple(log.end[first:last].tolist()))
    transfers = [event for event in timeline.events if event.to_rank is not None]
    content = TimelineFile(
        tuple(programs),
        tuple(start),
        tuple(end),
        _transfer_times(transfers),
        timeline.stages,
        timeline.title,
        timeline.source,
        timeline.peak_memory,
        timeline.slicing,
        timeline.hosts,
        _waits(timeline),
    )
    write_json(path, content)


def _waits(timeline: Timeline) -> tuple[tuple[float | None, ...], ...]:
    """Return `Event.wait_s` of the ops of each rank; empty if none is known."""
    rows: list[list[float | None]] = [[] for _ in range(timeline.ranks)]
    for event in timeline.compute:
        rows[event.rank].append(event.wait_s)
    has_waits = any(event.wait_s is not None for event in timeline.compute)
    return tuple(map(tuple, rows)) if has_waits else ()


def _transfer_times(transfers: list[Event]) -> TransferTimes:
    """Return transfers as columns, the form in which they are stored."""
    return TransferTimes(
        tuple(event.rank for event in transfers),
        # Never None, since these are transfers.
        tuple(event.to_rank or 0 for event in transfers),
        tuple(str(event.op) for event in transfers),
        tuple(event.start for event in transfers),
        tuple(event.end for event in transfers),
        tuple(event.bytes for event in transfers),
    )


def load_timeline(path: Path) -> Timeline:
    """Read a timeline that `save_timeline` wrote.

    Raises:
        FileError: the file is missing, is no timeline, or its fields contradict each other.
    """
    content = read_json(path, TimelineFile, SCHEMA, kind="timeline")
    try:
        timeline = _timeline_of(content)
    except (ValueError, ScheduleError) as error:
        raise FileError(f"{path} is no valid timeline: {error}") from error
    return timeline


def _timeline_of(content: TimelineFile) -> Timeline:
    """Return the timeline of a file's content.

    Raises:
        ValueError: lists that belong together differ in length, or numbers are out of range.
        ScheduleError: a program has a word that is not an op.
    """
    rows: list[EventRow] = []
    programs = [tuple(Op.parse(word) for word in row.split()) for row in content.programs]
    check_ops("a timeline", programs)
    waits = content.wait_s or tuple((None,) * len(program) for program in programs)
    for rank, (program, starts, ends, rank_waits) in enumerate(
        zip(programs, content.start, content.end, waits, strict=True)
    ):
        for op, start, end, wait_s in zip(program, starts, ends, rank_waits, strict=True):
            rows.append((rank, op, start, end, 0, None, wait_s))
    sent = content.transfers
    for rank, to_rank, op_text, start, end, size in zip(
        sent.rank, sent.to_rank, sent.op, sent.start, sent.end, sent.bytes, strict=True
    ):
        rows.append((rank, Op.parse(op_text), start, end, size, to_rank, None))
    _check_rows(rows, content)
    timeline = Timeline.of(
        rows,
        len(programs),
        content.stages,
        content.peak_memory,
        content.source,
        content.title,
    )
    return replace(timeline, slicing=content.slicing, hosts=content.hosts)


def _check_rows(rows: list[EventRow], content: TimelineFile) -> None:
    """Check that stages and ranks exist and that no op ends before it starts.

    Raises:
        ValueError: they do not.
    """
    ranks = len(content.programs)
    for rank, op, start, end, _, to_rank, wait_s in rows:
        receiver = 0 if to_rank is None else to_rank
        if not (0 <= rank < ranks and 0 <= receiver < ranks and op.stage < content.stages):
            raise ValueError(
                f"{op} on rank {rank} is outside of {ranks} ranks and {content.stages} stages"
            )
        if not 0 <= start <= end:
            raise ValueError(f"{op} on rank {rank} lasts from {start} to {end} s")
        if wait_s is not None and not 0 <= wait_s < math.inf:
            raise ValueError(f"{op} on rank {rank} waited for {wait_s} s")
    if content.hosts and len(content.hosts) != ranks:
        raise ValueError(f"hosts of {len(content.hosts)} ranks, ops of {ranks}")
    if content.peak_memory is not None and len(content.peak_memory) != ranks:
        raise ValueError(f"peak memory of {len(content.peak_memory)} ranks, ops of {ranks}")
