"""Which ranks write to the same disk."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import FileError
from penstock.ranks.processes.rank_reports import attempt, check_reports, exchange
from penstock.ranks.world import World


@dataclass(frozen=True)
class Disks:
    """The disks on which a folder is, as the ranks see it.

    Attributes:
        leaders: by rank, the lowest rank that sees the same folder. It completes checkpoints there.
    """

    leaders: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return len(set(self.leaders)) == 1

    def members(self, leader: int) -> list[int]:
        """Return the ranks that see the same folder as a leader."""
        return [rank for rank, other in enumerate(self.leaders) if other == leader]


def find_disks(world: World, folder: Path) -> Disks:
    """Find out which ranks see the same folder, by empty files that they write there.

    Rank 0 writes a file, and all look for it. Ranks that do not see it write one each, and look for
    those of the others. Names of hosts do not count: containers of different hosts may have the
    same name.

    Args:
        world: the ranks.
        folder: the folder; rank 0, and ranks that do not see its file, create it.

    Raises:
        FileError: on every rank, if one of these ranks cannot write there.
    """
    if len(world.local_ranks) == world.size:
        return Disks((0,) * world.size)
    # Probes that a killed run has left must not count.
    nonce = world.broadcast([secrets.token_hex(8)], 0)[0]
    prefix = f".probe-{nonce}-"
    first = world.local_ranks[0]
    try:
        # Usually all ranks see rank 0's folder, and one file is enough. Otherwise those that saw
        # nothing write one as well.
        lowest = _look(world, folder, prefix, writes=first == 0)
        if None in lowest:
            lowest = _look(world, folder, prefix, writes=lowest[first] is None)
    finally:
        with suppress(OSError):
            _probe(folder, prefix, first).unlink(missing_ok=True)
    leaders = [rank if leader is None else leader for rank, leader in enumerate(lowest)]
    return Disks(tuple(leaders))


def _look(world: World, folder: Path, prefix: str, *, writes: bool) -> list[int | None]:
    """Return by rank the lowest rank whose probe it sees; None if it sees none.

    Args:
        world: the ranks.
        folder: where the probes are.
        prefix: of their names.
        writes: whether this process writes a probe before.

    Raises:
        FileError: on every rank, if a probe cannot be written.
    """
    first = world.local_ranks[0]
    probe = _probe(folder, prefix, first)
    written = attempt(first, lambda: _write(probe) if writes else None)
    # All have written before any of them looks: the exchange is a barrier.
    check_reports(exchange(world, {first: written}), "nothing was written")
    reports = exchange(world, {first: attempt(first, lambda: _lowest_rank(folder, prefix))})
    return [report.value for report in reports]


def _probe(folder: Path, prefix: str, rank: int) -> Path:
    """Return the file that a rank writes."""
    return folder / f"{prefix}{rank}"


def _lowest_rank(folder: Path, prefix: str) -> int | None:
    """Return the lowest rank whose probe this process sees; None if it sees none."""
    ranks = [int(path.name.removeprefix(prefix)) for path in folder.glob(f"{prefix}*")]
    return min(ranks, default=None)


def _write(probe: Path) -> None:
    """Write the probe file.

    Raises:
        FileError: it cannot be written.
    """
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write the checkpoint {probe.parent}: {reason}") from error
