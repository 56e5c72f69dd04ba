"""Values of flags: numbers with units, costs, and values that are given by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import FileError, SettingError
from penstock.files.text import shorten
from penstock.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from penstock.simulate.costs import Costs

#: Flags of costs whose names differ from the fields of `Costs`: --recompute is the policy.
_FIELD_OF_FLAG = {"recompute_seconds": "recompute"}


def numbers(
    flag: str, text: str | None, parse: Callable[[str], float] = parse_seconds
) -> float | list[float] | None:
    """Parse one value, or several separated by commas: `1`, `2ms` or `1,2,3`.

    Args:
        flag: for the error message.
        text: what the flag was set to, if it was.
        parse: reads one value; seconds by default.

    Raises:
        SettingError: a value cannot be parsed.
    """
    if text is None:
        return None
    try:
        values = [parse(word) for word in text.split(",")]
    except SettingError as error:
        raise SettingError(f"--{flag} {text}: {error}") from error
    return values[0] if len(values) == 1 else values


def parse_costs(flags: Mapping[str, str | None], links: str) -> Costs:
    """Make `Costs` of flags, named as its fields but for those of `_FIELD_OF_FLAG`.

    Fields that end in `_bytes` are in bytes, `bandwidth` in bytes per second, all others in
    seconds.

    Raises:
        SettingError: a text cannot be parsed, or the flags contradict each other.
    """
    from penstock.simulate.costs import Costs

    fields: dict[str, Any] = {}
    for name, text in flags.items():
        parse: Callable[[str], float] = parse_seconds
        if name.endswith("_bytes"):
            parse = parse_bytes
        elif name == "bandwidth":
            parse = _parse_bandwidth
        if text is not None:
            field = _FIELD_OF_FLAG.get(name, name)
            fields[field] = numbers(name.replace("_", "-"), text, parse)
    return Costs(**fields, links=links)


def _parse_bandwidth(word: str) -> float:
    """Parse bytes per second: `10GB` or `10GB/s`."""
    return parse_bytes(word.strip().removesuffix("/s"))


def named_values(flag: str, texts: list[str] | None) -> dict[str, Any]:
    """Parse `["layers=6"]` to `{"layers": 6}`; values are read as YAML.

    Raises:
        SettingError: a text has no name or no value, or a value is not YAML.
    """
    from penstock.files.yaml_values import yaml_value

    values: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SettingError(f"--{flag} {text}: write name=value, such as layers=6")
        key = name.strip().replace("-", "_")
        if key in values:
            raise SettingError(f"--{flag} {key} is given twice: leave one of them out")
        try:
            values[key] = yaml_value(value, f"--{flag} {shorten(text)}")
        except FileError as error:
            raise SettingError(str(error)) from error
    return values


def named_numbers(flag: str, texts: list[str] | None) -> dict[str, float]:
    """Parse `["decay=0.2"]` to `{"decay": 0.2}`.

    Raises:
        SettingError: a text has no name, or its value is no number.
    """
    values = named_values(flag, texts)
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingError(f"--{flag} {name}={value}: write a number, such as {name}=0.5")
    return {name: float(value) for name, value in values.items()}
