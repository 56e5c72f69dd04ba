"""Everything that the page shows, as one value that is parsed from a query string.

The query of a link holds the whole state, so the server stores nothing. A text that cannot be
parsed is reported with its field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import parse_qsl, urlencode

from penstock.errors import PenstockError, SettingError
from penstock.explore.choices import Options, choice, value_text
from penstock.explore.quantities import (
    MAX_BYTES,
    MAX_SECONDS,
    bandwidth_text,
    bytes_text,
    list_text,
    parse_bandwidth,
    parse_list,
    seconds_text,
)
from penstock.files.text import quote, shorten
from penstock.simulate.costs import LINKS
from penstock.units import parse_bytes, parse_seconds

#: Largest numbers of the page. Stages x micro-batches are limited too, see `evaluate`.
MAX_RANKS, MAX_MICRO_BATCHES, MAX_REPLICAS, MAX_BATCHES = 64, 1024, 16, 32
#: Characters of a query. The longest has two lists of 64 numbers for each of ten fields.
MAX_QUERY: Final = 32_768
RECOMPUTE = ("never", "except_last", "always")


class BadState(SettingError):
    """Fields of the page cannot be parsed.

    `problems` has the message of each, by the name of the field. `texts` has the texts of the
    fields that cannot be parsed, and `state` the state of all others.
    """

    def __init__(
        self,
        problems: dict[str, str],
        state: State | None = None,
        texts: dict[str, str] | None = None,
    ) -> None:
        self.problems = problems
        self.state = State() if state is None else state
        self.texts = {name: (texts or {}).get(name, "") for name in problems}
        super().__init__("; ".join(f"{name}: {text}" for name, text in problems.items()))


@dataclass(frozen=True)
class Choice:
    """A schedule of the catalogue with options.

    Attributes:
        schedule: name of the schedule.
        options: those that the user has set.
    """

    schedule: str
    options: Options = ()


@dataclass(frozen=True)
class State:
    """Everything on the page.

    Seconds and bytes are one value for all ranks, or one per rank: of the part of the model that a
    rank holds, for one micro-batch. None leaves a cost to its default, see `Costs`.

    Attributes:
        ranks: of one pipeline.
        micro_batches: per batch.
        a, b: the schedules to compare; without `b` there is one.
        replicas: copies of the pipeline, or one number of ranks per stage.
        batches: batches to show of an asynchronous schedule.
        forward, backward, input_grad, weight_grad, update: seconds of F, B, I, W and U.
        activation_bytes, weight_bytes: as in `Costs`.
        boundary_bytes: bytes of a message, one value or one per boundary between ranks.
        bandwidth: bytes per second of a link; None is infinite.
        latency: seconds of a message of 0 bytes.
        links, overlap, recompute: as in `simulate`.
        memory_limit: bytes that a rank may hold.
    """

    ranks: int = 4
    micro_batches: int = 8
    a: Choice = Choice("1f1b")
    b: Choice | None = None
    replicas: tuple[int, ...] = (1,)
    batches: int = 3
    forward: tuple[float, ...] = (1.0,)
    backward: tuple[float, ...] | None = None
    input_grad: tuple[float, ...] | None = None
    weight_grad: tuple[float, ...] | None = None
    update: tuple[float, ...] | None = None
    activation_bytes: tuple[float, ...] | None = None
    weight_bytes: tuple[float, ...] | None = None
    boundary_bytes: tuple[float, ...] | None = None
    bandwidth: tuple[float, ...] | None = None
    latency: tuple[float, ...] | None = None
    links: str = "duplex"
    overlap: bool = True
    recompute: str = "never"
    memory_limit: int | None = None

    @property
    def query(self) -> str:
        """The state as a query string, without fields that have their defaults."""
        pairs = [
            (name, text)
            for name, text in self.texts().items()
            if name in _PANELS or "." in name or text != _DEFAULT_TEXTS[name]
        ]
        return urlencode([pair for pair in pairs if pair != ("b", "")])

    def texts(self) -> dict[str, str]:
        """Return the text of every input field by name; empty if the field has no value."""
        texts: dict[str, str] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _PANELS:
                texts |= _choice_texts(entry.name, value)
            else:
                texts[entry.name] = "" if value is None else _FIELDS[entry.name].text_of(value)
        return texts


def _choice_texts(name: str, value: Choice | None) -> dict[str, str]:
    """Return the texts of a schedule and its options: `a`, `a.chunks`."""
    if value is None:
        return {name: ""}
    options = {f"{name}.{key}": value_text(option) for key, option in value.options}
    return {name: value.schedule, **options}


@dataclass(frozen=True)
class _Field:
    """How a field of the state is read and written.

    Attributes:
        parse: its value from a text that is not empty; raises SettingError.
        text_of: a text that `parse` reads back equal.
    """

    parse: Callable[[str], object]
    text_of: Callable[..., str]


def _whole_number(largest: int) -> _Field:
    """Return a field that takes a whole number from 1 to `largest`."""

    def parse(text: str) -> int:
        word = text.strip()
        # isdecimal alone would accept digits of other alphabets.
        number = int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else 0
        if not 1 <= number <= largest:
            raise SettingError(f"must be a whole number from 1 to {largest:,}, not {quote(text)}")
        return number

    return _Field(parse, str)


def _replicas() -> _Field:
    """Return a field that takes one number of replicas, or one per stage."""
    number = _whole_number(MAX_REPLICAS)

    def parse(text: str) -> tuple[object, ...]:
        return tuple(number.parse(word) for word in text.split(","))

    return _Field(parse, lambda values: ",".join(map(str, values)))


def _word(words: Iterable[str]) -> _Field:
    """Return a field that takes one of some words."""
    accepted = tuple(words)

    def parse(text: str) -> str:
        if text not in accepted:
            raise SettingError(f"must be one of {', '.join(accepted)}, not {quote(text)}")
        return text

    return _Field(parse, str)


def _switch() -> _Field:
    """Return a field that is yes or no."""
    word = _word(("yes", "no"))
    return _Field(lambda text: word.parse(text) == "yes", lambda value: "yes" if value else "no")


def _list(parse: Callable[[str], float], text_of: Callable[[float], str], largest: float) -> _Field:
    """Return a field for one quantity, or several separated by commas."""
    return _Field(
        lambda text: parse_list(text, parse, largest), lambda values: list_text(values, text_of)
    )


def _limit(text: str) -> int:
    """Parse the memory limit."""
    limit = parse_bytes(text)
    if not 1 <= limit <= MAX_BYTES:
        raise SettingError(f"must be at least 1 byte and at most 2**53, not {quote(text)}")
    return limit


_SECONDS = _list(parse_seconds, seconds_text, MAX_SECONDS)
_BYTES = _list(lambda word: float(parse_bytes(word)), bytes_text, MAX_BYTES)

#: The panels of the page, each with a schedule and its options.
_PANELS = ("a", "b")

#: The fields other than the schedules, by name.
_FIELDS: dict[str, _Field] = {
    "ranks": _whole_number(MAX_RANKS),
    "micro_batches": _whole_number(MAX_MICRO_BATCHES),
    "replicas": _replicas(),
    "batches": _whole_number(MAX_BATCHES),
    "forward": _SECONDS,
    "backward": _SECONDS,
    "input_grad": _SECONDS,
    "weight_grad": _SECONDS,
    "update": _SECONDS,
    "activation_bytes": _BYTES,
    "weight_bytes": _BYTES,
    "boundary_bytes": _BYTES,
    "bandwidth": _list(lambda word: float(parse_bandwidth(word)), bandwidth_text, MAX_BYTES),
    "latency": _SECONDS,
    "links": _word(LINKS),
    "overlap": _switch(),
    "recompute": _word(RECOMPUTE),
    "memory_limit": _Field(_limit, bytes_text),
}
_DEFAULT_TEXTS = State().texts()


def _parse_fields(texts: Mapping[str, str], problems: dict[str, str]) -> dict[str, object]:
    """Return the values of the fields that both panels share; add what is wrong to `problems`.

    Fields of one panel are `a` and `b`, its schedule, and options such as `a.chunks`.
    """
    values: dict[str, object] = {}
    for name, text in texts.items():
        if name in _FIELDS:
            try:
                if text.strip():
                    values[name] = _FIELDS[name].parse(text)
            except SettingError as error:
                problems[name] = str(error)
        elif name.partition(".")[0] not in _PANELS:
            problems[shorten(name)] = "no field of this page: remove it from the link"
    return values


def parse_state(query: str) -> State:
    """Return the state of a query string, as `State.query` writes it.

    An empty text leaves a field at its default.

    Raises:
        BadState: a field is unknown, occurs twice, or its text cannot be parsed.
    """
    if len(query) > MAX_QUERY:
        raise BadState(
            {"": f"the link has {len(query):,} characters, more than the {MAX_QUERY:,} allowed"}
        )
    problems: dict[str, str] = {}
    texts: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=100)
    except ValueError as error:
        raise BadState({"": f"the link cannot be read: {shorten(str(error))}"}) from error
    for name, text in pairs:
        if name in texts:
            problems[shorten(name)] = "occurs twice in the link: remove one of them"
        texts[name] = text
    values = _parse_fields(texts, problems)
    for panel in _PANELS:
        parsed = _parse_choice(panel, texts, problems)
        if parsed is not None:
            values[panel] = parsed
    state = State(**values)  # type: ignore[arg-type]  # each was parsed by its field
    if problems:
        raise BadState(problems, state, texts)
    return state


def _parse_choice(panel: str, texts: dict[str, str], problems: dict[str, str]) -> Choice | None:
    """Return the schedule of a panel with its options, or None if none is named.

    Args:
        panel: "a" or "b".
        texts: by name of the field.
        problems: where messages go.
    """
    name = texts.get(panel, "").strip()
    prefix = f"{panel}."
    option_texts = {
        key.removeprefix(prefix): text for key, text in texts.items() if key.startswith(prefix)
    }
    if not name:
        if option_texts:
            problems[panel] = "name a schedule, since there are options of one"
        return None
    try:
        schedule = choice(name)
    except PenstockError as error:
        problems[panel] = str(error)
        return None
    options = []
    for key, text in option_texts.items():
        if not text.strip():
            continue
        try:
            options.append((key, schedule.field(key).parse(text)))
        except SettingError as error:
            problems[shorten(f"{panel}.{key}")] = str(error)
    return Choice(schedule.facts.name, tuple(options))
