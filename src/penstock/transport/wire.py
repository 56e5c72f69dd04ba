"""The links of a rank over torch.distributed: process groups, the store, deadlines, and their end.

Under NCCL a wait makes the device's stream wait and the host goes on: nothing else may block the
host in a step of the steady state. Another thread enforces the deadline, see `Wire.late`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.buffer_meter import BufferMeter
from penstock.transport.communicators import LinkKey, abort_communicators, close_gloo_group
from penstock.transport.transport import TransportLost, TransportTimeout


class DeviceTransfer(NamedTuple):
    """A transfer of NCCL: a kernel on the device, for which streams wait and hosts do not. `text`
    describes it in messages.
    """

    work: dist.Work
    text: str


class PendingWork(Protocol):
    """An operation that has been started, such as torch's Work."""

    def is_completed(self) -> bool:
        """Whether it has ended."""
        ...

    def wait(self, timeout: timedelta) -> bool:
        """Wait until it has ended, at most `timeout`; raise RuntimeError if it failed."""
        ...


Work = PendingWork | DeviceTransfer


@dataclass
class Wire:
    """What all transports of a rank share: process groups, the store, and the deadline.

    Attributes:
        rank: this rank.
        device: of its tensors.
        store: of torch.distributed, through which headers go.
        deadline_s: seconds that a wait may take.
        ranks: by rank, the rank of its process in the job, which torch's functions expect.
        shared: a gloo group of all ranks, where tags keep messages apart. It carries the messages
            for which `groups` has no entry, such as the norms of gradient clipping.
        groups: under NCCL one process group for each directed link. NCCL matches transfers by their
            order per communicator, so with one for each direction two ranks that send to each other
            at once do not wait for one another. Links between replicas of a stage have a second one
            (key True) for what they exchange at an update (U), whose receives are not posted in one
            order with those of the programs.
        everyone: under NCCL a group of all ranks, for losses and norms.
        replica_groups: the groups of `ReplicaCollectives`.
        lost: whether the links were closed.
        buffers: the bytes of messages.
    """

    rank: int
    device: torch.device
    store: Store
    deadline_s: float
    shared: dist.ProcessGroup
    ranks: Sequence[int]
    groups: Mapping[LinkKey, dist.ProcessGroup] = field(default_factory=dict)
    everyone: dist.ProcessGroup | None = None
    replica_groups: list[dist.ProcessGroup] = field(default_factory=list)
    lost: bool = False
    buffers: BufferMeter = field(default_factory=BufferMeter)
    _awaited: deque[DeviceTransfer] = field(default_factory=deque)
    _progress_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def communicator(self, link: Link, message: Message) -> dist.ProcessGroup | None:
        """Return the NCCL group that carries a message over a link; None if it goes through host
        memory over `shared`.
        """
        return self.groups.get((link, message.kind is Kind.U))

    @property
    def copies_to_host(self) -> bool:
        """Whether messages over `shared` must be copied to host memory first (gloo carries CPU
        tensors).
        """
        return self.device.type != "cpu"

    def wait(self, work: Work) -> None:
        """Wait until a transfer is done. Under NCCL only the device's stream waits, and the host
        goes on.

        Raises:
            TransportTimeout, TransportLost: see `Arrival.wait`.
            RunError: the transfer failed on this rank, for another reason than a lost link.
        """
        started = time.perf_counter()
        try:
            if isinstance(work, DeviceTransfer):
                # With a timeout, torch would block the host and poll until the transfer is over.
                self._watch(work)
                work.work.wait()
            else:
                work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            self._raise(error, started)

    def _watch(self, transfer: DeviceTransfer) -> None:
        """Register a transfer that the device waits for, so that `late` can report it."""
        with self._lock:
            if not self._awaited:
                self._progress_s = time.monotonic()
            self._awaited.append(transfer)
            self._drop_finished()

    def _drop_finished(self) -> None:
        """Drop the transfers that are over, from the oldest on; each restarts the clock of
        `late`.
        """
        while self._awaited and self._awaited[0].work.is_completed():
            self._awaited.popleft()
            self._progress_s = time.monotonic()

    def late(self) -> str | None:
        """Return the description of a transfer that is overdue; None if there is none.

        A transfer is overdue if the device has waited for it longer than the deadline and no other
        transfer has ended meanwhile. The thread that monitors the other ranks polls this, since
        under NCCL the host does not block in a wait.
        """
        with self._lock:
            self._drop_finished()
            if not self._awaited or time.monotonic() - self._progress_s < self.deadline_s:
                return None
            return self._awaited[0].text

    def fetch(self, name: str) -> str:
        """Return what the store holds under `name`, waiting until it does. Raises as `wait`."""
        started = time.perf_counter()
        # Doubled up to 20 ms: most headers come within a millisecond, and a slow peer costs 50
        # looks a second.
        pause_s = 0.0005
        try:
            while not self.store.check([name]):
                # Polled, so that a stopped run is noticed: a wait inside the store cannot be
                # interrupted.
                if self.lost:
                    raise TransportLost("the run was stopped")
                if time.perf_counter() - started >= self.deadline_s:
                    raise TransportTimeout(f"{name} is not in the store")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
            return str(self.store.get(name).decode())
        except RuntimeError as error:
            raise TransportLost(str(error)) from error

    def _raise(self, error: RuntimeError, started: float) -> NoReturn:
        """Convert an error of torch.distributed into TransportTimeout, TransportLost, or itself."""
        # torch begins to count a little later than `started`, or ends a little earlier.
        out_of_time = time.perf_counter() - started >= self.deadline_s * 0.95
        if out_of_time and not self.lost:
            raise TransportTimeout(str(error)) from error
        if not self.lost and not is_lost(error):
            raise error
        raise TransportLost(str(error)) from error

    def abort(self) -> None:
        """Close all links, so that every wait on one of them, on this and other ranks, ends.

        gloo has no abort of its own (torch 2.13: `ProcessGroup.abort` leaves pairs open), but a
        receive that times out closes the whole context.
        """
        if self.lost:
            return
        self.lost = True
        everyone = [] if self.everyone is None else [self.everyone]
        abort_communicators([*self.groups.values(), *everyone])
        for group in (self.shared, *self.replica_groups):
            close_gloo_group(group, self.ranks[self.rank])


def is_lost(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed means that a link is closed or its other end is gone.

    All other errors, such as a dtype that the backend does not support or an out-of-memory error,
    are this rank's own.
    """
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error)
    # gloo has no exception class for it. "Bad address" (EFAULT) means that the tensor was not in
    # host memory, which is this rank's own error.
    # A wait on another thread, whose time limit was over, has closed the pair of ranks.
    words = ("gloo/transport", "onnection", "pair closure")
    return any(word in text for word in words) and "Bad address" not in text
