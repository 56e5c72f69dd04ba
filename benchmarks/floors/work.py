"""Microseconds in which a rank works and does not wait under 1F1B: Penstock beside the pipeline that
is written by hand.

    OMP_NUM_THREADS=1 python benchmarks/floors/work.py

One process plays one rank at a time, with all messages of the other rank there beforehand, and the
time of a forward and a backward is taken, of which the fastest are compared. So the result depends
little on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from run import MICRO_BATCHES, RANKS, job_of
from torch import Tensor

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.peers.job import Job
from penstock.peers.systems.floors import Shared, one_f_one_b_order, pipeline
from penstock.runtime.player import Mode
from penstock.schedule.lower import input_message
from penstock.schedule.op import Kind, Op
from penstock.transport.payload import Payload
from penstock.transport.same_host import SameHostTransport

#: By rank, the op that begins with a message of the other rank: a forward and a backward lie
#: between two of them.
RECEIVING = (Kind.B, Kind.F)


class TimedShared(Shared):
    """Messages of which the times of the receives are recorded.

    Attributes:
        starts: of the receives of a step, in seconds.
    """

    starts: list[float]

    def begin(self) -> None:
        """See `Line`."""
        super().begin()
        self.starts = []

    def wait(self, micro_batch: int) -> Tensor:
        """See `Line`."""
        self.starts.append(time.perf_counter())
        return super().wait(micro_batch)


def floor_steps(rank: int, x: Tensor, y: Tensor, folder: str) -> Callable[[], list[float]]:
    """Return a function that runs a step of a rank by hand, and returns the times of its receives.

    Args:
        rank: the rank.
        x: inputs.
        y: targets.
        folder: where the memory of the two ranks is.
    """
    job = job_of("1f1b", rank, folder)
    line = TimedShared(folder, (rank, 1 - rank), job.boundary(1), MICRO_BATCHES)
    other = Shared(folder, (1 - rank, rank), job.boundary(1), MICRO_BATCHES)
    before, after = (line, None) if rank else (None, line)
    step = pipeline(job, before, after, one_f_one_b_order(rank, RANKS, MICRO_BATCHES))

    def run() -> list[float]:
        other.begin()
        for micro_batch in range(MICRO_BATCHES):
            other.send(micro_batch, other.places[micro_batch])
        step(x, y)
        return line.starts

    return run


def connected() -> list[SameHostTransport]:
    """Return the transports of two ranks of this process, over shared memory."""
    transports = [SameHostTransport(rank, 60.0) for rank in range(RANKS)]
    store = dist.HashStore()
    threads = [
        threading.Thread(target=transport.connect, args=(store, RANKS)) for transport in transports
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return transports


class PenstockSteps:
    """The steps of a pipeline, one rank at a time.

    Attributes:
        more_s: by rank, the seconds before the first op, and of the update.
    """

    def __init__(self, job: Job, x: Tensor, y: Tensor) -> None:
        self._pipe = ps.Pipeline(
            torch.nn.Sequential(*job.layers()),
            loss=job.loss,
            optimizer=job.optimizer,
            balance=job.setup.lengths,
            schedule="1f1b",
            micro_batches=MICRO_BATCHES,
            executor="threads",
        )
        self._x, self._y = x, y
        for _ in range(4):
            self._pipe.train_batch(x, y)
        self._interpreters = self._pipe._assembly.interpreters
        self._transports = connected()
        for rank, transport in enumerate(self._transports):
            self._interpreters[rank].transport = transport
        self._value = torch.zeros(job.boundary(1).shape)
        self._steps = 4
        self.more_s: dict[int, list[tuple[float, float]]] = {}

    def run(self, rank: int) -> list[float]:
        """Run a step of a rank; return the start times of the ops that receive."""
        self._steps += 1
        player, interpreter = self._pipe._player, self._interpreters[rank]
        program = player._lowered(MICRO_BATCHES, Mode.TRAIN).programs[rank]
        ops = [action for action in program if isinstance(action, Op)]
        receiving = [op for op in ops if op.kind is RECEIVING[rank]]
        value = Payload("", (self._value,), (rank == 1,))
        for op in receiving:
            message = input_message(op, RANKS)
            assert message is not None
            self._transports[1 - rank].send(rank, message, value, "")
        started = time.monotonic()
        batch = make_batch(self._x, self._y, MICRO_BATCHES, step=self._steps, training=True)
        player.global_step.begin(1.0)
        interpreter.play(program, batch)
        marks = interpreter.marks
        first, (update_start, update_end) = marks[ops[0]][0], marks[ops[-1]]
        self.more_s.setdefault(rank, []).append((first - started, update_end - update_start))
        self._discard(rank)
        return [marks[op][0] for op in receiving]

    def _discard(self, rank: int) -> None:
        """Receive what a rank has sent."""
        queue = self._transports[1 - rank]._peers[rank].incoming
        queue.poll()
        for name in list(queue.pending):
            while name in queue.pending:
                queue.take(name)

    def close(self) -> None:
        """Close the pipeline."""
        self._pipe.close()


def fast(seconds: Sequence[float]) -> float:
    """Return the microseconds that the fastest twentieth stays below."""
    return 1e6 * statistics.quantiles(seconds, n=20)[0]


def main() -> None:
    """Measure, and print a line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="steps of each rank")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        job = job_of("1f1b", 0, folder)
        x, y = job.workload.first_batch()
        penstock = PenstockSteps(job, x, y)
        for rank in range(RANKS):
            by_hand_steps = floor_steps(rank, x, y, folder)
            by_hand: list[float] = []
            ours: list[float] = []
            for _ in range(arguments.rounds):
                by_hand += [end - start for start, end in pairwise(by_hand_steps())]
                ours += [end - start for start, end in pairwise(penstock.run(rank))]
            before, update = map(fast, zip(*penstock.more_s[rank], strict=True))
            print(
                f"rank {rank}, a forward and a backward: {fast(by_hand):.1f} µs by hand, Penstock "
                f"{fast(ours):.1f}, {fast(ours) / fast(by_hand):.3f} times as long; before its "
                f"first op {before:.0f}, update {update:.0f}"
            )
        penstock.close()


if __name__ == "__main__":
    main()
