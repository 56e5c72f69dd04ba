"""Grammar of one cell of torch.distributed.pipelining's CSV format, parsed strictly.

    cell     := "" | compute | overlap | transfer | fsdp
    compute  := STAGE ("F" | "B" | "I" | "W") MICRO_BATCH           2F0
    overlap  := "(" compute ";" compute ")OVERLAP_F_B"              (0F3;1B2)OVERLAP_F_B
    transfer := STAGE ("SEND" | "RECV") "_" ("F" | "B") MICRO_BATCH   1SEND_F0, 2RECV_F0
    fsdp     := STAGE ("UNSHARD" | "RESHARD" | "REDUCE_GRAD")

torch's own parser (2.13) accepts text that is not of this form, and then runs another schedule: its
pattern is not anchored (`0F0garbage` and `0F0;1F0` are read as `0F0`), `0F` is a forward of no
micro-batch, and `2BW0`, a whole backward in torch 2.4, is read as a `2B` of none. In the format of
torch 2.4, `2B0` meant what `2I0` means now, so a reader cannot convert such a file.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from penstock.errors import FileError
from penstock.schedule.lower import Direction, Message
from penstock.schedule.op import Kind, Op

_NUMBER = "([0-9]{1,18})"
_COMPUTE = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")
_TRANSFER = re.compile(f"{_NUMBER}(SEND|RECV)_([FB]){_NUMBER}")
_FSDP = re.compile(f"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
#: A whole backward in the format of torch 2.4.
_TORCH_2_4_BACKWARD = re.compile(f"{_NUMBER}BW{_NUMBER}")

#: Characters of a cell that messages quote: a cell may be as long as a file.
_QUOTED_LENGTH = 60


class FsdpAction(str, Enum):
    """What FSDP does with a stage's parameters or gradients."""

    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"


class Communication(NamedTuple):
    """A transfer cell. It does not name the other rank, which follows from the placement."""

    direction: Direction
    message: Message

    @property
    def stage(self) -> int:
        """The stage that sends or receives."""
        return self.message.stage if self.direction is Direction.SEND else self.message.target


class Shards(NamedTuple):
    """An FSDP cell."""

    action: FsdpAction
    stage: int


class Compute(NamedTuple):
    """A compute cell: one op, or the two ops of an overlap."""

    ops: tuple[Op, ...]


Cell = Compute | Communication | Shards


def parse_cell(text: str) -> Cell:
    """Parse a cell that is not empty.

    Raises:
        FileError: the text does not match the grammar; the message quotes it and gives valid cells.
    """
    text = text.strip()
    if match := _COMPUTE.fullmatch(text):
        return Compute((_op(match),))
    if match := _TRANSFER.fullmatch(text):
        direction, kind, stage = Direction(match[2]), Kind(match[3]), int(match[1])
        if direction is Direction.RECV:
            # A message is named after the stage that produces it.
            stage += -1 if kind is Kind.F else 1
        return Communication(direction, Message(kind, stage, int(match[4])))
    if match := _FSDP.fullmatch(text):
        return Shards(FsdpAction(match[2]), int(match[1]))
    if match := _OVERLAP.fullmatch(text):
        return _parse_overlap(text, match[1], match[2])
    if _TORCH_2_4_BACKWARD.fullmatch(text):
        raise FileError(
            f"{quoted(text)} is in the format of torch 2.4, in which BW was the whole backward and "
            "B its half for the input. torch now reads it as a backward of no micro-batch: write "
            "the file again, with B and I"
        )
    raise FileError(
        f"{quoted(text)} is not an action of torch's: write stage, kind, micro-batch, such as 2F0, "
        "2B0, 2I0, 2W0, 1SEND_F0, 2RECV_F0, or (0F3;1B2)OVERLAP_F_B"
    )


def _op(match: re.Match[str]) -> Op:
    return Op(Kind(match[2]), int(match[1]), int(match[3]))


def _parse_overlap(text: str, first: str, second: str) -> Compute:
    """Parse an overlap cell from the texts of its two ops."""
    matches = [_COMPUTE.fullmatch(half.strip()) for half in (first, second)]
    ops = tuple(_op(match) for match in matches if match)
    if overlaps(*ops):
        return Compute(ops)
    raise FileError(
        f"{quoted(text)} does not overlap a forward with a backward: write (0F3;1B2)OVERLAP_F_B"
    )


def overlaps(*ops: Op) -> bool:
    """Return whether torch's OVERLAP_F_B can express these ops.

    It takes a forward and a backward that computes the input gradient (B or I).
    """
    kinds = sorted(op.kind for op in ops)
    return kinds in ([Kind.B, Kind.F], [Kind.F, Kind.I])


def quoted(text: str) -> str:
    """Return `text` in quotes for a message, truncated if it is long."""
    if len(text) <= _QUOTED_LENGTH:
        return repr(text)
    return f"{text[:_QUOTED_LENGTH]!r} … ({len(text)} characters)"
