"""The ranks of a `Pipe` that runs a schedule: threads, or the caller's thread for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from penstock.errors import PeerFailed
from penstock.pipe.pipe_threads import PartitionThreads
from penstock.ranks.status_board import reason_of
from penstock.ranks.thread_world import ThreadWorld
from penstock.runtime.program_steps import Step
from penstock.schedule.lower import Message

T = TypeVar("T")

#: A rank and one step of its program.
Turn = tuple[int, Step]

#: A verified schedule cannot deadlock, and a layer may take as long as it likes: the number of
#: seconds is one that no run reaches, and that `threading` accepts.
_NO_DEADLINE_S = 1e9


class PipeWorld(ThreadWorld):
    """The ranks of one `Pipe`, which share the threads of `PartitionThreads`.

    Args:
        size: number of ranks.
        device: where all ranks compute.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device, _NO_DEADLINE_S)
        self._threads = PartitionThreads()

    def run(self, job: Callable[[int], T]) -> dict[int, T]:
        """Run `job(rank)` for every rank, each in its thread.

        Raises:
            BaseException: the first exception of a job. The ranks can run again.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def stop(error: BaseException, rank: int | None = None) -> None:
            errors.append(error)
            self._stop(reason_of(error) if rank is None else reason_of(error, rank))

        def run_rank(rank: int) -> None:
            try:
                results[rank] = job(rank)
            except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                stop(error, rank)

        self._board.reset()
        self._threads.run([partial(run_rank, rank) for rank in self.local_ranks], stop)
        if errors:
            self.discard_messages()
            raise next((error for error in errors if not isinstance(error, PeerFailed)), errors[0])
        return results

    def discard_messages(self) -> None:
        """Drop the messages of a batch that has failed."""
        self._exchange.reopen()


def turns_of(programs: Sequence[Sequence[Step]]) -> tuple[Turn, ...]:
    """Return an order in which one thread can run the programs of all ranks.

    The ranks take turns of one step. A rank is passed over while its next step needs a message that
    has not been sent.

    Args:
        programs: by rank, the steps of its program; they cannot deadlock.
    """
    turns: list[Turn] = []
    waiting = [deque(program) for program in programs]
    # By rank, the messages that other ranks send to it: that it has posted, and that have been
    # sent.
    posted: list[set[Message]] = [set() for _ in programs]
    sent: list[set[Message]] = [set() for _ in programs]
    while any(waiting):
        for rank, steps in enumerate(waiting):
            if not steps:
                continue
            posted[rank].update(message for _, message in steps[0].posts)
            needed = steps[0].input_message
            if needed in posted[rank] and needed not in sent[rank]:
                continue
            step = steps.popleft()
            for peer, message in step.sends:
                sent[peer].add(message)
            turns.append((rank, step))
    return tuple(turns)
