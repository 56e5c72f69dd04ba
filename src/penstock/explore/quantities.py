"""Lists of seconds and bytes as the texts of input fields, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.errors import SettingError
from penstock.units import BYTE_UNITS, TIME_UNITS, parse_bytes, parse_seconds

#: Largest seconds and bytes that a field accepts: 30 years, and 2**53 bytes. With more, sums over
#: a timeline lose the digits of single ops.
MAX_SECONDS, MAX_BYTES = 1e9, 2**53


def parse_list(text: str, parse: Callable[[str], float], largest: float) -> tuple[float, ...]:
    """Parse one value, or several separated by commas.

    >>> parse_list("1, 2ms", parse_seconds, MAX_SECONDS)
    (1.0, 0.002)

    Args:
        text: the values.
        parse: reads one value.
        largest: the largest value allowed.

    Raises:
        SettingError: a value cannot be parsed, or is too large.
    """
    values = tuple(parse(word) for word in text.split(","))
    if max(values) > largest:
        raise SettingError(f"{max(values):g} is too large: at most {largest:g}")
    return values


def seconds_text(seconds: float) -> str:
    """Write seconds so that `parse_seconds` reads the same number back.

    >>> seconds_text(0.25), seconds_text(2), seconds_text(1e-3)
    ('250ms', '2', '1ms')
    """
    plain = repr(float(seconds)).removesuffix(".0")
    for unit, factor in TIME_UNITS[1:]:  # seconds from 1 on have no unit
        if factor <= seconds < 1000 * factor and seconds < 1:
            short = f"{seconds / factor:.12g}{unit}"
            return short if parse_seconds(short) == seconds else plain
    return plain


def bytes_text(count: float) -> str:
    """Write a whole number of bytes so that `parse_bytes` reads the same number back.

    >>> bytes_text(1536), bytes_text(2**20), bytes_text(7)
    ('1.5KiB', '1MiB', '7')
    """
    return _text_with_unit(count, BYTE_UNITS)


def bandwidth_text(count: float) -> str:
    """Write bytes per second so that `parse_bandwidth` reads the same number back.

    >>> bandwidth_text(12.5e9), bandwidth_text(125e6)
    ('12.5GB', '125MB')
    """
    return _text_with_unit(count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)))


def _text_with_unit(count: float, units: Iterable[tuple[str, float]]) -> str:
    """Write a count in the largest unit that it reaches, or without a unit if digits were lost."""
    for unit, factor in units:
        if count >= factor:
            # Six digits, which may be too few.
            short = f"{count / factor:g}{unit}"
            return short if parse_bytes(short) == count else f"{count:.0f}"
    return f"{count:.0f}"


def parse_bandwidth(word: str) -> int:
    """Parse bytes per second: `10GB` or `10GB/s`.

    Raises:
        SettingError: it is no number of bytes, or 0.
    """
    value = parse_bytes(word.strip().removesuffix("/s"))
    if value == 0:
        raise SettingError("a link of 0 bytes per second never delivers: write for example 10GB")
    return value


def list_text(values: Sequence[float], text_of: Callable[[float], str]) -> str:
    """Write values separated by commas."""
    return ",".join(map(text_of, values))


def spread_over_stages(
    values: Sequence[float], ranks: int, stages: int, name: str
) -> tuple[float, ...]:
    """Return the amount of every stage, for values that describe equal parts of the model.

    One value holds for every rank's part of the model. Several values cut the model into as many
    parts. A stage takes its share of each part that it covers, so that the sum over the model does
    not depend on the number of stages.

    >>> spread_over_stages([2.0], ranks=2, stages=4, name="forward")
    (1.0, 1.0, 1.0, 1.0)
    >>> spread_over_stages([1.0, 1.0, 3.0, 5.0], ranks=2, stages=2, name="forward")
    (2.0, 8.0)

    Args:
        values: one for all ranks, or one per part of the model.
        ranks: ranks of one pipeline.
        stages: stages of its schedule, a multiple of the ranks or equal to them.
        name: of the field, for the message.

    Raises:
        SettingError: the number of values is neither 1 nor a multiple of the ranks.
    """
    count = len(values)
    if count == 1:
        return (values[0] * ranks / stages,) * stages
    if count % ranks:
        raise SettingError(
            f"{name} has {count} values for {ranks} ranks: give one value for all ranks, or one "
            "per rank"
        )
    if count == stages:
        return tuple(values)
    if count < stages and stages % count == 0:
        pieces = stages // count
        return tuple(value / pieces for value in values for _ in range(pieces))
    return tuple(_integral(values, stage, stages) for stage in range(stages))


def _integral(values: Sequence[float], stage: int, stages: int) -> float:
    """Return the amount that a stage covers of a model cut into equal parts."""
    count = len(values)
    # In units of 1 / (stages x count) of the model, so that all edges are integers.
    start, end = stage * count, (stage + 1) * count
    total = 0.0
    for part in range(start // stages, -(-end // stages)):
        covered = min(end, (part + 1) * stages) - max(start, part * stages)
        total += values[part] * covered / stages
    return total


def spread_over_boundaries(
    values: Sequence[float], ranks: int, stages: int, name: str
) -> tuple[float, ...]:
    """Return the bytes of every boundary between stages.

    One value holds for all boundaries. Otherwise there is one per boundary between ranks, or
    between stages; a boundary within the part of a rank takes the value of the next one between
    ranks, and behind the last of these its value.

    Raises:
        SettingError: the number of values does not fit.
    """
    count = len(values)
    if count == 1 or stages == 1:
        return (values[0],) * (stages - 1)
    if count == stages - 1:
        return tuple(values)
    if count != ranks - 1:
        raise SettingError(
            f"{name} has {count} values for {ranks} ranks: give one value for all boundaries, or "
            f"{ranks - 1}, one per boundary between ranks"
        )
    pieces = stages // ranks
    return tuple(values[min(index // pieces, count - 1)] for index in range(stages - 1))
