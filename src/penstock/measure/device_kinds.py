"""Detect ranks and hosts whose devices differ: a profile describes a single kind of device."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final, NamedTuple, final

from penstock.cluster.device import Device
from penstock.errors import SettingError
from penstock.units import format_seconds

_LOG = logging.getLogger("penstock")

#: Ratios of speeds above which devices are of different kinds, between hosts and within a host.
#: Ranks of one host share its cores, so that other programs make them differ more.
TOLERANCE: Final = 1.25
TOLERANCE_ON_A_HOST: Final = 1.5

#: Ratio of seconds up to which equal processors of one host differ because of other programs: two
#: of them may share the core of one rank.
_MOST_BY_OTHER_PROGRAMS: Final = 3.0

#: Differences in seconds that are noise, whatever the ratio: on a busy host of two cores, equal
#: ranks have differed by 0.25 ms.
_NOISE_S: Final = 1e-3


@final
class RankSpeed(NamedTuple):
    """A rank's host, device and device model, and its seconds for forward and backward."""

    host: str
    device: str
    model: str
    seconds: float


def processor_name() -> str:
    """Return the model name of the CPU."""
    name = platform.processor() or platform.machine()
    try:
        # Read line by line, only up to the first processor.
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            models = (
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
            return next(models, name)
    except OSError:  # not Linux
        return name


def find_unlike_pair(ranks: Sequence[RankSpeed]) -> tuple[int, int] | None:
    """Return two ranks with different kinds of devices, the faster first; None if all are equal."""
    for first, second in combinations(range(len(ranks)), 2):
        a, b = ranks[first], ranks[second]
        tolerance = TOLERANCE_ON_A_HOST if a.host == b.host else TOLERANCE
        faster, slower = sorted((a.seconds, b.seconds))
        differs = slower > tolerance * faster and slower - faster > _NOISE_S
        if differs or a.device != b.device:
            return (first, second) if a.seconds <= b.seconds else (second, first)
    return None


def refuse_unlike_pair(ranks: Sequence[RankSpeed], pair: tuple[int, int], *, warns: bool) -> None:
    """Refuse two ranks that cannot measure one profile together.

    Equal processors of one host may differ because of other programs: these are measured, with a
    warning.

    Args:
        ranks: all ranks.
        pair: a result of `find_unlike_pair`.
        warns: whether this rank gives the warning.

    Raises:
        SettingError: the devices are of different kinds.
    """
    faster, slower = (ranks[rank] for rank in pair)
    # Host, device and model of the device.
    is_same_kind = faster[:3] == slower[:3]
    if not is_same_kind or slower.seconds > _MOST_BY_OTHER_PROGRAMS * faster.seconds:
        raise unlike_devices_error(ranks, pair)
    if warns:
        _LOG.warning(
            "rank %d takes %.2f times as long as rank %d on an equal processor (%s): other programs "
            "seem to use its cores. Predictions will be too long for what it measures; measure "
            "again when the machine is idle",
            pair[1],
            slower.seconds / faster.seconds,
            pair[0],
            slower.model,
        )


def unlike_devices_error(ranks: Sequence[RankSpeed], pair: tuple[int, int]) -> SettingError:
    """Return the error for two ranks that cannot measure one profile together."""
    lines = []
    for rank in pair:
        speed = ranks[rank]
        seconds = format_seconds(speed.seconds)
        lines.append(f"rank {rank} ({speed.host}, {speed.model}): {seconds} for forward+backward")
    faster, slower = (ranks[rank].seconds for rank in pair)
    ratio = slower / max(faster, 1e-12)
    return SettingError(
        "the ranks that measure together are on different kinds of devices, but a profile is of "
        "one kind:\n  "
        + "\n  ".join(lines)
        + f"\nwhich is {ratio:.2f} times as long. Measure each kind separately (together=True on "
        "its ranks alone, or together=False on one of them), and give ps.plan a profile for every "
        "device of the cluster by its name: ps.plan({'cpu-0': one, 'cpu-1': other}, …)"
    )


def name_by_kind(devices: Sequence[Device], speeds: Sequence[float]) -> list[Device]:
    """Number the names of devices that share a name but differ in speed: `cpu-0`, `cpu-1`, ...

    A device is of the first kind from which it differs by no more than the tolerance.

    Args:
        devices: one per host.
        speeds: of each, operations per second.
    """
    speeds_of_kinds: dict[str, list[float]] = {}
    kinds: list[int] = []
    for device, speed in zip(devices, speeds, strict=True):
        kind_speeds = speeds_of_kinds.setdefault(device.name, [])
        matches = [
            kind for kind, kind_speed in enumerate(kind_speeds) if equally_fast(kind_speed, speed)
        ]
        if not matches:
            matches = [len(kind_speeds)]
            kind_speeds.append(speed)
        kinds.append(matches[0])
    return [
        replace(device, name=f"{device.name}-{kind}")
        if len(speeds_of_kinds[device.name]) > 1
        else device
        for device, kind in zip(devices, kinds, strict=True)
    ]


def equally_fast(a: float, b: float) -> bool:
    """Return whether two speeds on different hosts may be of one kind of device."""
    return max(a, b) <= TOLERANCE * min(a, b)
