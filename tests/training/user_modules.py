"""Modules of a user, written into the current folder of a test."""

from __future__ import annotations

import itertools
import sys
import textwrap
from pathlib import Path

_NUMBERS = itertools.count()

MODEL = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self, features, classes, width):
        super().__init__()
        self.stem, self.body, self.head = (
            nn.Linear(features, width), nn.Linear(width, width), nn.Linear(width, classes)
        )

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + torch.relu(self.body(x)))

def make(features, classes, width=8):
    return Residual(features, classes, width)

def load(samples=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return x, x.argmax(1)
"""


def write_module(text: str, monkeypatch, folder: Path) -> str:
    """Write a module into a folder, make that the current one, and return the module's name.

    Every module has another name, because Python imports each name once.
    """
    name = f"user_module_{next(_NUMBERS)}"
    (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name
