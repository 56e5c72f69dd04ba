"""Errors of models that cannot be traced: the user's line, the reason, and what to do."""

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
    "Take what depends on values of tensors out of forward, or give the layers by hand, in the "
    "order in which they run, each taking what the one before returned: "
    "ps.chain([model.stem, *model.blocks, model.head])"
)

#: Packages that torch.export uses while it traces.
_BEHIND_TORCH = ("sympy", "mpmath", "networkx", "optree")


class Refused(Exception):  # internal: users see a ChainError
    """The model does what a trace would get wrong.

    Args:
        message: what it does.
        place: the line, if it is not in the traceback.
    """

    def __init__(self, message: str, place: traceback.FrameSummary | None = None) -> None:
        super().__init__(message)
        self.place = place


def fault(model: nn.Module, error: BaseException, *, runs: bool = True) -> ChainError:
    """Return the error that users see, with the innermost line of the model's code.

    Args:
        model: that was traced.
        error: that ended the trace.
        runs: False if the model raises the same error when it is called without a trace.
    """
    name = type(model).__name__
    place = getattr(error, "place", None) or _place(error)
    location = (
        ""
        if place is None
        else f"{place.filename}:{place.lineno}, in {place.name}: `{place.line}`: "
    )
    reason = f"{location}{_reason(error)}".rstrip(".")
    if not runs:
        return ChainError(
            f"{name} fails on these inputs, also without a trace: {reason}. Check the shapes and "
            "dtypes of the inputs, and the model"
        )
    return ChainError(f"{name} cannot be traced: {reason}. {_ADVICE}")


@lru_cache(maxsize=4096)
def is_standard(filename: str) -> bool:
    """Return whether a file belongs to Python's standard library."""
    folder = sysconfig.get_paths()["stdlib"]
    # Installed packages lie below the folder of the standard library.
    return filename.startswith((folder, "<frozen")) and "-packages" not in filename


@lru_cache(maxsize=4096)
def is_torchs(filename: str) -> bool:
    """Return whether a file belongs to torch."""
    return filename.startswith(str(Path(torch.__file__).parent))


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return whether a file belongs to the model, or to a library of models.

    It belongs neither to torch, NumPy, Python nor this package.
    """
    excluded_folders = [str(Path(__file__).parent)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and numpy.__file__ is not None:
        excluded_folders.append(str(Path(numpy.__file__).parent))
    return not (
        filename.startswith(("<string", "<frozen", "<eval", *excluded_folders))
        or filename.endswith(".pyx")
        or any(f"-packages/{name}/" in filename for name in _BEHIND_TORCH)
        or is_torchs(filename)
        or is_standard(filename)
    )


def line_of(node: fx.Node) -> traceback.FrameSummary | None:
    """Return the line of the model's code from which an op comes."""
    lines = re.findall(r'File "(.*?)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    users = [match for match in lines if is_users(match[0])]
    if not users:
        return None
    name, line, function = users[-1]
    return traceback.FrameSummary(name, int(line), function)


def _place(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost line of the model's code in an error's traceback."""
    # If the model did not run, the innermost line of a user's file is that of the caller.
    if not any(_runs_model(frame) for frame in traceback.extract_tb(error.__traceback__)):
        return None
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        users = [frame for frame in frames if is_users(frame.filename)]
        if users:
            return users[-1]
        cause = cause.__cause__ or cause.__context__
    return None


def _runs_model(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is the call of the user's model."""
    return frame.filename == str(Path(__file__).with_name("form.py")) and frame.name == "call"


def _reason(error: BaseException) -> str:
    """Return in a few words why a trace failed."""
    kind = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if (
        kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError")
        and "data-dependent" in str(error).lower()
    ):
        return (
            "what it does next depends on the values of a tensor, which a trace does not have "
            f"({first})"
        )
    if isinstance(error, Refused):
        return str(error)
    return f"{kind}: {first}"
