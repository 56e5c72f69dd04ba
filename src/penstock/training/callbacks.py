"""Calls into the user's code during a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import SettingError
from penstock.training.sources.user_code import load_attribute, user_error

#: The methods that a user's object may have.
EVENTS = ("on_step", "on_evaluation", "on_checkpoint")


@dataclass(frozen=True)
class Callbacks:
    """The user's callbacks of a run, which rank 0 calls.

    Attributes:
        reference: `package.module:attribute`; None if there are none.
        target: the user's object.
    """

    reference: str | None = None
    target: object = None

    def on_step(self, step: int, loss: float, seconds: float) -> None:
        """Report a step that has been trained.

        Args:
            step: its number, from 1.
            loss: mean loss of its batch.
            seconds: duration.
        """
        self._call("on_step", step=step, loss=loss, seconds=seconds)

    def on_evaluation(self, step: int, loss: float, accuracy: float | None) -> None:
        """Report an evaluation on the test set.

        Args:
            step: number of steps trained before.
            loss: mean loss.
            accuracy: share of correct predictions; None for targets that are no classes.
        """
        self._call("on_evaluation", step=step, loss=loss, accuracy=accuracy)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Report a checkpoint that is complete.

        Args:
            step: number of steps trained before.
            folder: of the checkpoint.
        """
        self._call("on_checkpoint", step=step, folder=folder)

    def _call(self, event: str, **facts: object) -> None:
        """Call a method of the user's object, if it has it.

        Raises:
            SettingError: the method raises an exception; the message shows the user's lines.
        """
        method: Callable[..., Any] | None = getattr(self.target, event, None)
        if method is None or self.reference is None:
            return
        try:
            method(**facts)
        except Exception as error:
            raise user_error(error, f"{self.reference}.{event}", "--callbacks") from error


def import_callbacks(reference: str) -> Any:
    """Return the object or class that a setting names, see `load_callbacks`; it is not called.

    Raises:
        SettingError: it cannot be imported, or has none of the methods.
    """
    target = load_attribute(reference, "--callbacks")
    if not any(callable(getattr(target, event, None)) for event in EVENTS):
        raise SettingError(f"--callbacks {reference} has none of the methods {', '.join(EVENTS)}")
    return target


def load_callbacks(reference: str | None) -> Callbacks:
    """Return the callbacks that a setting names.

    Args:
        reference: `package.module:attribute`: an object with some of the methods of `Callbacks`; a
            class is called without arguments. None if there are none.

    Raises:
        SettingError: it cannot be imported, or has none of the methods.
    """
    if reference is None:
        return Callbacks()
    target = import_callbacks(reference)
    if isinstance(target, type):
        try:
            target = target()
        except Exception as error:
            raise user_error(error, reference, "--callbacks") from error
    return Callbacks(reference, target)
