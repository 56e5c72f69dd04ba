"""Build one device or one link from its entry; missing figures are taken from a base."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.device import Device, Link
from penstock.errors import ClusterError

if TYPE_CHECKING:
    from penstock.cluster.description import DeviceFigures, LinkFigures

__all__ = ["DEVICE_KEYS", "build_device", "build_link", "has_figures"]

#: The field of `Device` that each key of an entry sets.
_DEVICE_FIELDS: Final = {
    "memory": "memory_bytes",
    "kind": "kind",
    "flops": "flops",
    "memory_bandwidth": "memory_bytes_per_s",
    "launch": "launch_s",
    "on_chip": "on_chip_bytes",
    "together": "together",
    "source": "source",
}
DEVICE_KEYS: Final = (*_DEVICE_FIELDS, "dsp", "clock")

_LINK_FIELDS: Final = {
    "latency": "latency_s",
    "bandwidth": "bandwidth_bytes_per_s",
    "shared": "shared",
    "cpu_per_byte": "cpu_s_per_byte",
    "cpu_per_message": "cpu_s_per_message",
    "busy_per_byte": "busy_s_per_byte",
    "source": "source",
}

#: DSP slices that one multiply-add occupies: one in 16 bits; five in float32, three to multiply and
#: two to add.
_SLICES: Final = {"float16": 1, "float32": 5}


def has_figures(entry: DeviceFigures) -> bool:
    """Return whether an entry has any figure, so that it is more than a preset's name."""
    return any(getattr(entry, key) is not None for key in DEVICE_KEYS)


def build_device(entry: DeviceFigures, name: str, base: Device | None, where: str) -> Device:
    """Return the device of an entry.

    Args:
        entry: the figures.
        name: of the device.
        base: the device from which missing figures are taken; None if there is none.
        where: place of the entry, with which every message begins.

    Raises:
        ClusterError: the memory is missing and there is no base, or a figure is out of range.
    """
    values = _set_values(entry, _DEVICE_FIELDS)
    if entry.dsp is not None and entry.clock is not None:
        values["flops"] = _fpga_peaks(entry.dsp, entry.clock)
    if base is None and "memory_bytes" not in values:
        keys = [key for key in DEVICE_KEYS if getattr(entry, key) is not None]
        raise ClusterError(
            f"{where}: the key 'memory' is missing: {name!r} with {' and '.join(map(repr, keys))} "
            "is a device of your own; or take a preset's figures and change some, with 'like'"
        )
    try:
        return Device(name, **values) if base is None else replace(base, name=name, **values)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def build_link(entry: LinkFigures, base: Link | None, where: str) -> Link:
    """Return the link of an entry.

    Args:
        entry: the figures.
        base: the link from which missing figures are taken; None if the entry has latency and
            bandwidth.
        where: place of the entry, with which every message begins.

    Raises:
        ClusterError: a figure is out of range.
    """
    values = _set_values(entry, _LINK_FIELDS)
    try:
        return Link(**values) if base is None else replace(base, **values)
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from error


def _set_values(entry: object, field_names: dict[str, str]) -> dict[str, Any]:
    """Return the figures that an entry has, by the fields that they set."""
    values = {field: getattr(entry, key) for key, field in field_names.items()}
    return {field: value for field, value in values.items() if value is not None}


def _fpga_peaks(dsp: int, clock: float) -> tuple[tuple[str, float], ...]:
    """Return an FPGA's peak FLOP/s by dtype: a DSP slice does one 16-bit multiply-add per cycle.

    Args:
        dsp: number of DSP slices.
        clock: cycles per second.

    Source: Zhang et al., FPGA 2015, for the five slices of a multiply-add in float32.
    """
    return tuple((dtype, 2.0 * dsp * clock / slices) for dtype, slices in _SLICES.items())
