"""Which ranks write to the same disk."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import FileError
from penstock.ranks.processes.rank_reports import Report, attempt, check_reports, exchange
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
    """Find out which ranks see the same folder: rank 0 writes a probe file, and all look for it.

    Ranks that do not see it are taken to share a disk with the other ranks of their host.

    Args:
        world: the ranks.
        folder: the folder; rank 0 creates it.

    Raises:
        FileError: on every rank, if rank 0 cannot write there.
    """
    if len(world.local_ranks) == world.size:
        return Disks((0,) * world.size)
    nonce = world.broadcast([secrets.token_hex(8)], 0)[0]
    probe = folder / f".probe-{nonce}"
    first = world.local_ranks[0]
    written = attempt(first, lambda: _write(probe) if first == 0 else None)
    check_reports(exchange(world, {first: written}), "nothing was written")
    reports = exchange(world, {first: attempt(first, probe.exists)})
    if first == 0:
        with suppress(OSError):
            probe.unlink()
    return Disks(_leaders(reports))


def _leaders(reports: list[Report]) -> tuple[int, ...]:
    """Return by rank the lowest rank that sees the same folder."""
    leaders: list[int] = []
    first_of_host: dict[str, int] = {}
    for report in reports:
        if report.value:
            leaders.append(0)
        else:
            leaders.append(first_of_host.setdefault(report.host, report.rank))
    return tuple(leaders)


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
