"""Parse and format seconds and bytes, and write counts and lists of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from penstock.errors import SettingError

#: Bytes and seconds at most, 1 EiB and 31 years. Sums of larger ones overflow, and all are errors.
MAX_BYTES, MAX_SECONDS = 2**60, 1e9

_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
#: Units in which numbers are written, the largest first.
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

_QUANTITY = re.compile(
    r"\s*((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*)\s*"
)


def _parse(
    text: str | float, units: dict[str, float] | dict[str, int], default: str, largest: float
) -> float:
    """Parse a quantity and convert it to the base unit.

    Args:
        text: number with an optional unit in any case, or a number.
        units: factor to the base unit by unit.
        default: unit of a text without one.
        largest: largest value that is accepted, in the base unit.

    Raises:
        SettingError: the text is no quantity, or negative, or not finite, or too large.
    """
    value = math.nan
    if not isinstance(text, str):
        value = float(text)
    elif match := _QUANTITY.fullmatch(text):
        factors = {unit.lower(): factor for unit, factor in units.items()}
        unit = (match[2] or default).lower()
        value = float(match[1]) * factors.get(unit, math.nan)
    if not 0 <= value < math.inf:
        raise SettingError(
            f"{text!r} is not a quantity in {', '.join(units)}; write for example '80 {default}'"
        )
    if value > largest:
        raise SettingError(f"{text!r} is too large: at most {largest:.4g} {default}")
    return value


def parse_bytes(text: str | float) -> int:
    """Parse bytes: `"80 GiB"`, `"16 GB"`, `"512"` or a number.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    return round(_parse(text, _BYTES, "B", MAX_BYTES))


def parse_seconds(text: str | float) -> float:
    """Parse seconds: `"3 ms"`, `"2 min"`, `"0.5"` or a number.

    >>> parse_seconds("250 ms")
    0.25
    """
    return _parse(text, _SECONDS, "s", MAX_SECONDS)


def format_bytes(count: float) -> str:
    """Write bytes with a binary unit: `1536` as `1.5 KiB`.

    >>> format_bytes(3 * 2**30), format_bytes(12)
    ('3.0 GiB', '12 B')
    """
    for unit, size in BYTE_UNITS:
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_count(count: float, noun: str, plural: str = "") -> str:
    """Write a number of things: the noun has an s for all numbers but 1, or is `plural`.

    >>> format_count(1, "rank"), format_count(2, "rank"), format_count(2, "process", "processes")
    ('1 rank', '2 ranks', '2 processes')
    """
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun if count == 1 else plural or f'{noun}s'}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Write a list of ranks.

    >>> format_ranks([3]), format_ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    numbers = [str(rank) for rank in ranks]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(numbers)}"


def format_seconds(seconds: float) -> str:
    """Write seconds with a unit: `0.0123` as `12.3 ms`.

    >>> format_seconds(0.0123), format_seconds(75), format_seconds(0)
    ('12.3 ms', '75.0 s', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, length in TIME_UNITS:
        if abs(seconds) >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 1e-9:.1f} ns"
