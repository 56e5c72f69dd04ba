"""Read YAML and JSON into a type, and refuse whatever does not fit it exactly."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import FileError
from penstock.files.json_values import json_value
from penstock.files.text import quote, read_text, shorten
from penstock.files.yaml_values import MAX_CHARACTERS, yaml_value

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

#: What pydantic calls a key that the type does not have.
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
#: A character of YAML has up to 4 bytes.
_MAX_YAML_BYTES = 4 * MAX_CHARACTERS


def read_yaml(path: str | Path, model: type[T], *, kind: str | None = None) -> T:
    """Read a YAML file as a value of a type.

    A file without any value, such as one of comments, is an empty mapping.

    Args:
        path: the file.
        model: a Pydantic model, a dataclass, or any type that Pydantic can validate. `dict` or
            `object` leaves the content as plain values.
        kind: what the file describes, for messages; by default the name of the type.

    Raises:
        FileError: the file cannot be read, is no strict YAML (see `yaml_values`), or has fields
            that are missing, unknown or of the wrong type. The message is one line with the file
            and the place in it.
    """
    kind = kind or kind_of(model)
    return parse_yaml(read_text(path, kind, _MAX_YAML_BYTES), model, str(path), kind=kind)


def parse_yaml(text: str, model: type[T], source: str, *, kind: str | None = None) -> T:
    """Parse a YAML text as `read_yaml` does a file.

    Args:
        text: the YAML.
        model, kind: see `read_yaml`.
        source: place of the text, with which every message begins.

    Raises:
        FileError: see `read_yaml`.
    """
    content = yaml_value(text, source)
    value = {} if content is None else content
    return validate(json.dumps(value), model, source, kind=kind)


def read_json(
    path: str | Path,
    model: type[T],
    schema: int | Collection[int] | None = None,
    *,
    kind: str | None = None,
) -> T:
    """Read a JSON file as a value of a type.

    Args:
        path: the file.
        model, kind: see `read_yaml`.
        schema: supported version, or versions, of the format, which the file must have as its
            field `schema`; None if the format has none.

    Raises:
        FileError: the file cannot be read, is no strict JSON (see `json_values`), has another
            schema version, or has fields that are missing, unknown or of the wrong type.
    """
    kind = kind or kind_of(model)
    return parse_json(read_text(path, kind), model, str(path), schema, kind=kind)


def parse_json(
    text: str,
    model: type[T],
    source: str,
    schema: int | Collection[int] | None = None,
    *,
    kind: str | None = None,
    finite: bool = True,
) -> T:
    """Parse a JSON text as `read_json` does a file.

    Args:
        text: the JSON.
        model, schema, kind: see `read_json`.
        source: place of the text, with which every message begins.
        finite: whether to refuse NaN and infinities.

    Raises:
        FileError: see `read_json`.
    """
    content = json_value(text, source, finite=finite)
    if schema is not None:
        _check_schema(content, source, schema, kind or kind_of(model))
    return validate(text, model, source, kind=kind)


def _check_schema(content: Any, source: str, schema: int | Collection[int], kind: str) -> None:
    """Refuse a content whose field `schema` is not a supported version.

    Raises:
        FileError: it is not.
    """
    version = content.get("schema") if isinstance(content, dict) else None
    supported = (schema,) if isinstance(schema, int) else schema
    # True == 1 and 1.0 == 1 in Python, but neither is a version.
    if type(version) is not int or version not in supported:
        raise FileError(
            f"{source} is no {kind} of schema {' or '.join(map(str, supported))}: "
            f"its schema is {quote(version)}. Create it again with this version of penstock"
        )


def validate(text: str, model: type[T], source: str, *, kind: str | None = None) -> T:
    """Convert a JSON text that is known to be sound to a type.

    It is validated as JSON, where a list stands for a tuple and 2 for 2.0, but no text for a
    number.

    Raises:
        FileError: fields are missing, unknown or of the wrong type.
    """
    from pydantic import ValidationError

    try:
        value: T = _adapter(cast("Any", model)).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise FileError(
            f"{source} is no {kind or kind_of(model)}: {_first_error(error, model)}"
        ) from error
    return value


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    """Return the validator of a type; building one takes milliseconds."""
    from pydantic import TypeAdapter  # imported late: most uses never touch a file

    return TypeAdapter(model)


def kind_of(model: type) -> str:
    """Return the name of a type for messages."""
    return model.__name__.lower()


def _first_error(error: ValidationError, model: type) -> str:
    """Return where an error is, what was expected, what stands there, and how many others there are.

    A misspelt key is also a missing one: the unknown key explains more.
    """
    errors = error.errors()
    first = next((entry for entry in errors if entry["type"] in _UNKNOWN_KEY), errors[0])
    location = shorten(".".join(map(str, first["loc"])) or "the top")
    text = f"at {location}: {shorten(first['msg'].removeprefix('Value error, '), 300)}"
    if first["type"] in _UNKNOWN_KEY:
        text = f"at {location}: unknown key{_known_keys(first['loc'], model)}"
    elif first["type"] not in ("missing", "value_error", "json_invalid"):
        text += f", not {quote(first['input'])}"
    more = len(errors) - 1
    return text + (f" (and {more} more error{'s'[: more > 1]})" if more else "")


def _known_keys(location: tuple[int | str, ...], model: type) -> str:
    """Return the known keys, if the unknown one is of the type itself."""
    names: list[str] = list(getattr(model, "model_fields", ()))
    if is_dataclass(model):
        names = [field.name for field in fields(model)]
    if len(location) != 1 or not names:
        return "; remove it"
    close_matches = difflib.get_close_matches(str(location[0])[:100], names, n=1)
    hint = f". Did you mean {close_matches[0]!r}?" if close_matches else "; remove it."
    return f"{hint} Known: {', '.join(names)}"
