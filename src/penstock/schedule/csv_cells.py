"""One cell of torch.distributed.pipelining's CSV: its grammar, strictly, and what is done with each
word.

    cell     := "" | compute | overlap | transfer | fsdp
    compute  := STAGE ("F" | "B" | "I" | "W") MICRO_BATCH           2F0
    overlap  := "(" compute ";" compute ")OVERLAP_F_B"              (0F3;1B2)OVERLAP_F_B
    transfer := STAGE ("SEND" | "RECV") "_" ("F" | "B") MICRO_BATCH   1SEND_F0, 2RECV_F0
    fsdp     := STAGE ("UNSHARD" | "RESHARD" | "REDUCE_GRAD")

torch's own parser (2.13) lets much pass that is not of this form, and the run then does something
else: its pattern is not anchored (`0F0garbage` and `0F0;1F0` read as `0F0`), `0F` is a forward of
no micro-batch, and `2BW0`, a whole backward in torch 2.4, reads as a `2B` of none. In that dialect
`2B0` was what `2I0` is now, so such a file cannot be mended by a reader.
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
_OLD = re.compile(f"{_NUMBER}BW{_NUMBER}")

#: Quoted in messages up to here: a cell may be as long as a file.
_QUOTED = 60


class Gathering(str, Enum):
    """What FSDP does with a stage's parameters and gradients."""

    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"


class Communication(NamedTuple):
    """A transfer as a cell has it: the other rank is not written, it follows from where the stages
    stand.
    """

    direction: Direction
    message: Message

    @property
    def stage(self) -> int:
        """The stage that sends or receives."""
        return self.message.stage if self.direction is Direction.SEND else self.message.target


class Shards(NamedTuple):
    """A cell for FSDP."""

    what: Gathering
    stage: int


class Compute(NamedTuple):
    """One op, or the two of an overlap."""

    ops: tuple[Op, ...]


Cell = Compute | Communication | Shards


def parse_cell(text: str) -> Cell:
    """What a cell that is not empty says.

    Raises:
        FileError: it is not of the form above; the message quotes it and says what would be.
    """
    text = text.strip()
    if match := _COMPUTE.fullmatch(text):
        return Compute((Op(Kind(match[2]), int(match[1]), int(match[3])),))
    if match := _TRANSFER.fullmatch(text):
        direction, kind, stage = Direction(match[2]), Kind(match[3]), int(match[1])
        if direction is Direction.RECV:
            stage += (
                -1 if kind is Kind.F else 1
            )  # the message is named after the stage that makes it
        return Communication(direction, Message(kind, stage, int(match[4])))
    if match := _FSDP.fullmatch(text):
        return Shards(Gathering(match[2]), int(match[1]))
    if match := _OVERLAP.fullmatch(text):
        halves = [_COMPUTE.fullmatch(half.strip()) for half in match.groups()]
        ops = tuple(Op(Kind(half[2]), int(half[1]), int(half[3])) for half in halves if half)
        if overlaps(*ops):
            return Compute(ops)
        raise FileError(
            f"{quoted(text)} overlaps no forward with a backward: write (0F3;1B2)OVERLAP_F_B"
        )
    if _OLD.fullmatch(text):
        raise FileError(
            f"{quoted(text)} is of the dialect of torch 2.4, in which BW was the whole backward and B its half for the "
            "input. torch reads it as a backward of no micro-batch: write the file again, with B and I"
        )
    raise FileError(
        f"{quoted(text)} is no action of torch's: write stage, kind, micro-batch, such as 2F0, 2B0, 2I0, 2W0, 1SEND_F0, "
        "2RECV_F0, or (0F3;1B2)OVERLAP_F_B"
    )


def overlaps(*ops: Op) -> bool:
    """Whether these are what torch's OVERLAP_F_B is for: a forward, and the backward that passes a
    gradient on.
    """
    kinds = sorted(op.kind for op in ops)
    return kinds in ([Kind.B, Kind.F], [Kind.F, Kind.I])


def quoted(text: str) -> str:
    """`text` as messages quote it, cut where it is long."""
    return repr(text) if len(text) <= _QUOTED else f"{text[:_QUOTED]!r} … ({len(text)} characters)"
