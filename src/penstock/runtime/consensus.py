"""One verdict for all ranks: each says whether its part succeeded, and all go on or all refuse with
the same message.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from penstock import errors
from penstock.errors import FileError, PenstockError
from penstock.runtime.world import World
from penstock.transport.payload import TensorForm

T = TypeVar("T")

#: Findings that one message shows.
_SHOWN = 8


@dataclass(frozen=True)
class Report:
    """What one rank says: plain data, or why it refuses (the class of the error and its text)."""

    rank: int
    host: str
    value: Any = None
    error: tuple[str, str] | None = None


def attempt(rank: int, job: Callable[[], Any]) -> Report:
    """Run `job`; an error that Penstock raises on purpose becomes a report, any other goes on."""
    try:
        return Report(rank, socket.gethostname(), job())
    except PenstockError as error:
        return Report(rank, socket.gethostname(), None, (type(error).__name__, str(error)))


def exchange(world: World, reports: Mapping[int, Report]) -> list[Report]:
    """The reports of all ranks, on every rank, in the order of the ranks. Every process calls this
    with its local ranks'.
    """
    rows = {
        rank: torch.frombuffer(bytearray(_text(report).encode()), dtype=torch.uint8)
        for rank, report in reports.items()
    }
    size = TensorForm((1,), "int64", wants_grad=False)
    lengths = world.gather(
        {rank: [torch.tensor([len(row)])] for rank, row in rows.items()},
        {rank: [size] for rank in range(world.size)},
    )
    forms = {
        rank: [TensorForm((int(length),), "uint8", wants_grad=False)]
        for rank, (length,) in lengths.items()
    }
    received = world.gather({rank: [row] for rank, row in rows.items()}, forms)
    texts = [bytes(row.tolist()).decode() for _, (row,) in sorted(received.items())]
    return [_report(text) for text in world.broadcast(texts or None, 0)]


def check_reports(reports: list[Report], where: str) -> None:
    """Refuse on every rank if any rank refuses.

    Args:
        reports: of all ranks.
        where: what follows the findings, such as "nothing was loaded on any rank".

    Raises:
        PenstockError: of the class that the first refusals rank names; the text has all findings by
        rank and host.
    """
    refusals = [report for report in reports if report.error is not None]
    if not refusals:
        return
    name, text = refusals[0].error or ("", "")
    kind = getattr(errors, name, FileError)
    if kind not in (FileError, errors.SettingError, errors.RunError):
        kind = FileError
    texts = {report.error[1] for report in refusals if report.error is not None}
    if len(texts) == 1 and len(refusals) == len(reports):
        raise kind(text)
    lines = [
        f"rank {report.rank} on host {report.host}: {report.error[1]}"
        for report in refusals[:_SHOWN]
        if report.error is not None
    ]
    if len(refusals) > _SHOWN:
        lines.append(f"and {len(refusals) - _SHOWN} more ranks")
    raise kind("\n".join([*lines, f"({where})"]))


def _text(report: Report) -> str:
    return json.dumps([report.rank, report.host, report.value, report.error])


def _report(text: str) -> Report:
    rank, host, value, error = json.loads(text)
    return Report(rank, host, value, None if error is None else (error[0], error[1]))
