"""Read one device or one link of a description, key by key; missing keys are taken from a base."""

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

__all__ = ["DEVICE_KEYS", "LINK_KEYS", "read_device", "read_link"]

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

#: DSP slices that one multiply-add occupies: one in 16 bits; five in float32, three to multiply and
#: two to add.
_SLICES: Final = {"float16": 1, "float32": 5}


def read_device(fields: Fields, name: str, base: Device | None) -> Device:
    """Return the device of an entry.

    Args:
        fields: the entry.
        name: of the device.
        base: the device from which missing keys are taken; None if there is none.

    Raises:
        ClusterError: the memory is missing and there is no base, or a value is invalid; the message
            begins with the place.
    """
    values = {
        field: fields.read(key, parse) for key, (field, parse) in _DEVICE.items() if key in fields
    }
    if "dsp" in fields or "clock" in fields:
        if "flops" in values:
            raise ClusterError(
                f"{fields.where}: both 'flops' and 'dsp' are set: give the peaks, or the slices "
                "and their clock"
            )
        values["flops"] = _fpga_peaks(
            fields.read("dsp", parse_count), fields.read("clock", parse_clock)
        )
    if base is None and "memory_bytes" not in values:
        keys = " and ".join(map(repr, fields.values))
        raise ClusterError(
            f"{fields.where}: the key 'memory' is missing: {name!r} with {keys} is a device of "
            "your own; or take a preset's figures and change some, with 'like'"
        )
    try:
        return Device(name, **values) if base is None else replace(base, name=name, **values)
    except ClusterError as error:
        raise ClusterError(f"{fields.where}: {error}") from error


def _fpga_peaks(dsp: int, clock: float) -> tuple[tuple[str, float], ...]:
    """Return an FPGA's peak FLOP/s by dtype: a DSP slice does one 16-bit multiply-add per cycle.

    Args:
        dsp: number of DSP slices.
        clock: cycles per second.

    Source: Zhang et al., FPGA 2015, for the five slices of a multiply-add in float32.
    """
    return tuple((dtype, 2.0 * dsp * clock / slices) for dtype, slices in _SLICES.items())


def read_link(fields: Fields, base: Link | None) -> Link:
    """Return the link of an entry.

    Args:
        fields: the entry.
        base: the link from which missing keys are taken; None if there is none.

    Raises:
        ClusterError: latency or bandwidth is missing and there is no base, or a value is invalid;
            the message begins with the place.
    """
    required = ("latency", "bandwidth") if base is None else ()
    values = {
        field: fields.read(key, parse)
        for key, (field, parse) in _LINK.items()
        if key in fields or key in required
    }
    try:
        return Link(**values) if base is None else replace(base, **values)
    except ClusterError as error:
        raise ClusterError(f"{fields.where}: {error}") from error
