"""What the ranks of an attempt and their launcher tell each other about state in memory.

The messages are JSON in the store of `launch`:

1. before the ranks start, the launcher writes `Conditions`;
2. after another rank has failed, each remaining rank writes an `Offer` and waits;
3. the launcher answers each with a `Request`, which may ask for nothing;
4. a rank that has been asked for stages writes them, and then a `Delivery`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from penstock.checkpoint.checkpoint_index import Checkpoint
from penstock.files.read import parse_json

M = TypeVar("M", "Conditions", "Offer", "Request", "Delivery")

#: Key of the `Conditions`.
CONDITIONS = "penstock/recovery"


@dataclass(frozen=True)
class Conditions:
    """What the launcher tells all ranks of an attempt before they start.

    Attributes:
        offers: whether ranks are to offer their state after the failure of another one.
        source: folder of the checkpoint in memory from which the attempt continues, if any.
    """

    offers: bool
    source: str | None = None


@dataclass(frozen=True)
class Offer:
    """State that a rank can hand over.

    Attributes:
        step: the last step that is complete on this rank: weights, metrics and evaluation.
        lines: lines of the metrics of that step.
        stages: pairs of a stage and the step of its state.
    """

    step: int
    lines: tuple[str, ...]
    stages: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Request:
    """The stages that a rank is to hand over; none if the run continues from a checkpoint.

    Attributes:
        step: of the state.
        identity: of the checkpoint, which all of its files have.
        files: pairs of a stage and the path of its file.
    """

    step: int = 0
    identity: str = ""
    files: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Delivery:
    """The stages that a rank has handed over.

    Attributes:
        index: the index of the checkpoint, with the checksums of this rank's files; None after an
            error.
        error: why nothing has been handed over.
    """

    index: Checkpoint | None
    error: str = field(default="")


def offer_key(rank: int) -> str:
    """Return the key of a rank's `Offer`."""
    return f"{CONDITIONS}/offer/{rank}"


def request_key(rank: int) -> str:
    """Return the key of the `Request` to a rank."""
    return f"{CONDITIONS}/request/{rank}"


def delivery_key(rank: int) -> str:
    """Return the key of a rank's `Delivery`."""
    return f"{CONDITIONS}/delivery/{rank}"


def to_text(message: Conditions | Offer | Request | Delivery) -> str:
    """Return a message as JSON, in ASCII."""
    return json.dumps(asdict(message))


def of_text(text: str, kind: type[M]) -> M:
    """Parse a message.

    Raises:
        FileError: it is none of this kind.
    """
    return parse_json(text, kind, f"a rank's {kind.__name__}", finite=False)
