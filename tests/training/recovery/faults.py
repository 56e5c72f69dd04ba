"""Ranks that are killed at a chosen point of a run. A module of its own, so that ranks can load it
by name quickly.

A rank is killed when the others have reached a chosen point, which they signal through FIFOs: so
what they have in memory does not depend on who is faster.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from penstock.runtime.interpreter import Interpreter
from penstock.schedule.op import Kind
from penstock.training.loop.rank_result import RankResult
from penstock.training.loop.training_loop import TrainingLoop
from penstock.training.rank import train_rank
from penstock.training.recovery.live_state import LiveState

FEATURES, CLASSES = 4, 4


@dataclass(frozen=True)
class Fault:
    """Ranks that are killed once.

    Attributes:
        victims: the ranks.
        step: in which step.
        place: before an op of this kind; or, if it is None, when the step is complete on the other
            ranks, before the victim writes its metrics.
        updates: number of updates in this step that have been before, here and elsewhere.
    """

    victims: tuple[int, ...]
    step: int
    place: Kind | None
    updates: int = 0


@dataclass(frozen=True)
class FaultyRank:
    """Trains as `train_rank` does, with faults.

    Attributes:
        faults: the faults.
        folder: where ranks leave signals.
    """

    faults: tuple[Fault, ...]
    folder: Path

    def __call__(self, *args) -> RankResult:
        """Train as one rank."""
        rank = int(os.environ["RANK"])
        for number, fault in enumerate(self.faults):
            if rank in fault.victims:
                self._kill(fault, number, int(os.environ["WORLD_SIZE"]))
            else:
                self._signal(fault, number, rank)
        return train_rank(*args)

    def _kill(self, fault: Fault, number: int, ranks: int) -> None:
        """Have this rank killed."""
        others = [rank for rank in range(ranks) if rank not in fault.victims]
        fired = self.folder / f"fired-{number}-{os.environ['RANK']}"

        def die() -> None:
            if fired.exists():
                return
            fired.touch()
            for other in others:
                with _fifo(self.folder, number, other).open("rb", buffering=0) as signals:
                    signals.read(1)
            os.kill(os.getpid(), signal.SIGKILL)

        if fault.place is None:
            finish_step = TrainingLoop._finish_step

            def finish(loop, *args, **options) -> None:
                if loop.result.steps + 1 == fault.step:
                    die()
                finish_step(loop, *args, **options)

            TrainingLoop._finish_step = finish
            return
        run_step = Interpreter.run_step
        updates = 0

        def run(interpreter, step, context) -> None:
            nonlocal updates
            if step.op is not None and _number_of_step(interpreter, step, context) == fault.step:
                if step.kind is fault.place and updates == fault.updates:
                    die()
                updates += step.kind is Kind.U
            run_step(interpreter, step, context)

        Interpreter.run_step = run

    def _signal(self, fault: Fault, number: int, rank: int) -> None:
        """Have this rank signal that it has reached the point at which another may be killed."""

        def reached() -> None:
            # It stays open: what is in a FIFO that no process has open is lost.
            writer = os.open(_fifo(self.folder, number, rank), os.O_RDWR)
            os.write(writer, b"x")

        if fault.updates:
            run_step = Interpreter.run_step
            updates = 0

            def run(interpreter, step, context) -> None:
                nonlocal updates
                run_step(interpreter, step, context)
                if step.kind is not Kind.U:
                    return
                if _number_of_step(interpreter, step, context) == fault.step:
                    updates += 1
                    if updates == fault.updates:
                        reached()

            Interpreter.run_step = run
            return
        complete = fault.step if fault.place is None else fault.step - 1
        commit = LiveState.commit

        def commit_and_signal(live, step) -> None:
            commit(live, step)
            if step == complete:
                reached()

        LiveState.commit = commit_and_signal


def make_fifos(faults: tuple[Fault, ...], folder: Path, ranks: int) -> FaultyRank:
    """Return the function of the ranks of a run with faults."""
    for number in range(len(faults)):
        for rank in range(ranks):
            os.mkfifo(_fifo(folder, number, rank))
    return FaultyRank(faults, folder)


def _fifo(folder: Path, number: int, rank: int) -> Path:
    """Return the FIFO in which a rank signals that it is ready for a fault."""
    return folder / f"ready-{number}-{rank}"


def _number_of_step(interpreter, step, context) -> int:
    """Return the number of the training step, from 1, to which an op belongs."""
    if step.kind is Kind.U:
        return interpreter._batch_step + 1
    entry = context.batches.find(step.number)
    return -1 if entry is None or not entry[0].training else entry[0].step + 1


class Block(nn.Module):
    """A layer with weights, running statistics and random numbers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(features, features), nn.BatchNorm1d(features)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        return self.dropout(torch.relu(self.norm(self.linear(x))))


def model(features: int, classes: int) -> nn.Sequential:
    """Return a model of eight layers."""
    return nn.Sequential(*(Block(features) for _ in range(7)), nn.Linear(features, classes))


def data(samples: int = 53) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(0))
    return inputs, inputs.argmax(1)
