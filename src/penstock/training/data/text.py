"""Text, character by character, for next-token prediction."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import FileError
from penstock.files.regular import open_file
from penstock.training.data.batches import Dataset, check_count
from penstock.training.data.catalogue import register

if TYPE_CHECKING:
    import numpy as np
    import torch


@register(
    "text",
    usage="text[:PATH]",
    takes=("tokens",),
    source="a UTF-8 file, or the documentation that comes with Python",
)
def text(path: str | Path | None = None, *, tokens: int = 128) -> Dataset:
    """Windows of a text that do not overlap: inputs and targets (n, tokens) int64.

    The last tenth of the text, and at least one window, is the test part. The vocabulary is the
    training part's characters in order of their code points, from 1; index 0 stands for characters
    that do not occur in the training part.

        text     T h e _ c a t _ s       tokens = 2: windows of 3 characters
        inputs   T h | _ c | t _
        targets  h e | c a | _ s

    Args:
        path: a file in UTF-8; by default the language reference that comes with Python
            (pydoc_data.topics, topics in alphabetical order; 465,048 characters of English in
            Python 3.11.7). It changes a little from one Python version to the next: compare the
            sha256 in the description.
        tokens: characters per sequence, at least 1.

    Raises:
        FileError: the file is missing, is not text, or is shorter than two windows.
        SettingError: `tokens` is below 1.
    """
    check_count("tokens", tokens)
    train, test, classes, source = windows_of(path, tokens + 1)
    return Dataset(
        name="text",
        train_inputs=train[:, :-1].contiguous(),
        train_targets=train[:, 1:].contiguous(),
        test_inputs=test[:, :-1].contiguous(),
        test_targets=test[:, 1:].contiguous(),
        classes=classes,
        task="next_token",
        description=(
            f"{source}: {len(train):,} windows of {tokens:,} to train, {len(test):,} to test, "
            f"vocabulary of {classes}"
        ),
    )


def windows_of(path: str | Path | None, window: int) -> tuple[torch.Tensor, torch.Tensor, int, str]:
    """Split a text into windows to train and to test.

    Returns:
        Both, (n, window) int64; the size of the vocabulary including 0; and a description of the
        text.

    Raises:
        FileError: the file is missing, is not text, or is shorter than two windows.
    """
    import numpy as np

    content, origin = _documentation() if path is None else _read(Path(path))
    if len(content) < 2 * window:
        raise FileError(
            f"{origin} has {len(content):,} characters, but needs {2 * window:,}: a window of "
            f"{window:,} to train and one to test. Provide a longer text or fewer tokens"
        )
    # Code points as an array take 18 ms for the documentation, a dictionary 70 ms (one core of the
    # build machine), and a large file never becomes a Python list.
    points = np.frombuffer(content.encode("utf-32-le"), dtype="<u4")
    split = len(points) - max(len(points) // 10, window)
    vocabulary = np.unique(points[:split])
    train = _windows(_encode(points[:split], vocabulary), window)
    test = _windows(_encode(points[split:], vocabulary), window)
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    description = f"{origin}, {len(content):,} characters, sha256 {sha256}"
    return train, test, len(vocabulary) + 1, description


def _documentation() -> tuple[str, str]:
    """Return Python's language reference, and a description of it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileError(
            "this Python came without pydoc_data, the text used by default; write text:PATH"
        ) from error
    content = "\n".join(topics[topic] for topic in sorted(topics))
    return content, f"language reference of Python {platform.python_version()} (pydoc_data.topics)"


def _read(path: Path) -> tuple[str, str]:
    """Return the text of a file, unchanged, and a description of it."""
    try:
        with open_file(path) as file:
            raw = file.read()
    except OSError as error:
        raise FileError(f"cannot read the text {path}: {error.strerror or error}") from error
    # A zero byte is valid UTF-8, but does not occur in text: the file is binary, or UTF-16.
    zero = raw.find(b"\0")
    if zero >= 0:
        raise FileError(f"{path} is not text: byte {zero:,} is 0x00; give a file in UTF-8")
    try:
        return raw.decode(), f"text of {path}"
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not text in UTF-8: byte {error.start:,} is {raw[error.start]:#04x} "
            f"({error.reason})"
        ) from error


def _encode(points: np.ndarray, vocabulary: np.ndarray) -> np.ndarray:
    """Return the index of every code point in the vocabulary, from 1; 0 if it is not in it."""
    import numpy as np

    # For a code point above all others, searchsorted returns an index behind the last.
    indices = np.minimum(np.searchsorted(vocabulary, points), len(vocabulary) - 1)
    return np.where(vocabulary[indices] == points, indices + 1, 0)


def _windows(indices: np.ndarray, window: int) -> torch.Tensor:
    """Split indices into windows, (n, window) int64; an incomplete last window is left out."""
    import numpy as np
    import torch

    count = len(indices) // window
    return torch.from_numpy(indices[: count * window].astype(np.int64)).view(count, window)
