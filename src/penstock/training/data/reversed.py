"""Text to be reversed: a translation task whose targets follow from the source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.training.data.batches import Dataset, check_count
from penstock.training.data.catalogue import register
from penstock.training.data.text import windows_of

if TYPE_CHECKING:
    import torch


@register(
    "reversed",
    usage="reversed[:PATH]",
    takes=("tokens",),
    source="a UTF-8 file, or the documentation that comes with Python",
)
def reversed_text(path: str | Path | None = None, *, tokens: int = 128) -> Dataset:
    """Windows of a text and their reversals: inputs (n, 2, tokens) int64, targets (n, tokens)
    int64.

    The first row of an input is the source, the second the target shifted by one: the decoder's
    input before each character. Vocabulary and split are those of `text`; 0 also starts the target.

        text      T h e _ c a        tokens = 3
        source    T h e | _ c a
        shifted   0 e h | 0 a c
        targets   e h T | a c _

    The last character that was read is the first to be written: without attention a recurrent model
    has to remember the whole window. Source of the task: Sutskever, Vinyals and Le 2014, section
    3.3, who reversed their sources because that makes the task much easier.

    Args:
        path: a file in UTF-8; by default the language reference that comes with Python.
        tokens: characters of source and target, at least 1.

    Raises:
        FileError: the file is missing, is not text, or is shorter than two windows.
        SettingError: `tokens` is below 1.
    """
    check_count("tokens", tokens)
    train, test, classes, source = windows_of(path, tokens)
    return Dataset(
        name="reversed",
        train_inputs=_pairs(train),
        train_targets=train.flip(1),
        test_inputs=_pairs(test),
        test_targets=test.flip(1),
        classes=classes,
        task="translate",
        description=(
            f"{source}, and backwards: {len(train):,} windows of {tokens:,} to train, "
            f"{len(test):,} to test, vocabulary of {classes}"
        ),
    )


def _pairs(windows: torch.Tensor) -> torch.Tensor:
    """Return source and shifted target of windows (n, tokens): (n, 2, tokens)."""
    import torch

    start = torch.zeros_like(windows[:, :1])
    shifted = torch.cat([start, windows.flip(1)[:, :-1]], dim=1)
    return torch.stack([windows, shifted], dim=1)
