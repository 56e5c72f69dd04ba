"""Layers and Pipes for the tests of this folder."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from torch import nn

from penstock.modules.recomputing import is_checkpointing, is_recomputing
from penstock.pipe.pipe import Pipe
from penstock.pipe.pipe_arguments import build_stages
from penstock.pipe.pipe_engine import Engine


def make_model() -> nn.Sequential:
    """Five layers of few numbers, always the same ones."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def make_pipe(**settings) -> Pipe:
    """These layers on two threads, three micro-batches."""
    return Pipe(make_model(), [2, 3], **{"devices": 2, "chunks": 3, **settings})


class PassRecorder(nn.Module):
    """Records for every forward whether it will be recomputed, and whether it is a recomputation."""

    def __init__(self, notes: list[tuple[bool, bool]]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x):
        """Record it."""
        self.notes.append((is_checkpointing(), is_recomputing()))
        return x * 1


class Holder(nn.Module):
    """A layer around another one, which may be in two of these."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        """Run the inner one."""
        return self.inner(x)


def forced(pipe: Pipe, x, threads: bool | None) -> Pipe:
    """The same pipe, which from now on uses threads, or none."""
    with torch.no_grad():
        pipe(x)
    for choice in pipe._engine.choices.values():
        choice.forced = threads
    return pipe


def forced_from_the_start(pipe: Pipe) -> Pipe:
    """Threads at the first forward already."""
    pipe._engine = Engine(build_stages(pipe.partitions, pipe.devices))
    for choice in pipe._engine.choices.values():
        choice.forced = True
    return pipe


def ticking_clock() -> SimpleNamespace:
    """A replacement of the module `time` that advances by one second per reading, by thread."""
    reading = threading.local()

    def thread_time() -> float:
        reading.seconds = getattr(reading, "seconds", 0.0) + 1.0
        return reading.seconds

    return SimpleNamespace(thread_time=thread_time)
