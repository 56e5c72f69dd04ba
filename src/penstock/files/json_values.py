"""Parse JSON strictly: no duplicate key, no number beyond what a field can hold."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from penstock.errors import FileError
from penstock.files.text import NUL_PROBLEM, check_characters, quote, shorten

#: Values of a text at most. A profile of 10,000 layers has 400,000; a million take 100 MB.
MAX_VALUES = 1_000_000
#: Integers lie below this in absolute value, since no size, count or seed has more bits.
MAX_INTEGER = 2**64
#: JSON's escape of the character NUL, after an even number of backslashes.
_NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def json_value(text: str, source: str, *, finite: bool = True, max_values: int = MAX_VALUES) -> Any:
    """Parse a JSON text into plain values.

    Args:
        text: the JSON.
        source: its place, with which every message begins.
        finite: whether to refuse NaN and infinities.
        max_values: a text with more values is refused before it is parsed.

    Raises:
        FileError: the text is not JSON, has a duplicate key, more than `max_values` values, too
            many levels, or a number that is not finite or has more than 64 bits.
    """
    if not text.strip():
        raise FileError(f"{source} is not JSON: it is empty")
    # Counted before parsing, which would take the memory. Commas within texts count as well.
    count = text.count(",") + text.count("[") + text.count("{")
    if count > max_values:
        raise FileError(f"{source} has {count:,} values, more than the {max_values:,} allowed")
    parse_float = finite_number if finite else float
    try:
        check_characters(text)
        if "u0000" in text and _NUL_ESCAPE.search(text):
            raise ValueError(NUL_PROBLEM)  # noqa: TRY301 - as of every other character
        return json.loads(
            text,
            object_pairs_hook=_mapping,
            parse_float=parse_float,
            parse_constant=parse_float,
            parse_int=bounded_integer,
        )
    except RecursionError as error:
        raise FileError(f"{source} is not JSON: it has too many levels of nesting") from error
    except ValueError as error:
        raise FileError(f"{source} is not JSON: {shorten(str(error), 200)}") from error


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dictionary of pairs with different keys.

    Raises:
        ValueError: a key occurs twice.
    """
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"duplicate key {quote(duplicate)}: remove one of them")
    return mapping


def finite_number(text: str) -> float:
    """Parse a finite number. Python's parser also accepts NaN, Infinity and 1e999.

    Raises:
        ValueError: the number is not finite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shorten(text)} is not a finite number")
    return number


def bounded_integer(text: str) -> int:
    """Parse an integer of at most 64 bits.

    Raises:
        ValueError: it has more bits.
    """
    # Python needs seconds for an integer of a million digits, and has its own limit of 4,300.
    if len(text) <= len(str(MAX_INTEGER)) + 1 and abs(number := int(text)) < MAX_INTEGER:
        return number
    raise ValueError(f"{shorten(text)} is beyond the integers of 64 bits")
