"""Why a model could not be traced: the user's own line, what stands there, and what to do."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx, nn

from penstock.errors import ChainError

_ADVICE = (
    "Take what depends on values of tensors out of forward, or give the layers by hand, in the order in which they run, each taking "
    "what the one before returned: ps.chain([model.stem, *model.blocks, model.head])"
)


#: Packages that torch.export calls as it traces.
_BEHIND_TORCH = ("sympy", "mpmath", "networkx", "optree")


class Refused(Exception):  # for the inside: users see a ChainError
    """The model does what a trace would get wrong; `place` is where, if the traceback does not
    tell.
    """

    def __init__(self, message: str, place: traceback.FrameSummary | None = None) -> None:
        super().__init__(message)
        self.place = place


def fault(model: nn.Module, error: BaseException) -> ChainError:
    """The error that users see: with the innermost line that is not torch's."""
    name = type(model).__name__
    place = getattr(error, "place", None) or _place(error)
    at = (
        ""
        if place is None
        else f"{place.filename}:{place.lineno}, in {place.name}: `{place.line}`: "
    )
    return ChainError(f"{name} cannot be traced: {at}{_reason(error)}. {_ADVICE}")


@lru_cache(maxsize=4096)
def is_standard(filename: str) -> bool:
    """Whether a file is one of Python's own modules."""
    folder = sysconfig.get_paths()["stdlib"]
    return filename.startswith((folder, "<frozen")) and "-packages" not in filename


@lru_cache(maxsize=4096)
def is_torchs(filename: str) -> bool:
    """Whether a file is torch's."""
    return filename.startswith(str(Path(torch.__file__).parent))


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a file is the model's, or a library's with models: neither torch's, NumPy's, Python's
    own nor of this folder.
    """
    inside = [str(Path(__file__).parent)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and numpy.__file__ is not None:
        inside.append(str(Path(numpy.__file__).parent))
    return not (
        filename.startswith(("<string", "<frozen", "<eval", *inside))
        or filename.endswith(".pyx")
        or any(f"-packages/{name}/" in filename for name in _BEHIND_TORCH)
        or is_torchs(filename)
        or is_standard(filename)
    )


def line_of(node: fx.Node) -> traceback.FrameSummary | None:
    """The line of the model's code that an op comes from."""
    lines = re.findall(r'File "(.*?)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    users = [each for each in lines if is_users(each[0])]
    if not users:
        return None
    name, line, function = users[-1]
    return traceback.FrameSummary(name, int(line), function)


def _place(error: BaseException) -> traceback.FrameSummary | None:
    found: traceback.FrameSummary | None = None
    seen: BaseException | None = error
    while seen is not None and found is None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if is_users(frame.filename):
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
