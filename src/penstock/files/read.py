"""Read YAML and JSON into a type, and refuse whatever does not fit it exactly."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from penstock.errors import FileError, did_you_mean
from penstock.files.json_values import json_value
from penstock.files.text import quote, read_text, shorten
from penstock.files.yaml_values import MAX_CHARACTERS, yaml_value
from penstock.units import format_count

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

#: What pydantic calls a key that the type does not have.
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
#: What pydantic calls a value that is no mapping where the type has fields.
_NO_MAPPING = ("dataclass_type", "model_type")
#: A character of YAML has up to 4 bytes.
_MAX_YAML_BYTES = 4 * MAX_CHARACTERS


def read_yaml(path: str | Path, model: type[T], *, kind: str | None = None) -> T:
    """Read a YAML file as a value of a type.

    A file of comments is an empty mapping. One without any text is refused: it was cut off.

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
    text = read_text(path, kind, _MAX_YAML_BYTES)
    if not text.strip():
        raise FileError(f"{path} is no {kind}: it is empty")
    return parse_yaml(text, model, str(path), kind=kind)


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


#: By a key that only files of one kind have, the kind.
_KINDS_BY_KEY = {"programs": "plan", "layers": "profile"}


def _kind_by_keys(content: Any) -> str | None:
    """Return whether a content is a plan or a profile, by its keys; None for other kinds."""
    keys = content if isinstance(content, dict) else {}
    return next((kind for key, kind in _KINDS_BY_KEY.items() if key in keys), None)


def _check_schema(content: Any, source: str, schema: int | Collection[int], kind: str) -> None:
    """Refuse a content whose field `schema` is not a supported version.

    Raises:
        FileError: it is not.
    """
    version = content.get("schema") if isinstance(content, dict) else None
    supported = (schema,) if isinstance(schema, int) else schema
    # True == 1 and 1.0 == 1 in Python, but neither is a version.
    if type(version) is not int or version not in supported:
        actual_kind = _kind_by_keys(content)
        if actual_kind not in (None, kind) and kind in _KINDS_BY_KEY.values():
            raise FileError(f"{source} is a {actual_kind}, not a {kind}")
        description = (
            "missing, so it is another kind of file" if version is None else quote(version)
        )
        raise FileError(
            f"{source} is no {kind} of schema {' or '.join(map(str, supported))}: "
            f"its schema is {description}. Create it again with this version of penstock"
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
    """Return where an error is, what was expected, what stands there, and how many others there
    are.

    A misspelt key is also a missing one: the unknown key explains more.
    """
    errors = error.errors()
    # An unknown key first: a misspelt key is the cause of one that is missing.
    first = next((entry for entry in errors if entry["type"] in _UNKNOWN_KEY), errors[0])
    location = shorten(".".join(map(str, first["loc"])) or "the top")
    text = f"at {location}: {shorten(first['msg'].removeprefix('Value error, '), 300)}"
    if first["type"] in _UNKNOWN_KEY:
        keys = known_keys(model, first["loc"][:-1])
        text = f"at {location}: unknown key{_hint(str(first['loc'][-1]), keys)}"
    elif first["type"] == "missing":
        text = f"at {location}: the key is missing"
    elif first["type"] in _NO_MAPPING:
        keys = known_keys(model, first["loc"])
        text = f"at {location}: {quote(first['input'])} is no mapping"
        text += f" with keys of {', '.join(keys)}" if keys else ""
    elif first["type"] not in ("value_error", "json_invalid"):
        text += f", not {quote(first['input'])}"
    more = len(errors) - 1
    return text + (f" (and {format_count(more, 'more error')})" if more else "")


def _hint(key: str, keys: Sequence[str]) -> str:
    """Return what to do about an unknown key where `keys` are known."""
    if not keys:
        return "; remove it"
    hint = did_you_mean(key, keys)
    return f"{'.' if hint else '; remove it.'}{hint} Known: {', '.join(keys)}"


def known_keys(model: Any, location: Sequence[int | str]) -> tuple[str, ...]:
    """Return the keys that a mapping at a place in a type may have.

    Args:
        model: the type of the whole content.
        location: keys and indices that lead to the mapping.

    Returns:
        The keys; none if there may be any, or if the place has one of several types.
    """
    for step in location:
        model = _type_of_item(model, step)
    model = _without_none(model)
    if is_dataclass(model):
        return tuple(entry.name for entry in fields(model))
    return tuple(getattr(model, "model_fields", ()))


def _type_of_item(model: Any, step: int | str) -> Any:
    """Return the type of a field, an item or a value of a type; None if it is not known."""
    model = _without_none(model)
    if is_dataclass(model):
        return get_type_hints(model).get(str(step))
    items = get_args(model)
    if get_origin(model) is list:
        return items[0]
    if get_origin(model) is dict:
        return items[1]
    if get_origin(model) is tuple and isinstance(step, int):
        return items[0] if items[-1] is Ellipsis else items[min(step, len(items) - 1)]
    return None


def _without_none(model: Any) -> Any:
    """Return X for the types `X | None` and `Annotated[X, ...]`, otherwise the type itself."""
    if hasattr(model, "__metadata__"):
        return _without_none(get_args(model)[0])
    choices = [choice for choice in get_args(model) if choice is not type(None)]
    is_optional = len(choices) == 1 and type(None) in get_args(model)
    return _without_none(choices[0]) if is_optional else model
