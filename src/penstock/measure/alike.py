"""Whether the ranks that measure together are on devices of one kind: a profile is of one kind, and
a cluster names each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final, NamedTuple, final

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.units import format_seconds

#: Devices of different hosts, and of one host, whose speeds differ by more are of different kinds.
#: Ranks of one host share its cores, and
#: differ by what else runs there.
TOLERANCE: Final = 1.25
TOLERANCE_ON_A_HOST: Final = 1.5

#: Models that take no longer in all are too small to tell devices apart by: on a busy host of two
#: cores, ranks that are alike have
#: differed by 0.25 ms.
_NOISE_S: Final = 1e-3


@final
class RankSpeed(NamedTuple):
    """What one rank is, and the seconds that the model's forward and backward take there."""

    host: str
    device: str
    model: str
    seconds: float


def unlike(ranks: Sequence[RankSpeed]) -> tuple[int, int] | None:
    """Two ranks whose devices are of different kinds, the faster first; None if all are alike."""
    for a, b in combinations(range(len(ranks)), 2):
        one, other = ranks[a], ranks[b]
        most = TOLERANCE_ON_A_HOST if one.host == other.host else TOLERANCE
        least, longest = sorted((one.seconds, other.seconds))
        slow = longest > most * least and longest - least > _NOISE_S
        if slow or one.device != other.device:
            return (a, b) if one.seconds <= other.seconds else (b, a)
    return None


def refusal(ranks: Sequence[RankSpeed], pair: tuple[int, int]) -> SettingError:
    """That two ranks cannot measure one profile together, and what to do."""
    lines = [
        f"rank {rank} ({ranks[rank].host}, {ranks[rank].model}): {format_seconds(ranks[rank].seconds)} for forward and backward"
        for rank in pair
    ]
    ratio = ranks[pair[1]].seconds / max(ranks[pair[0]].seconds, 1e-12)
    return SettingError(
        "the ranks that measure together are on unlike devices, and a profile is of one kind of device:\n  "
        + "\n  ".join(lines)
        + f"\nwhich is {ratio:.2f} times as long. Measure each kind by itself (together=True on its ranks alone, or together=False on one of "
        "them), and give ps.plan a profile for every device of the cluster by its name: ps.plan({'cpu-0': one, 'cpu-1': other}, …)"
    )


def named_by_kind(devices: Sequence[Device], speeds: Sequence[float]) -> list[Device]:
    """The devices of hosts, with different names where they have one name and differ in speed:
    `cpu-0`, `cpu-1` in their order.

    Those that differ by no more than the tolerance from the first of a kind are of that kind.

    Args:
        devices: one for each host.
        speeds: of each, operations per second.
    """
    kinds: dict[str, list[float]] = {}
    places: list[tuple[str, int]] = []
    for device, speed in zip(devices, speeds, strict=True):
        known = kinds.setdefault(device.name, [])
        place = next((n for n, each in enumerate(known) if equally_fast(each, speed)), len(known))
        if place == len(known):
            known.append(speed)
        places.append((device.name, place))
    return [
        replace(device, name=f"{name}-{place}") if len(kinds[name]) > 1 else device
        for device, (name, place) in zip(devices, places, strict=True)
    ]


def equally_fast(one: float, other: float) -> bool:
    """Whether two speeds of devices on different hosts may be of one kind of device."""
    return max(one, other) <= TOLERANCE * min(one, other)
