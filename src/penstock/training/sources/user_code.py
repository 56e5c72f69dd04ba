"""Import and call what a setting names as `package.module:attribute`, with errors that point at the
user's own lines.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import SettingError
from penstock.files.text import shorten

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: Code whose lines do not help the user to find an error.
_LIBRARIES = ("site-packages", "dist-packages", "<frozen")


def is_reference(text: str) -> bool:
    """Whether a text has the form `package.module:attribute`.

    >>> is_reference("my_model:make"), is_reference("text:/tmp/book.txt"), is_reference("gpt")
    (True, False, False)
    """
    return _REFERENCE.fullmatch(text) is not None


def load_attribute(reference: str, setting: str) -> Any:
    """Import a module and return one of its attributes.

    Modules in the current folder can be imported, as with `python -m`.

    Args:
        reference: `package.module:attribute`.
        setting: name of the setting, for messages.

    Raises:
        SettingError: the form is wrong, there is no such module or attribute, or the module raises
            an exception.
    """
    if not is_reference(reference):
        raise SettingError(
            f"{setting} {shorten(reference)}: write package.module:attribute, such as "
            "my_model:make_model"
        )
    module_name, _, path = reference.partition(":")
    value: Any = _import_module(module_name, reference, setting)
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            public = [
                public_name
                for public_name, member in getattr(value, "__dict__", {}).items()
                if callable(member) and getattr(member, "__module__", None) == module_name
            ]
            known_names = f"; it has {shorten(', '.join(public))}" if public else ""
            raise SettingError(
                f"{setting} {reference}: {module_name} has no {name!r}{known_names}"
            ) from None
    return value


def _import_module(name: str, reference: str, setting: str) -> ModuleType:
    """Import a module from the path of Python or from the current folder."""
    folder = str(Path.cwd())
    # The empty text stands for the current folder.
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        # The module is there, and what it imports is not.
        if name != missing and not name.startswith(f"{missing}."):
            raise user_error(error, reference, setting) from error
        raise SettingError(
            f"{setting} {reference}: there is no module {missing!r} in {folder} or among the "
            "installed packages"
        ) from None
    except Exception as error:
        raise user_error(error, reference, setting) from error


def call_factory(
    factory: Callable[..., Any],
    reference: str,
    setting: str,
    options: Mapping[str, Any],
    available: Mapping[str, object],
) -> Any:
    """Call a user's factory.

    Args:
        factory: to call.
        reference: its name, for messages.
        setting: name of the setting, for messages; `<setting>-option` is that of its options.
        options: keyword arguments that the user has set.
        available: values for parameters that have no default and are not set.

    Raises:
        SettingError: it is no function, an option is unknown or missing, or it raises an exception.
    """
    if not callable(factory):
        raise SettingError(
            f"{setting} {reference} is not a function but of type {type(factory).__name__}"
        )
    arguments = _arguments(factory, reference, setting, options, available)
    try:
        return factory(**arguments)
    except Exception as error:
        raise user_error(error, reference, setting) from error


def _arguments(
    factory: Callable[..., Any],
    reference: str,
    setting: str,
    options: Mapping[str, Any],
    available: Mapping[str, object],
) -> dict[str, Any]:
    """Return the keyword arguments of a factory."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a function in C without a signature
        return dict(options)
    named = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    names = [parameter.name for parameter in named]
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    for option in options:
        if option not in names and not takes_any:
            accepted = f"it has {', '.join(names)}" if names else "it has none"
            raise SettingError(f"{setting} {reference} has no option {option!r}; {accepted}")
    arguments = dict(options)
    for parameter in named:
        if parameter.name in arguments or parameter.default is not parameter.empty:
            continue
        if parameter.name not in available:
            raise SettingError(
                f"{setting} {reference} needs {parameter.name}: set it by {setting}-option "
                f"{parameter.name}=VALUE"
            )
        arguments[parameter.name] = available[parameter.name]
    return arguments


def user_error(error: BaseException, reference: str, setting: str) -> SettingError:
    """Return an error that shows an exception of the user's code and the lines that raised it."""
    summary = str(error).partition("\n")[0]
    name = type(error).__name__
    lines = [f"{setting} {reference} raised {name}{': ' if summary else ''}{summary}"]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines.append(f"  {error.filename}, line {error.lineno}: {(error.text or '').strip()}")
        return SettingError("\n".join(lines))
    # Lines of Penstock and of libraries do not help the user.
    package = str(Path(__file__).parents[2])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(package)
    ]
    user_frames = [frame for frame in frames if not _is_library(frame.filename)]
    for frame in user_frames or frames[-1:]:
        lines.append(f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}")
    return SettingError("\n".join(lines))


def _is_library(filename: str) -> bool:
    """Whether a file belongs to an installed package or to Python itself."""
    return any(part in filename for part in _LIBRARIES) or filename.startswith(
        str(Path(inspect.__file__).parent)
    )
