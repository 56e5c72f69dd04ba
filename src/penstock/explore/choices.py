"""The schedules that the page offers, with their options as input fields.

Options are read from the signatures of the schedules, so that a new schedule appears on the page by
itself.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from penstock.errors import SettingError, UnknownName
from penstock.files.text import quote
from penstock.schedule.catalogue import FAMILIES, ScheduleFacts
from penstock.search.schedules import COST_SCHEDULES, schedules

#: Value of an option: a number, a word, or numbers per stage.
OptionValue = bool | int | float | str | tuple[int, ...] | tuple[float, ...]
#: Options by name.
Options = tuple[tuple[str, OptionValue], ...]

Number = TypeVar("Number", int, float)

#: Parameters of schedules that are fields of the page itself, or are set by it.
_OTHER_PARAMETERS = ("stages", "micro_batches", "batches", "costs", "replicas", "settings")
#: Options that the page offers of schedules that are searched for: a search for seconds, which is
#: their default, would not answer while a slider moves.
_SEARCH_OPTIONS: dict[str, tuple[str, int | bool]] = {
    "max_rounds": ("int", 10),
    "split": ("bool", True),
}
#: Words that options accept, by name of the option.
WORDS = {
    "backward_order": ("forward", "reverse"),
    "concatenation": ("direct", "doubling"),
}
#: Largest number of an option.
_MAX_NUMBER = 10_000


@dataclass(frozen=True)
class OptionField:
    """An option of a schedule as an input field.

    Attributes:
        name: name of the option.
        kind: "int", "float", "str", "bool", "ints" or "floats" (one per stage).
        default: text of the default; empty if the schedule chooses a value.
        words: accepted words, for "str".
    """

    name: str
    kind: str
    default: str
    words: tuple[str, ...] = ()

    def parse(self, text: str) -> OptionValue:
        """Return the value of a text.

        Raises:
            SettingError: the text is no value of this kind.
        """
        try:
            return self._value(text.strip())
        except ValueError as error:
            expected = {
                "int": "a whole number",
                "float": "a number",
                "bool": "yes or no",
                "ints": "whole numbers separated by commas, one per stage",
                "floats": "numbers separated by commas",
                "str": f"one of {', '.join(self.words)}",
            }[self.kind]
            raise SettingError(f"{self.name} takes {expected}, not {quote(text)}") from error

    def _value(self, text: str) -> OptionValue:
        """Return the value of a text.

        Raises:
            ValueError: the text is no value of this kind.
        """
        if self.kind == "int":
            return _bounded(int(text))
        if self.kind == "float":
            return _bounded(float(text))
        if self.kind == "ints":
            return tuple(_bounded(int(word)) for word in text.split(","))
        if self.kind == "floats":
            return tuple(_bounded(float(word)) for word in text.split(","))
        accepted = ("yes", "no") if self.kind == "bool" else self.words
        if accepted and text not in accepted:
            raise ValueError(text)
        return text == "yes" if self.kind == "bool" else text


def _bounded(number: Number) -> Number:
    """Return a number that is not too large.

    Raises:
        ValueError: it is too large, or no number.
    """
    # In this form, because NaN compares false.
    if not abs(number) <= _MAX_NUMBER:
        raise ValueError(number)
    return number


def value_text(value: OptionValue) -> str:
    """Write the value of an option so that `OptionField.parse` reads it back."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule of the catalogue as the page shows it.

    Attributes:
        facts: its facts.
        about: what it does, in a sentence or two.
        fields: its options.
        defaults: options that the page sets unless the user does.
    """

    facts: ScheduleFacts
    about: str
    fields: tuple[OptionField, ...]
    defaults: Options = ()

    def field(self, name: str) -> OptionField:
        """Return the option of a name.

        Raises:
            SettingError: the schedule has no such option.
        """
        for entry in self.fields:
            if entry.name == name:
                return entry
        option_names = ", ".join(entry.name for entry in self.fields) or "none"
        raise SettingError(
            f"{self.facts.name} has no option {quote(name)}; its options: {option_names}"
        )

    def structural(self, options: Options) -> Options:
        """Return the options that decide how many stages a rank has, such as `chunks`."""
        words = self.facts.stages_per_rank.split()
        return tuple((name, value) for name, value in options if name in words)


@cache
def choices() -> dict[str, ScheduleChoice]:
    """Return all schedules by name, in alphabetical order."""
    entries: dict[str, Any] = {**FAMILIES.entries(), **COST_SCHEDULES.entries()}
    facts = schedules()
    by_name = {}
    for name in sorted(entries):
        make = entries[name].make
        about = (inspect.getdoc(make) or "").split("\n\n")[0]
        plain = " ".join(about.split()).replace("`", "")
        by_name[name] = ScheduleChoice(facts[name], plain, _fields_of(make), _defaults_of(make))
    return by_name


def choice(name: str) -> ScheduleChoice:
    """Return a schedule by name or alias.

    Raises:
        UnknownName: there is no such schedule.
    """
    if name in choices():
        return choices()[name]
    for entry in choices().values():
        if name in entry.facts.aliases:
            return entry
    raise UnknownName("schedule", name, choices())


def _fields_of(make: Any) -> tuple[OptionField, ...]:
    """Return the options of a schedule's function."""
    parameters = inspect.signature(make).parameters
    fields = []
    for name, parameter in parameters.items():
        if name not in _OTHER_PARAMETERS:
            fields.append(_field(name, str(parameter.annotation), parameter.default))
    if "settings" in parameters:
        for name, (kind, default) in _SEARCH_OPTIONS.items():
            fields.append(_field(name, kind, default))
    return tuple(fields)


def _defaults_of(make: Any) -> Options:
    """Return the options that the page sets for a schedule's function."""
    if "settings" not in inspect.signature(make).parameters:
        return ()
    return tuple((name, default) for name, (_, default) in _SEARCH_OPTIONS.items())


def _field(name: str, annotation: str, default: object) -> OptionField:
    """Return the input field of a parameter."""
    if "Sequence[int]" in annotation:
        kind = "ints"
    elif "Sequence[float]" in annotation and "float |" not in annotation:
        kind = "floats"
    else:
        first_type = annotation.partition("|")[0].strip()
        kind = first_type if first_type in ("int", "float", "bool") else "str"
    text = "" if default is None else value_text(default)  # type: ignore[arg-type]  # plain values
    return OptionField(name, kind, text, WORDS.get(name, ()))
