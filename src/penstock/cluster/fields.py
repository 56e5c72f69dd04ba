"""Parse the values of a cluster file: quantities with their units, counts and texts."""

from __future__ import annotations

import math
import re

from penstock.cluster.device import DTYPES
from penstock.errors import SettingError, UnknownName
from penstock.files.text import quote
from penstock.units import parse_bytes, parse_seconds

#: Devices of a description at most, so that a typing error does not exhaust the memory.
MAX_DEVICES = 65_536

#: Rates lie between these: bytes, cycles and FLOP per second. Others are typing errors.
_MIN_RATE, _MAX_RATE = 1e-3, 1e24

#: Factors such as `together` at most.
_MAX_FACTOR = 1e6

#: Text of an infinite bandwidth.
UNLIMITED = "unlimited"

_PREFIX = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
           "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
# Network bandwidths are stated in bits and bus bandwidths in bytes, and the case of one letter is a
# factor of 8: so the unit is required.
_BANDWIDTH = re.compile(rf"\s*{_NUMBER}\s*([kKMGT]i?|)(bit|b|B)/s\s*")
_FLOPS = re.compile(rf"\s*{_NUMBER}\s*([kMGTP]?)(?:FLOP/s|FLOPS|FLOPs|OP/s)\s*")
_CLOCK = re.compile(rf"\s*{_NUMBER}\s*([kMG]?)Hz\s*")
_SHORT_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
}


def _match_rate(pattern: re.Pattern[str], text: object, form: str) -> re.Match[str]:
    """Return the match of a rate with its pattern.

    Raises:
        SettingError: it does not match, or is not text; the message tells the form.
    """
    match = pattern.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SettingError(f"{quote(text)} is not {form}")
    return match


def _checked_rate(rate: float, text: object) -> float:
    """Return a rate if a device can have it; 0 is refused where the device is built.

    Raises:
        SettingError: it cannot.
    """
    if rate and not _MIN_RATE <= rate <= _MAX_RATE:
        raise SettingError(
            f"{quote(text)} is no rate of any device; those are {_MIN_RATE:g} to {_MAX_RATE:g} per "
            "second"
        )
    return rate


def parse_bandwidth(text: object) -> float:
    """Return bytes per second from `"10 Gb/s"` or `"10 Gbit/s"` (bits), `"1.25 GB/s"` (bytes),
    or `"unlimited"`.

    >>> parse_bandwidth("10 Gb/s"), parse_bandwidth("1.25 GB/s"), parse_bandwidth("1 MiB/s")
    (1250000000.0, 1250000000.0, 1048576.0)

    Raises:
        SettingError: it is not of that form. A number without a unit is refused, as ambiguous.
    """
    if text == UNLIMITED:
        return math.inf
    form = "a bandwidth; write for example '10 Gb/s' (bits) or '1.25 GB/s' (bytes)"
    match = _match_rate(_BANDWIDTH, text, form)
    units_per_byte = 1 if match[3] == "B" else 8
    return _checked_rate(float(match[1]) * _PREFIX[match[2]] / units_per_byte, text)


def parse_flops(text: object) -> float:
    """Return FLOP per second from `"15.7 TFLOP/s"`.

    >>> parse_flops("15.7 TFLOP/s"), parse_flops("2 PFLOPS")
    (15700000000000.0, 2000000000000000.0)

    Raises:
        SettingError: it is not of that form.
    """
    match = _match_rate(_FLOPS, text, "a rate of computing; write for example '15.7 TFLOP/s'")
    return _checked_rate(float(match[1]) * _PREFIX[match[2]], text)


def parse_peaks(value: object) -> tuple[tuple[str, float], ...]:
    """Return peaks by dtype from `{float32: 15.7 TFLOP/s, float16: 125 TFLOP/s}`; short names such
    as fp32 and bf16 are accepted.

    Raises:
        SettingError: it is not of that form, or a dtype is not known.
    """
    if not isinstance(value, dict) or not value:
        raise SettingError(
            f"{quote(value)} is no mapping of dtypes to rates; write for example "
            "{float32: 15.7 TFLOP/s}"
        )
    peaks = []
    for dtype, rate in value.items():
        name = _SHORT_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if name not in DTYPES:
            raise SettingError(str(UnknownName("dtype", str(name), DTYPES)))
        try:
            peaks.append((name, parse_flops(rate)))
        except SettingError as error:
            raise SettingError(f"{dtype}: {error}") from error
    return tuple(peaks)


def parse_clock(text: object) -> float:
    """Return cycles per second from `"200 MHz"`.

    Raises:
        SettingError: it is not of that form.
    """
    match = _match_rate(_CLOCK, text, "a clock; write for example '200 MHz'")
    return _checked_rate(float(match[1]) * _PREFIX[match[2]], text)


def parse_memory(text: object) -> int:
    """Return bytes from `"16 GB"`, `"16 GiB"` or a whole number.

    Raises:
        SettingError: it is not of that form, or ends in a lower-case b: memory is not counted in
            bits.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise SettingError(f"{quote(text)} is not an amount of memory; write for example '16 GB'")
    if isinstance(text, str) and text.rstrip().endswith("b"):
        raise SettingError(f"{quote(text)} counts bits; memory is in bytes, for example '16 GB'")
    return parse_bytes(text)


def parse_latency(text: object) -> float:
    """Return seconds from `"50 us"` or a number.

    Raises:
        SettingError: it is not of that form.
    """
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise SettingError(f"{quote(text)} is not a time; write for example '50 us'")
    return parse_seconds(text)


def parse_count(value: object) -> int:
    """Return a whole number from 1 to `MAX_DEVICES`.

    Raises:
        SettingError: the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DEVICES:
        raise SettingError(f"{quote(value)} is not a whole number from 1 to {MAX_DEVICES}")
    return value


def parse_number(value: object) -> float:
    """Return a finite number of 0 or more.

    Raises:
        SettingError: the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SettingError(f"{quote(value)} is not a number of 0 or more; write for example 1.5")
    if value > _MAX_FACTOR:
        raise SettingError(f"{quote(value)} is more than {_MAX_FACTOR:g}")
    return float(value)


def parse_flag(value: object) -> bool:
    """Return true or false.

    Raises:
        SettingError: the value is neither.
    """
    if not isinstance(value, bool):
        raise SettingError(f"{quote(value)} is neither true nor false")
    return value


def parse_text(value: object) -> str:
    """Return a string that is not empty.

    Raises:
        SettingError: the value is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise SettingError(f"{quote(value)} is not a text")
    return value
