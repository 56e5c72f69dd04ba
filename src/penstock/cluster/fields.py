"""What a cluster file may say: quantities with their units, and mappings of known keys only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.cluster.device import DTYPES
from penstock.errors import ClusterError, SettingError, UnknownName
from penstock.units import parse_bytes, parse_seconds

T = TypeVar("T")

#: Devices that a description may ask for: a slip of the finger shall not fill the memory.
MOST = 65_536

#: What a link without a bandwidth of its own is written as.
UNLIMITED = "unlimited"

_PREFIX = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
           "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
# Networks are sold in bits and buses in bytes, so that one letter's case is a factor of 8: no unit
# is guessed.
_BANDWIDTH = re.compile(rf"\s*{_NUMBER}\s*([kKMGT]i?|)(bit|b|B)/s\s*")
_FLOPS = re.compile(rf"\s*{_NUMBER}\s*([kMGTP]?)(?:FLOP/s|FLOPS|FLOPs|OP/s)\s*")
_CLOCK = re.compile(rf"\s*{_NUMBER}\s*([kMG]?)Hz\s*")
_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
}


def parse_bandwidth(text: object) -> float:
    """Bytes per second from `"10 Gb/s"` or `"10 Gbit/s"` (bits), from `"1.25 GB/s"` (bytes), or
    `"unlimited"`.

    >>> parse_bandwidth("10 Gb/s"), parse_bandwidth("1.25 GB/s"), parse_bandwidth("1 MiB/s")
    (1250000000.0, 1250000000.0, 1048576.0)

    Raises:
        SettingError: it is not of that form. A bare number is refused too, since it does not say of
        what.
    """
    if text == UNLIMITED:
        return math.inf
    match = _BANDWIDTH.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SettingError(
            f"{text!r} is not a bandwidth; write for example '10 Gb/s' (bits) or '1.25 GB/s' (bytes)"
        )
    return float(match[1]) * _PREFIX[match[2]] / (1 if match[3] == "B" else 8)


def parse_flops(text: object) -> float:
    """FLOP per second from `"15.7 TFLOP/s"`.

    >>> parse_flops("15.7 TFLOP/s"), parse_flops("2 PFLOPS")
    (15700000000000.0, 2000000000000000.0)

    Raises:
        SettingError: it is not of that form.
    """
    match = _FLOPS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SettingError(f"{text!r} is not a rate of computing; write for example '15.7 TFLOP/s'")
    return float(match[1]) * _PREFIX[match[2]]


def parse_peaks(value: object) -> tuple[tuple[str, float], ...]:
    """Peaks by dtype from `{float32: 15.7 TFLOP/s, float16: 125 TFLOP/s}`; fp32, bf16 and such are
    understood.

    Raises:
        SettingError: it is not of that form, or a dtype is not known.
    """
    if not isinstance(value, dict) or not value:
        raise SettingError(
            f"{value!r} is no mapping of dtypes to rates; write for example {{float32: 15.7 TFLOP/s}}"
        )
    found = []
    for dtype, rate in value.items():
        name = _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if name not in DTYPES:
            raise SettingError(str(UnknownName("dtype", str(name), DTYPES)))
        try:
            found.append((name, parse_flops(rate)))
        except SettingError as error:
            raise SettingError(f"{dtype}: {error}") from error
    return tuple(found)


def parse_clock(text: object) -> float:
    """Cycles per second from `"200 MHz"`.

    Raises:
        SettingError: it is not of that form.
    """
    match = _CLOCK.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SettingError(f"{text!r} is not a clock; write for example '200 MHz'")
    return float(match[1]) * _PREFIX[match[2]]


def parse_memory(text: object) -> int:
    """Bytes from `"16 GB"`, `"16 GiB"` or a whole number.

    Raises:
        SettingError: it is not of that form, or ends in a small b: memory is not counted in bits.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise SettingError(f"{text!r} is not an amount of memory; write for example '16 GB'")
    if isinstance(text, str) and text.rstrip().endswith("b"):
        raise SettingError(f"{text!r} counts bits; memory is in bytes, for example '16 GB'")
    return parse_bytes(text)


def parse_latency(text: object) -> float:
    """Seconds from `"50 us"` or a number.

    Raises:
        SettingError: it is not of that form.
    """
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        raise SettingError(f"{text!r} is not a time; write for example '50 us'")
    return parse_seconds(text)


def parse_count(value: object) -> int:
    """A whole number from 1 to `MOST`.

    Raises:
        SettingError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise SettingError(f"{value!r} is not a whole number from 1 to {MOST}")
    return value


def parse_number(value: object) -> float:
    """A number that is finite and not below 0.

    Raises:
        SettingError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SettingError(f"{value!r} is not a number of 0 or more; write for example 1.5")
    return float(value)


def parse_flag(value: object) -> bool:
    """True or false.

    Raises:
        SettingError: it is neither.
    """
    if not isinstance(value, bool):
        raise SettingError(f"{value!r} is neither true nor false")
    return value


def parse_text(value: object) -> str:
    """A string that is not empty.

    Raises:
        SettingError: it is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise SettingError(f"{value!r} is not a text")
    return value


@dataclass(frozen=True)
class Fields:
    """A mapping from a file; `where` begins every message."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, found: object, where: str, known: tuple[str, ...]) -> Fields:
        """The mapping, once it has no key but the known ones.

        Raises:
            ClusterError: `found` is no mapping, or has an unknown key.
        """
        if not isinstance(found, dict):
            raise ClusterError(
                f"{where}: {found!r} is no mapping; its keys may be {', '.join(known)}"
            )
        unknown = [key for key in found if key not in known]
        if unknown:
            raise ClusterError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
        return cls(found, where)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def read(self, key: str, parse: Callable[[object], T], default: T | None = None) -> T:
        """The value of `key`, parsed; `default` if it is not there and there is one.

        Raises:
            ClusterError: it is missing, or `parse` refuses it.
        """
        if key not in self.values:
            if default is None:
                raise ClusterError(f"{self.where}: the key {key!r} is missing")
            return default
        try:
            return parse(self.values[key])
        except SettingError as error:
            raise ClusterError(f"{self.where}: {key}: {error}") from error
