"""What a forked process can be told to do, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: A command takes the state of its process and its arguments, and returns plain values.
Command = Callable[[dict[str, Any], dict[str, Any]], Any]

COMMANDS: dict[str, Command] = {}


def command(name: str) -> Callable[[Command], Command]:
    """Return a decorator that registers a command. The process has it if it has imported the
    module.

    Args:
        name: of the command.
    """

    def add(run: Command) -> Command:
        """Register the command and return it unchanged."""
        COMMANDS[name] = run
        return run

    return add
