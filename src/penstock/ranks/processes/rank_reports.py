"""Joint success or failure of all ranks: if one rank refuses, all refuse with the same message."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from penstock import errors
from penstock.errors import FileError, PenstockError
from penstock.ranks.foreign_text import foreign_text
from penstock.ranks.world import World
from penstock.transport.payload import TensorForm

T = TypeVar("T")

#: Classes that all ranks raise as one rank has; `FileError` stands for all others.
_RAISED = (FileError, errors.CheckpointDamaged, errors.SettingError, errors.RunError)

#: Ranks whose errors one message lists.
_RANKS_IN_MESSAGE = 8


@dataclass(frozen=True)
class Report:
    """The outcome of a job on one rank.

    Attributes:
        rank: the rank.
        host: the name of its host.
        value: the result, JSON-serialisable.
        error: class name and message of the error, if the job failed.
    """

    rank: int
    host: str
    value: Any = None
    error: tuple[str, str] | None = None


def attempt(rank: int, job: Callable[[], Any]) -> Report:
    """Run a job and report its result, or the `PenstockError` that it raised.

    Errors of other classes are not caught.
    """
    try:
        return Report(rank, socket.gethostname(), job())
    except PenstockError as error:
        return Report(rank, socket.gethostname(), None, (type(error).__name__, str(error)))


def exchange(world: World, reports: Mapping[int, Report]) -> list[Report]:
    """Return the reports of all ranks, on every rank. Every process calls it.

    Args:
        world: the ranks.
        reports: those of the ranks of this process.

    Returns:
        The reports in the order of the ranks.
    """
    # As tensors of bytes, since `World.gather` sends tensors alone.
    rows = {
        rank: torch.frombuffer(bytearray(_to_json(report).encode()), dtype=torch.uint8)
        for rank, report in reports.items()
    }
    # First the lengths: the receiver must know the shape of each message.
    length_form = TensorForm((1,), "int64", wants_grad=False)
    lengths = world.gather(
        {rank: [torch.tensor([len(row)])] for rank, row in rows.items()},
        {rank: [length_form] for rank in range(world.size)},
    )
    forms = {
        rank: [TensorForm((int(length),), "uint8", wants_grad=False)]
        for rank, (length,) in lengths.items()
    }
    received = world.gather({rank: [row] for rank, row in rows.items()}, forms)
    texts = [bytes(row.tolist()).decode() for _, (row,) in sorted(received.items())]
    return [_from_json(text) for text in world.broadcast(texts or None, 0)]


def check_reports(reports: list[Report], consequence: str) -> None:
    """Raise on every rank if any rank has reported an error.

    Args:
        reports: the reports of all ranks.
        consequence: text after the errors, such as "nothing was loaded on any rank".

    Raises:
        PenstockError: of the class that the first failed rank has reported; the message has the
            errors by rank and host, or the one error that all ranks have.
    """
    failed = [(report, report.error) for report in reports if report.error is not None]
    if not failed:
        return
    _, (class_name, message) = failed[0]
    error_class = getattr(errors, class_name, FileError)
    if error_class not in _RAISED:
        error_class = FileError
    messages = {text for _, (_, text) in failed}
    if len(messages) == 1 and len(failed) == len(reports):
        raise error_class(message)
    lines = [
        f"rank {report.rank} on host {report.host}: {text}"
        for report, (_, text) in failed[:_RANKS_IN_MESSAGE]
    ]
    if len(failed) > _RANKS_IN_MESSAGE:
        lines.append(f"and {len(failed) - _RANKS_IN_MESSAGE} more ranks")
    raise error_class("\n".join([*lines, f"({consequence})"]))


def _to_json(report: Report) -> str:
    """Serialise a report."""
    return json.dumps([report.rank, report.host, report.value, report.error])


def _from_json(text: str) -> Report:
    """Restore a report from the text of `_to_json`."""
    rank, host, value, error = json.loads(text)
    if error is not None:
        error = (str(error[0]), foreign_text(str(error[1])))
    return Report(rank, foreign_text(str(host)), value, error)
