"""Messages about wrong words on the command line: one line each, which quotes the wrong value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from penstock.files.text import quote, shorten

#: Class of the errors about the words of a command. Typer exports only classes derived from it,
#: and has its own copy of click in some versions.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

#: What the value of a flag must be, by a word that the message of typer has in all its versions.
_EXPECTED = {"integer": "a whole number", "float": "a number", "number": "a number"}


def usage_message(error: Any, words: Sequence[str]) -> str:
    """Return the message of a usage error on one line, with the command whose help to read.

    Args:
        error: a `UsageError`.
        words: of the command line.
    """
    # `penstock plan`, whatever the name of the program that runs the command line.
    commands = _command_names(error.ctx) if error.ctx is not None else words[:1]
    command = " ".join(["penstock", *commands])
    message = _conversion_message(error, words) or shorten(error.format_message(), 300)
    return f"{message.rstrip('.?')}; see {command} --help"


def _command_names(context: Any) -> list[str]:
    """Return the names of the commands of a context, without that of the program."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    return names


def _conversion_message(error: Any, words: Sequence[str]) -> str | None:
    """Return the message for a value that is no number; None for other errors."""
    param = getattr(error, "param", None)
    expected = next((text for word, text in _EXPECTED.items() if word in str(error)), None)
    if type(error) is not typer.BadParameter or param is None or expected is None:
        return None
    for flag in param.opts:
        value = _value_of(flag, words)
        if value is not None:
            return f"{flag} {quote(value)}: must be {expected}"
    return f"{param.opts[0]}: must be {expected}"  # an argument, which has no flag


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the last value that the words give a flag; None if there is none."""
    value = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value
