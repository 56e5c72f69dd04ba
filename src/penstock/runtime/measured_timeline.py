"""Gather the ops, messages and memory of all ranks into a measured timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from penstock.event import Event, MeasuredMemory, Timeline
from penstock.optim.stage_weights import StageWeights
from penstock.ranks.device_memory import device_peaks
from penstock.ranks.world import World
from penstock.runtime.interpreter import Interpreter
from penstock.schedule.lower import Message, input_message, output_message
from penstock.schedule.op import Op, Schedule
from penstock.transport.payload import TensorForm

#: By rank, ops in order; each as the timeline shows it, and as it was run.
Rows = Mapping[int, Sequence[tuple[Op, Op]]]

#: Peer of an op that has sent nothing to another rank.
_NO_PEER = -1.0


class _OpRow(NamedTuple):
    """The times of an op in seconds on the clock of rank 0, and what it sent; NaN is unknown.

    Attributes:
        start, end: of the op.
        wait_start: when the rank began to wait for its input.
        arrived: when its output was in the receiver's memory.
        peer: the receiving rank, -1 if there is none.
        bytes: size of the message.
    """

    start: float
    end: float
    wait_start: float
    arrived: float
    peer: float
    bytes: float


def measured_timeline(
    world: World,
    schedule: Schedule,
    interpreters: Mapping[int, Interpreter],
    rows: Rows,
    weights: Mapping[int, Mapping[int, StageWeights]],
) -> Timeline:
    """Gather the times of some ops, their messages, and the peak memory of all ranks.

    Every process calls it.

    Args:
        world: the ranks.
        schedule: the schedule.
        interpreters: those of the ranks of this process.
        rows: the ops of all ranks.
        weights: in a stream, by rank and stage, its weight rule.

    Returns:
        The timeline, the same in every process.
    """
    tables: dict[int, list[Sequence[float]]] = {}
    to_first_clock = world.to_first_clock()
    for rank, interpreter in interpreters.items():
        peak_bytes = interpreter.peak_bytes(weights.get(rank, {}))
        # The last row of a rank, padded to the width of the others: one message carries both.
        memory = (peak_bytes, world.buffer_bytes(rank), *device_peaks(world.device(rank)), 0, 0)
        tables[rank] = [*_op_rows(interpreter, rows[rank], to_first_clock), memory]
    row_counts = {rank: len(ops) + 1 for rank, ops in rows.items()}
    table_rows = iter(_gather_rows(world, tables, row_counts))
    op_rows: dict[int, list[tuple[Op, _OpRow]]] = {}
    peaks: list[int] = []
    measured_memory: list[MeasuredMemory] = []
    for rank, ops in rows.items():
        op_rows[rank] = [(op, _OpRow(*next(table_rows))) for op, _ in ops]
        peak, buffers, allocated, reserved, _, _ = next(table_rows)
        peaks.append(int(peak))
        measured_memory.append(MeasuredMemory(int(buffers), int(allocated), int(reserved)))
    timeline = Timeline.of(
        _events(op_rows, schedule.stages),
        len(rows),
        schedule.stages,
        tuple(peaks),
        source="measured",
        title=schedule.name,
    )
    return replace(timeline, measured_memory=tuple(measured_memory))


def _gather_rows(
    world: World, tables: Mapping[int, Sequence[Sequence[float]]], row_counts: Mapping[int, int]
) -> list[list[float]]:
    """Return the rows of all ranks, one rank after the other, in every process.

    Args:
        world: the ranks.
        tables: by rank of this process, its rows, as long as an `_OpRow`.
        row_counts: by rank of the world, the number of its rows.
    """
    width = len(_OpRow._fields)
    # Numbers of bytes are exact in float64 up to 2**53.
    local = {rank: [torch.tensor(table, dtype=torch.float64)] for rank, table in tables.items()}
    forms = {
        rank: [TensorForm((count, width), "float64", wants_grad=False)]
        for rank, count in row_counts.items()
    }
    gathered = world.gather(local, forms)
    joined = torch.cat([gathered[rank][0] for rank in row_counts]) if gathered else None
    total = TensorForm((sum(row_counts.values()), width), "float64", wants_grad=False)
    gathered_rows: list[list[float]] = world.broadcast(joined, 0, total).tolist()
    return gathered_rows


def _op_rows(
    interpreter: Interpreter,
    ops: Sequence[tuple[Op, Op]],
    to_first_clock: Callable[[float], float],
) -> Iterator[_OpRow]:
    """Yield the rows of a rank's ops."""
    record, stages = interpreter.transfers, interpreter.stage_count
    times = interpreter.seconds([run_op for _, run_op in ops])
    for (_, op), (start, end) in zip(ops, times, strict=True):
        wait_start = record.wait_start(input_message(op, stages))
        sent = record.sent(output_message(op, stages))
        arrived = None if sent is None else sent.arrived_s
        yield _OpRow(
            to_first_clock(start),
            to_first_clock(end),
            math.nan if wait_start is None else to_first_clock(wait_start),
            math.nan if arrived is None else to_first_clock(arrived),
            _NO_PEER if sent is None else float(sent.peer),
            0.0 if sent is None else float(sent.bytes),
        )


def _events(op_rows: Mapping[int, Sequence[tuple[Op, _OpRow]]], stages: int) -> Iterator[Event]:
    """Yield the events of all ranks: ops, and the messages whose receivers have taken them."""
    consumers: dict[tuple[int, Message], _OpRow] = {}
    for rank, ops in op_rows.items():
        for op, row in ops:
            message = input_message(op, stages)
            if message is not None:
                consumers[rank, message] = row
    for rank, ops in op_rows.items():
        for op, row in ops:
            wait_s = None if math.isnan(row.wait_start) else max(row.start - row.wait_start, 0.0)
            yield Event(rank, op, row.start, row.end, wait_s=wait_s)
            message, peer = output_message(op, stages), int(row.peer)
            consumer = None if message is None else consumers.get((peer, message))
            if consumer is not None:
                # Clocks of hosts agree only to the error of the measured offset.
                end = max(row.end, _arrival(row, consumer))
                yield Event(rank, op, row.end, end, int(row.bytes), peer)


def _arrival(sender: _OpRow, receiver: _OpRow) -> float:
    """Return when a message was in the receiver's memory, at the latest."""
    if math.isnan(sender.arrived):
        return receiver.start
    return min(sender.arrived, receiver.start)
