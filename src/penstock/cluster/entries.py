"""One device or one link of a description, key by key; what it does not say is its base's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from penstock.cluster.device import Device, Link
from penstock.cluster.fields import (
    Fields,
    parse_bandwidth,
    parse_clock,
    parse_count,
    parse_flag,
    parse_latency,
    parse_memory,
    parse_number,
    parse_peaks,
    parse_text,
)
from penstock.errors import ClusterError

__all__ = ["DEVICE_KEYS", "LINK_KEYS", "device_of", "link_of"]

#: Keys of a device, by the field of `Device` that each sets.
_DEVICE: Final[dict[str, tuple[str, Callable[[object], Any]]]] = {
    "memory": ("memory_bytes", parse_memory),
    "kind": ("kind", parse_text),
    "flops": ("flops", parse_peaks),
    "memory_bandwidth": ("memory_bytes_per_s", parse_bandwidth),
    "launch": ("launch_s", parse_latency),
    "on_chip": ("on_chip_bytes", parse_memory),
    "together": ("together", parse_number),
    "source": ("source", parse_text),
}
DEVICE_KEYS: Final = (*_DEVICE, "dsp", "clock")

_LINK: Final[dict[str, tuple[str, Callable[[object], Any]]]] = {
    "latency": ("latency_s", parse_latency),
    "bandwidth": ("bandwidth_bytes_per_s", parse_bandwidth),
    "shared": ("shared", parse_flag),
    "source": ("source", parse_text),
}
LINK_KEYS: Final = tuple(_LINK)

#: DSP slices that a multiply and an add take together: one in 16 bits; five in float32, three to
#: multiply and two to add.
_SLICES: Final = {"float16": 1, "float32": 5}


def device_of(fields: Fields, name: str, base: Device | None) -> Device:
    """The device of an entry.

    Raises:
        ClusterError: the memory is missing and there is no base, or a value is refused; the message
        begins with the place.
    """
    found = {
        field: fields.read(key, parse) for key, (field, parse) in _DEVICE.items() if key in fields
    }
    if "dsp" in fields or "clock" in fields:
        if "flops" in found:
            raise ClusterError(
                f"{fields.where}: both 'flops' and 'dsp' are there: give the peaks, or the slices and their clock"
            )
        found["flops"] = _peaks_of_slices(
            fields.read("dsp", parse_count), fields.read("clock", parse_clock)
        )
    if base is None and "memory_bytes" not in found:
        raise ClusterError(
            f"{fields.where}: the key 'memory' is missing: {name!r} with {' and '.join(map(repr, fields.values))} is a device "
            "of your own; or take a preset's figures and change some, with 'like'"
        )
    try:
        return Device(name, **found) if base is None else replace(base, name=name, **found)
    except ClusterError as error:
        raise ClusterError(f"{fields.where}: {error}") from error


def _peaks_of_slices(dsp: int, clock: float) -> tuple[tuple[str, float], ...]:
    """What an FPGA computes at most with so many DSP slices: each makes one multiply-add of 16 bits
    in a cycle.

    Source: Zhang et al., FPGA 2015, for the five slices of a multiply-add in float32.
    """
    return tuple((dtype, 2.0 * dsp * clock / slices) for dtype, slices in _SLICES.items())


def link_of(fields: Fields, base: Link | None) -> Link:
    """The link of an entry.

    Raises:
        ClusterError: latency or bandwidth is missing and there is no base, or a value is refused;
        the message begins with the place.
    """
    needed = ("latency", "bandwidth") if base is None else ()
    found = {
        field: fields.read(key, parse)
        for key, (field, parse) in _LINK.items()
        if key in fields or key in needed
    }
    try:
        return Link(**found) if base is None else replace(base, **found)
    except ClusterError as error:
        raise ClusterError(f"{fields.where}: {error}") from error
