"""Two ends of the same-host transport in one process, and one in another that sends back what it
gets.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import FileStore, HashStore

from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.payload import Payload
from penstock.transport.same_host import SameHostTransport
from penstock.transport.transport import TransportLost


def joined(
    count: int = 2,
    deadline_s: float = 60.0,
    unwilling: tuple[int, ...] = (),
    device: torch.device | None = None,
) -> list[SameHostTransport]:
    """Connect `count` ranks of one process with one another."""
    store, ends = (
        HashStore(),
        [SameHostTransport(rank, deadline_s, device) for rank in range(count)],
    )
    threads = [
        threading.Thread(
            target=end.connect, args=(store, count), kwargs={"willing": end.rank not in unwilling}
        )
        for end in ends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def forward(micro_batch: int, stage: int = 0) -> Message:
    """The message of an activation."""
    return Message(Kind.F, stage, micro_batch)


def backward(micro_batch: int, stage: int = 1) -> Message:
    """The message of a gradient."""
    return Message(Kind.B, stage, micro_batch)


def passed(ends: list[SameHostTransport], value: object, message: Message | None = None) -> Payload:
    """Send a value from the first end to the second, and return what arrives."""
    message = message or forward(0)
    ends[0].send(1, message, Payload.of(value), "")
    return ends[1].post(0, message, "").wait()


@contextlib.contextmanager
def echo(folder: Path) -> Iterator[tuple[SameHostTransport, subprocess.Popen[bytes]]]:
    """This process's end, rank 0, and the process of rank 1, which is killed at the end if it still
    lives.
    """
    end = SameHostTransport(0, 60.0)
    process = subprocess.Popen([sys.executable, __file__, str(folder / "store")])
    try:
        end.connect(FileStore(str(folder / "store"), 2), 2)
        yield end, process
    finally:
        process.kill()
        process.wait()
        end.close()


def _send_back(path: str) -> None:
    """Rank 1: send every activation back as a gradient until the run is stopped."""
    torch.set_num_threads(1)
    end = SameHostTransport(1, 600.0)
    end.connect(FileStore(path, 2), 2)
    end.spin_s = 0.0
    number = 0
    with contextlib.suppress(TransportLost):
        while True:
            received = end.post(0, forward(number), "").wait()
            end.send(
                0,
                backward(number),
                Payload(received.structure, received.leaves, received.wants_grad),
                "",
            )
            number += 1


if __name__ == "__main__":
    _send_back(sys.argv[1])
