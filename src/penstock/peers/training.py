"""Train one system in fresh processes, and return raw times, losses and peak memory."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from penstock.peers.catalogue import System
from penstock.peers.host import Host
from penstock.peers.plain import Plain
from penstock.peers.setup import RankSpec, Setup, to_message
from penstock.peers.team import Refused, Team

#: Seconds for which a rank waits for the others to join.
_JOIN_S = 120


@dataclass(frozen=True)
class Trained:
    """Raw results of a run.

    Attributes:
        unit: what `seconds` and `losses` are of.
        seconds: of each step or epoch: from when the last rank ended the one before to when the
            last rank ended this one.
        losses: training loss of each; of an epoch, the mean over its batches.
        peak_bytes: per rank, above what its imports took.
        whole_peaks: whether the peaks include the construction of the model.
        ranks, threads: number of processes, and of threads in each.
        steps_per_unit: steps in each of `seconds`.
        notes: of rank 0's adapter.
    """

    unit: Literal["step", "epoch"]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    whole_peaks: bool
    ranks: int
    threads: int
    steps_per_unit: int
    notes: dict[str, Plain]


@dataclass(frozen=True)
class Length:
    """Length of a run: `warm` steps that are not timed, then `epochs`, or if that is 0 `steps`."""

    steps: int
    epochs: int = 0
    warm: int = 1


def open_store() -> Any:
    """Open a store at which ranks meet, in this process as with torchrun, at a port that the
    operating system chooses.
    """
    from torch._C._distributed_c10d import TCPStore

    # torch would listen on all interfaces, whatever the address.
    listener = socket.create_server(("127.0.0.1", 0))
    return TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        master_listen_fd=listener.detach(),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_JOIN_S),
    )


class Ranks:
    """The processes of one system, with the store at which they meet.

    Args:
        system: to run.
        setup: of the run.
        host: of the system's library.
        log: file for what the processes print.
        limit_s: seconds until the system must be made.
        gradients: file to compare the gradients of the first step with.

    Raises:
        PeerMissing, PeerFailed: a process did not start, or could not make its part.
        Refused: the system cannot run the setup.
    """

    def __init__(
        self,
        system: System,
        setup: Setup,
        host: Host,
        log: Path,
        limit_s: float,
        gradients: Path | None = None,
    ) -> None:
        reason = system.reason_to_refuse(setup)
        if reason is not None:
            raise Refused(reason)
        self.ranks = system.ranks(setup)
        self.team = Team(host, self.ranks, log)
        try:
            self._store = open_store()
            spec = RankSpec(
                system.name,
                setup,
                0,
                self.ranks,
                system.threads(setup),
                self._store.port,
                str(self.team.folder),
                None if gradients is None else str(gradients),
            )
            specs = [{"spec": to_message(replace(spec, rank=rank))} for rank in range(self.ranks)]
            self.notes: list[dict[str, Plain]] = self.team.tell("make", specs, limit_s)
        except BaseException:
            self.team.end()
            raise

    def tell(
        self, name: str, limit_s: float, only: Sequence[int] | None = None, **arguments: object
    ) -> list[Any]:
        """Run a command with the same arguments on all ranks; see `Team.tell`."""
        return self.team.tell(name, [arguments] * self.ranks, limit_s, only)

    def end(self) -> None:
        """End all processes and the store."""
        self.team.end()
        self._store = None


def train(
    system: System, setup: Setup, host: Host, log: Path, length: Length, *, limit_s: float
) -> Trained:
    """Train a system from its initial weights.

    Args:
        system: to run.
        setup: of the run.
        host: of the system's library.
        log: file for what the processes print.
        length: of the run.
        limit_s: seconds for the whole run.

    Raises:
        PeerMissing, PeerFailed, PeerTimeout, Refused: see `Team.tell`.
    """
    deadline = time.monotonic() + limit_s
    ranks = Ranks(system, setup, host, log, limit_s)
    try:
        answers = ranks.tell(
            "train",
            max(0.1, deadline - time.monotonic()),
            steps=length.steps,
            epochs=length.epochs,
            warm=length.warm,
        )
    finally:
        ranks.end()
    losses = [answer["losses"] for answer in answers if answer["losses"]]
    mean_losses = tuple(sum(values) / len(values) for values in zip(*losses, strict=True))
    return Trained(
        "epoch" if length.epochs else "step",
        step_seconds([answer["times"] for answer in answers]),
        mean_losses,
        tuple(answer["peak"] for answer in answers),
        any(answer["whole"] for answer in answers),
        ranks.ranks,
        system.threads(setup),
        answers[0]["steps"],
        ranks.notes[0],
    )


def step_seconds(times_of_ranks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the seconds of each step. A step ends when the last rank has ended it.

    >>> step_seconds([[0.0, 1.0, 2.0], [0.5, 1.5, 3.0]])
    (1.0, 1.5)
    """
    ends = [max(times) for times in zip(*times_of_ranks, strict=True)]
    return tuple(after - before for before, after in itertools.pairwise(ends))
