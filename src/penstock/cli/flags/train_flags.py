"""Derive the flags of `penstock train` from the fields of `TrainConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from penstock.cli.flags.flag_values import named_numbers, named_values
from penstock.option import default_of, options_of
from penstock.training.config import TrainConfig


def with_flags(command: Callable[..., None]) -> None:
    """Replace `**flags`, the last parameter of a command, by a flag for every field.

    Typer reads the flags of a command from its signature.
    """
    signature = inspect.signature(command, eval_str=True)
    config, *others, _ = signature.parameters.values()
    flags = [_flag(entry.name, facts.help, default_of(entry)) for entry, facts in _OPTIONS]
    vars(command)["__signature__"] = signature.replace(parameters=[config, *flags, *others])


def settings_of_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that flags set, by the names of the fields.

    Raises:
        SettingError: a text `name=value` cannot be parsed.
    """
    return {name: _value(name, value) for name, value in flags.items() if value not in (None, [])}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or a single type."""
    is_single = isinstance(hint, type) or get_origin(hint) in (dict, Literal)
    return (hint,) if is_single else get_args(hint)


#: The fields with their facts, and the types that each accepts, without None.
_OPTIONS = tuple(options_of(TrainConfig))
_TYPES = {
    name: [kind for kind in _alternatives(hint) if kind is not NoneType]
    for name, hint in get_type_hints(TrainConfig).items()
}


def _flag(name: str, text: str, default: Any) -> inspect.Parameter:
    """Return the parameter of a flag, which is None unless the flag is set.

    Args:
        name: of the field.
        text: for `--help`.
        default: of the field; a boolean flag that is on by default gets a negative form.
    """
    kinds, flag = _TYPES[name], name.replace("_", "-")
    kind: Any = str
    metavar = None
    if bool in kinds:
        kind = bool
        flag = f"{flag}/--no-{flag}" if default else flag
    elif _is_mapping(name):
        kind, flag, metavar = list[str], _singular(name), "NAME=VALUE"
    elif len(kinds) == 1 and kinds[0] in (int, float):
        kind = kinds[0]
    annotation = Annotated[kind | None, typer.Option(f"--{flag}", metavar=metavar, help=text)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)


def _value(name: str, value: Any) -> Any:
    """Return the value of a field from that of its flag."""
    if _is_mapping(name):
        parse = named_numbers if dict[str, float] in _TYPES[name] else named_values
        return parse(_singular(name), value)
    # A field such as `stages` takes a number or a word; its flag takes any text.
    if isinstance(value, str) and int in _TYPES[name] and value.isdecimal():
        return int(value)
    return value


def _is_mapping(name: str) -> bool:
    """Whether the flag of a field is a repeatable name=value."""
    return all(get_origin(kind) is dict for kind in _TYPES[name])


def _singular(name: str) -> str:
    """Return the flag of a mapping: `model-option` for the field model_options."""
    return name.removesuffix("s").replace("_", "-")
