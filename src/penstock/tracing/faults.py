"""Why a model could not be traced: the user's own line, what stands there, and what to do."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import nn

from penstock.errors import ChainError

_ADVICE = ("Take what depends on values of tensors out of forward, or give the layers by hand, in the order in which they run, each taking "
           "what the one before returned: ps.chain([model.stem, *model.blocks, model.head])")  # fmt: skip


class Refused(Exception):  # for the inside: users see a ChainError
    """The model does what a trace would get wrong."""


def fault(model: nn.Module, error: BaseException) -> ChainError:
    """The error that users see: with the innermost line that is not torch's."""
    name = type(model).__name__
    place = _place(error)
    at = (
        ""
        if place is None
        else f"{place.filename}:{place.lineno}, in {place.name}: `{place.line}`: "
    )
    return ChainError(f"{name} cannot be traced: {at}{_reason(error)}. {_ADVICE}")


def _place(error: BaseException) -> traceback.FrameSummary | None:
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    found: traceback.FrameSummary | None = None
    seen: BaseException | None = error
    while seen is not None and found is None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if not frame.filename.startswith((*inside, "<")):
                found = frame
        seen = seen.__cause__ or seen.__context__
    # Outside of the model, the last line that is not torch's is the caller's.
    return (
        found
        if found is not None
        and any(_runs_model(frame) for frame in traceback.extract_tb(error.__traceback__))
        else None
    )


def _runs_model(frame: traceback.FrameSummary) -> bool:
    return frame.filename == str(Path(__file__).with_name("capture.py")) and frame.name == "call"


def _reason(error: BaseException) -> str:
    kind = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if (
        kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError")
        and "data-dependent" in str(error).lower()
    ):
        return f"what it does next depends on the values of a tensor, which a trace does not have ({first})"
    if isinstance(error, Refused):
        return str(error)
    return f"{kind}: {first}"
