"""The launcher's part of a recovery from memory: collect the stages of the remaining ranks.

Where a stage has copies on several ranks (chimera, replicas), the state of a lost rank is still in
the memory of others. They write it into files in memory that the launcher holds (memfd), in the
form of a checkpoint, which the next attempt loads under any cut. The kernel frees such files when
the launcher ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from penstock.checkpoint.checkpoint_index import Checkpoint, write_index
from penstock.checkpoint.series import newest_whole
from penstock.errors import FileError
from penstock.plan.plan import Plan
from penstock.ranks.foreign_text import foreign_text
from penstock.ranks.processes.forked_ranks import RankProcess
from penstock.ranks.processes.launch_folders import make_locked_folder
from penstock.training.devices import Devices
from penstock.training.recovery.messages import (
    CONDITIONS,
    Conditions,
    Delivery,
    Offer,
    Request,
    delivery_key,
    of_text,
    offer_key,
    request_key,
    to_text,
)
from penstock.transport.unix_store import StoreServer

M = TypeVar("M", Offer, Delivery)

#: Seconds for which the launcher waits for the offers of the remaining ranks. They look for a
#: failure every half second, and then wait for its reason for at most two.
OFFERS_S = 4.0

#: Seconds without progress after which a rank that writes its stages is given up.
_STALLED_S = 20.0

#: Seconds between two polls of the store.
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Selection:
    """The state from which a run can continue.

    Attributes:
        step: its step.
        sources: by stage, the rank that is to write it.
        lines: lines of the metrics of that step.
    """

    step: int
    sources: Mapping[int, int]
    lines: tuple[str, ...]


def select(offers: Mapping[int, Offer], stages: int) -> Selection | str:
    """Select the newest step of which the offers have every stage.

    One rank at least must have completed the step: its loss and its evaluation are known.

    Args:
        offers: by rank.
        stages: number of stages.

    Returns:
        The selection; or why there is none.
    """
    # By step, the first rank that has each stage.
    sources_of_step: dict[int, dict[int, int]] = {}
    for rank, offer in sorted(offers.items()):
        for stage, step in offer.stages:
            sources_of_step.setdefault(step, {}).setdefault(stage, rank)
    lines: dict[int, tuple[str, ...]] = {}
    for offer in offers.values():
        # Of several ranks at a step, not all know its metrics.
        lines[offer.step] = max(lines.get(offer.step, ()), offer.lines, key=len)
    for step in sorted(lines, reverse=True):
        sources = sources_of_step.get(step, {})
        if len(sources) == stages:
            return Selection(step, sources, lines[step])
    if not offers:
        return "no rank is left that could hand over its state"
    present = {stage for sources in sources_of_step.values() for stage in sources}
    missing = [stage for stage in range(stages) if stage not in present]
    if missing:
        return f"no rank is left that has the whole state of stage {missing[0]}"
    steps = ", ".join(
        f"stage {stage} of rank {rank} at step {step}"
        for rank, offer in sorted(offers.items())
        for stage, step in offer.stages
    )
    return f"the failure came during an update, and the ranks are not at one complete step: {steps}"


@dataclass
class LiveCheckpoint:
    """A checkpoint in memory.

    Attributes:
        step: its step.
        folder: has its index, and links to its files.
        lines: lines of the metrics of its step.
        descriptors: of its files, and of the lock of its folder.
    """

    step: int
    folder: Path
    lines: tuple[str, ...]
    descriptors: Sequence[int]

    @property
    def whole(self) -> bool:
        """Whether it can be loaded: no attempt has loaded it yet."""
        return newest_whole([self.folder]) is not None

    def close(self) -> None:
        """Free its memory."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass
class LiveRecovery:
    """Recovers the state of lost ranks from the others, for the attempts of one run.

    Attributes:
        stages: number of stages of the present attempt if its ranks are to offer their state; else
            0.
        checkpoint: the state from which the next attempt can continue; None without one.
        problem: why there is none after the last failure; empty if none was expected.
    """

    stages: int = 0
    checkpoint: LiveCheckpoint | None = None
    problem: str = ""

    def prepare(self, plan: Plan, devices: Devices, *, may_restart: bool) -> None:
        """Prepare for an attempt.

        Args:
            plan: of the attempt.
            devices: of this host.
            may_restart: whether there may be another attempt after it that could use their state.
        """
        in_processes = devices.executor(plan.ranks) == "processes"
        files_in_memory = hasattr(os, "memfd_create")
        possible = (
            plan.synchronous and plan.schedule.copies > 1 and in_processes and files_in_memory
        )
        self.stages = plan.stages if may_restart and possible else 0
        self.problem = ""

    def begin(self, store: StoreServer) -> None:
        """Write the conditions of an attempt for its ranks; called before they start."""
        source = None if self.checkpoint is None else str(self.checkpoint.folder)
        store.set(CONDITIONS, to_text(Conditions(self.stages > 0, source)))

    def collect(self, store: StoreServer, processes: Sequence[RankProcess]) -> None:
        """Collect the state of the remaining ranks; called when a rank has failed.

        Args:
            store: that of the attempt.
            processes: the ranks, in order.
        """
        if not self.stages:
            return
        try:
            offers = _receive(store, processes, offer_key, Offer, _Deadline(OFFERS_S))
            selection = select(offers, self.stages)
            if isinstance(selection, Selection):
                checkpoint = _collect(selection, store, processes)
                self.close()
                self.checkpoint = checkpoint
            else:
                self.problem = selection
        except (FileError, OSError) as error:
            self.problem = foreign_text(str(error))
        if self.problem:
            for rank in range(len(processes)):  # the ranks wait for an answer
                store.set(request_key(rank), to_text(Request()))

    def close(self) -> None:
        """Free the memory of the checkpoint."""
        if self.checkpoint is not None:
            self.checkpoint.close()
            self.checkpoint = None


class _Deadline:
    """A time limit that begins anew with every progress.

    Args:
        seconds: the limit without progress.
        progress: returns a number that changes with every progress.
    """

    def __init__(self, seconds: float, progress: Callable[[], int] = int) -> None:
        self._seconds, self._progress = seconds, progress
        self._last = progress()
        self._end_s = time.monotonic() + seconds

    def passed(self) -> bool:
        """Whether the limit is over."""
        now = self._progress()
        if now != self._last:
            self._last, self._end_s = now, time.monotonic() + self._seconds
        return time.monotonic() >= self._end_s


def _receive(
    store: StoreServer,
    processes: Sequence[RankProcess] | Mapping[int, RankProcess],
    key: Callable[[int], str],
    kind: type[M],
    deadline: _Deadline,
) -> dict[int, M]:
    """Wait until every process has written a message or has ended. Returns the messages by rank.

    Args:
        store: where they write.
        processes: by rank.
        key: returns the key of a rank's message.
        kind: of the messages.
        deadline: after which those that still run are left out.

    Raises:
        FileError: a message is damaged.
    """
    pending = dict(processes if isinstance(processes, Mapping) else enumerate(processes))
    messages: dict[int, M] = {}
    while pending and not deadline.passed():
        for rank, process in list(pending.items()):
            # Asked before the message, so that the last one of a rank that has ended is read.
            ended = process.poll() is not None
            text = store.get(key(rank))
            if text is not None:
                messages[rank] = of_text(text, kind)
            if text is not None or ended:
                del pending[rank]
        if pending:
            time.sleep(_PAUSE_S)
    return messages


def _collect(
    selection: Selection, store: StoreServer, processes: Sequence[RankProcess]
) -> LiveCheckpoint:
    """Have the selected stages written, and complete them to a checkpoint.

    Raises:
        FileError: a rank did not write its stages.
        OSError: there are no files in memory.
    """
    with contextlib.ExitStack() as stack:
        descriptors: dict[int, int] = {}
        for stage in sorted(selection.sources):
            descriptors[stage] = os.memfd_create(f"penstock-stage-{stage}")
            stack.callback(os.close, descriptors[stage])
        identity = secrets.token_hex(16)
        for rank in range(len(processes)):
            files = tuple(
                (stage, f"/proc/{os.getpid()}/fd/{descriptor}")
                for stage, descriptor in descriptors.items()
                if selection.sources[stage] == rank
            )
            store.set(request_key(rank), to_text(Request(selection.step, identity, files)))
        writers = {rank: processes[rank] for rank in set(selection.sources.values())}
        deadline = _Deadline(
            _STALLED_S,
            lambda: sum(os.fstat(descriptor).st_size for descriptor in descriptors.values()),
        )
        index = _join(writers, _receive(store, writers, delivery_key, Delivery, deadline))
        folder, lock = make_locked_folder("penstock-live-")
        stack.callback(os.close, lock)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for stage, descriptor in descriptors.items():
            (folder / index.files[stage]).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        write_index(folder, index)
        stack.pop_all()
    return LiveCheckpoint(selection.step, folder, selection.lines, [*descriptors.values(), lock])


def _join(ranks: Mapping[int, object], deliveries: Mapping[int, Delivery]) -> Checkpoint:
    """Return the index of a checkpoint of all deliveries.

    Raises:
        FileError: one is missing, or they do not belong together.
    """
    indexes: list[Checkpoint] = []
    for rank in sorted(ranks):
        delivery = deliveries.get(
            rank, Delivery(None, f"rank {rank} has not handed over its state")
        )
        if delivery.index is None:
            raise FileError(delivery.error)
        indexes.append(delivery.index)
    sums = {name: row for index in indexes for name, row in index.sums.items()}
    # Each index has the sums of its rank's files alone; with all of them they must be equal.
    first, *others = [replace(index, sums=sums) for index in indexes]
    if any(other != first for other in others) or sums.keys() != set(first.files):
        raise FileError("the ranks have handed over states that do not belong together")
    return first


def release(folder: Path) -> None:
    """Free the files in memory of a checkpoint that all ranks have loaded, and remove its folder."""
    with contextlib.suppress(OSError):
        for file in folder.glob("*.safetensors"):
            # Removing its name would not free the memory while a process has the file open.
            os.truncate(file, 0)
    shutil.rmtree(folder, ignore_errors=True)
