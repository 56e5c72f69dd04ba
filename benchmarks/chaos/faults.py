"""The faults of `run.py`, each a function of its target that returns whether it could be injected."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds of a short stop, of a slow phase, and of a full disk.
STOP_S, SLOW_S, FULL_S = (0.1, 3.0), 3.0, (0.5, 3.0)

#: Seconds that a hang may last: longer than the deadline of `run.py`, at which the other rank ends
#: the attempt, and the launcher replaces the rank that hangs.
HANG_S = 30.0

#: Seconds in which ranks end after their launcher.
ORPHAN_S = 10.0

#: Size of the tmpfs of a round: room for a run with its checkpoints.
DISK = "64m"


@dataclass
class Target:
    """A run under test.

    Attributes:
        launcher: process id of `penstock train`.
        disk: the file system of the run's folder.
        generator: source of random choices.
        seen: process ids of all ranks that were seen.
    """

    launcher: int
    disk: Path
    generator: random.Random
    seen: set[int] = field(default_factory=set)

    def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks that descend from the launcher."""
        parents, ranks = {}, []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError):
                # The name may hold spaces and brackets: the fields start behind the last bracket.
                name, _, fields = (entry / "stat").read_text().rpartition(")")
                parents[int(entry.name)] = int(fields.split()[1])
                if "penstock-rank" in name and fields.split()[0] != "Z":
                    ranks.append(int(entry.name))
        present = sorted(pid for pid in ranks if self._descends(pid, parents))
        self.seen.update(present)
        return present

    def survivors(self) -> list[int]:
        """Return the ranks that were seen and have not ended within some seconds."""
        deadline = time.monotonic() + ORPHAN_S
        while alive := sorted(pid for pid in self.seen if _is_rank(pid)):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        return alive

    def _descends(self, pid: int, parents: dict[int, int]) -> bool:
        """Whether a process descends from the launcher."""
        while pid in parents and pid != self.launcher:
            pid = parents[pid]
        return pid == self.launcher

    def any_rank(self) -> int | None:
        """Return a random rank's process id; None if there is none."""
        pids = self.rank_pids()
        return self.generator.choice(pids) if pids else None

    def signal(self, pid: int | None, number: int) -> bool:
        """Send a signal. Returns whether the process was there."""
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False


def _is_rank(pid: int) -> bool:
    """Whether a process is a rank that runs."""
    with contextlib.suppress(OSError):
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return "penstock-rank" in name and fields.split()[0] != "Z"
    return False


def kill_rank(target: Target) -> bool:
    """Kill a rank."""
    return target.signal(target.any_rank(), signal.SIGKILL)


def terminate_rank(target: Target) -> bool:
    """Send SIGTERM to a rank, which asks the whole run to save and end."""
    return target.signal(target.any_rank(), signal.SIGTERM)


def kill_launcher(target: Target) -> bool:
    """Kill the launcher, as a loss of power would."""
    return target.signal(target.launcher, signal.SIGKILL)


def terminate_launcher(target: Target) -> bool:
    """Send SIGTERM to the launcher."""
    return target.signal(target.launcher, signal.SIGTERM)


def stop_rank(target: Target) -> bool:
    """Stop a rank for less than the deadline."""
    return _stop(target, target.generator.uniform(*STOP_S))


def hang_rank(target: Target) -> bool:
    """Stop a rank until it is replaced."""
    return _stop(target, HANG_S)


def slow_rank(target: Target) -> bool:
    """Let a rank run for a fifth of the time."""
    pid, end = target.any_rank(), time.monotonic() + SLOW_S
    injected = False
    while time.monotonic() < end and target.signal(pid, signal.SIGSTOP):
        injected = True
        time.sleep(0.04)
        target.signal(pid, signal.SIGCONT)
        time.sleep(0.01)
    return injected


def fill_disk(target: Target) -> bool:
    """Fill the disk of the run for some time."""
    ballast = target.disk / "ballast"
    try:
        with contextlib.suppress(OSError), ballast.open("wb") as content:
            while True:
                content.write(bytes(1 << 16))
                content.flush()
        time.sleep(target.generator.uniform(*FULL_S))
    finally:
        ballast.unlink(missing_ok=True)
    return True


def _stop(target: Target, seconds: float) -> bool:
    """Stop a rank for some time, or until it has ended."""
    pid = target.any_rank()
    if not target.signal(pid, signal.SIGSTOP):
        return False
    end = time.monotonic() + seconds
    while time.monotonic() < end and pid in target.rank_pids():
        time.sleep(0.05)
    target.signal(pid, signal.SIGCONT)
    return True


#: By name.
FAULTS: dict[str, Callable[[Target], bool]] = {
    "kill rank": kill_rank,
    "terminate rank": terminate_rank,
    "kill launcher": kill_launcher,
    "terminate launcher": terminate_launcher,
    "stop rank": stop_rank,
    "hang rank": hang_rank,
    "slow rank": slow_rank,
    "full disk": fill_disk,
}


def is_mountpoint(folder: Path) -> bool:
    """Whether a folder is a file system of its own, which may be filled."""
    return folder.is_mount()


@contextlib.contextmanager
def tmpfs(folder: Path) -> Iterator[Path]:
    """Mount a small file system within a `with` block; a plain folder without the rights for it."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(mount, check=False).returncode
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
