"""Flags that several verbs share, and what they turn into."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import SettingError
from penstock.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from penstock.event import Timeline
    from penstock.schedule.op import Schedule
    from penstock.simulate.costs import Costs
    from penstock.weights.catalogue import WeightRule

ScheduleName = Annotated[
    str | None, typer.Option("--schedule", help="Name of a schedule; see `penstock schedules`.")
]
Stages = Annotated[int | None, typer.Option("--stages", help="Number of stages.")]
MicroBatches = Annotated[
    int | None, typer.Option("--micro-batches", help="Parts that a batch is cut into.")
]
CsvFile = Annotated[
    Path | None,
    typer.Option(
        "--csv", help="A schedule in torch.distributed.pipelining's CSV instead of a named one."
    ),
]
ModelOption = Annotated[
    list[str] | None, typer.Option(help="An option of the model, such as layers=6; again for more.")
]
ScheduleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of the schedule, such as slices=4 or replicas=2; again for more.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights", help="A weight rule instead of the schedule's own, such as stash or none."
    ),
]
WeightsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--weights-option",
        help="A number that the weight rule takes, such as decay=0.2; again for more.",
    ),
]
Batches = Annotated[
    int | None,
    typer.Option("--batches", help="Of an asynchronous schedule: how many batches to show."),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu or cuda; auto takes CUDA where a card is visible, else the CPU."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Seconds = Annotated[
    str | None, typer.Option(help="One number for all stages, or one per stage: 1,2,1.5 or 3ms.")
]
Boundary = Annotated[
    str | None, typer.Option(help="One number for all boundaries, or one per boundary.")
]
Bytes = Annotated[
    str | None,
    typer.Option(help="Bytes, one number for all or one per stage or boundary: 64MiB or 1GB,2GB."),
]
Recompute = Annotated[
    str, typer.Option("--recompute", help="never, except_last, always or selective.")
]


#: Longer rows of numbers are cut in the middle.
_LONG = 32


def the_schedule(
    name: str | None,
    stages: int | None,
    micro_batches: int | None,
    csv: Path | None,
    option: list[str] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule that the flags name; `costs` are for schedules that are made to measure.

    Raises:
        SettingError: both or neither of a name and a file are given, or the number of stages is
        missing. ScheduleError: the schedule does not take these numbers or options.
    """
    if csv is not None:
        if name or stages or micro_batches or option:
            raise SettingError(
                "--csv holds the whole schedule: leave out --schedule, --stages, --micro-batches and --option"
            )
        from penstock.schedule.csv import read_csv

        return read_csv(csv)
    from penstock.search.schedules import schedule, schedules

    measured = name is not None and name in (known := schedules()) and known[name].needs_costs
    if name is None or (stages is None and not measured):
        raise SettingError(
            "say which schedule: --schedule 1f1b --stages 4 --micro-batches 8, or --csv FILE"
        )
    if measured and costs is None:
        raise SettingError(
            f"{name} is made for costs: `penstock simulate` and `penstock draw` take them, --forward 1,2,1"
        )
    chosen = named_values("option", option) | ({"costs": costs} if measured else {})
    return schedule(name, stages, 1 if micro_batches is None else micro_batches, **chosen)


def for_weights(name: str | None, csv: Path | None, weights: str | None) -> str | None:
    """The schedule's name, or where only a weight rule is named, that of the schedule it runs with.

    Raises:
        UnknownName: there is no such rule.
    """
    if name is not None or csv is not None or weights is None:
        return name
    from penstock.weights.choice import schedule_for

    return schedule_for(weights)


def shown(made: Schedule, batches: int | None) -> Schedule:
    """The schedule with so many batches, if it goes on from batch to batch.

    Raises:
        SettingError: it does not, or there is no batch.
    """
    if batches is None:
        return made
    if made.stream is None:
        raise SettingError(
            f"--batches {batches}: {made.name} is synchronous, every batch of it is the same. Leave --batches out"
        )
    if batches < 1:
        raise SettingError(f"--batches {batches}: there is at least 1")
    from penstock.schedule.period import prolonged

    return prolonged(made, batches)


def numbers_named(flag: str, texts: list[str] | None) -> dict[str, float]:
    """`["decay=0.2"]` as `{"decay": 0.2}`.

    Raises:
        SettingError: a text has no name, or its value is no number.
    """
    found = named_values(flag, texts)
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingError(f"--{flag} {name}={value}: write a number, such as {name}=0.5")
    return {name: float(value) for name, value in found.items()}


def numbers(
    flag: str, text: str | None, parse: Callable[[str], float] = parse_seconds
) -> float | list[float] | None:
    """Seconds from `1`, `2ms` or `1,2,3`; or what else `parse` reads.

    Raises:
        SettingError: something among them is no such quantity.
    """
    if text is None:
        return None
    try:
        values = [parse(word) for word in text.split(",")]
    except SettingError as error:
        raise SettingError(f"--{flag} {text}: {error}") from error
    return values[0] if len(values) == 1 else values


def costs_given(flags: Mapping[str, str | None], links: str) -> Costs:
    """The costs that the flags give, by the names of Costs' fields; those that end in `_bytes`, and
    bandwidth, are in bytes.

    Raises:
        SettingError: a text is no quantity, or the flags do not go together.
    """
    from penstock.simulate.costs import Costs

    def bytes_per_second(word: str) -> float:
        return parse_bytes(word.strip().removesuffix("/s"))

    given: dict[str, Any] = {}
    for name, text in flags.items():
        parse = (
            parse_bytes
            if name.endswith("_bytes")
            else bytes_per_second
            if name == "bandwidth"
            else parse_seconds
        )
        if text is not None:
            given[name] = numbers(name.replace("_", "-"), text, parse)
    return Costs(**given, links=links)


def named_values(flag: str, texts: list[str] | None) -> dict[str, Any]:
    """`["layers=6"]` as `{"layers": 6}`; values are read as YAML reads them.

    Raises:
        SettingError: a text has no name or no value.
    """
    import yaml

    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SettingError(f"--{flag} {text}: write name=value, such as layers=6")
        found[name.strip().replace("-", "_")] = yaml.safe_load(value)
    return found


def timeline_facts(timeline: Timeline) -> dict[str, object]:
    """What a simulation says, as JSON has it."""
    return {
        "schedule": timeline.title,
        "ranks": timeline.ranks,
        "stages": timeline.stages,
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "span_bubble_ratio": timeline.span_bubble_ratio,
        "busy": list(timeline.busy),
        "peak_in_flight": list(timeline.peak_in_flight),
        "peak_on_rank": list(timeline.peak_on_rank),
        "peak_memory": None if timeline.peak_memory is None else list(timeline.peak_memory),
        "memory_holders": None
        if timeline.memory_holders is None
        else list(timeline.memory_holders),
    }


def stream_facts(
    made: Schedule, rule: WeightRule, costs: Costs, recompute: str, overlap: bool
) -> dict[str, object]:
    """What a schedule takes for a batch once it is full, and what that does to the weights, as JSON
    has it.

    `seconds_per_batch` and `steady_bubble_ratio` of a synchronous schedule are those of its one
    batch; of a stream that does not repeat itself they are None.
    """
    from penstock.errors import ScheduleError
    from penstock.simulate.steady import steady
    from penstock.weights.uses import readings

    try:
        found = steady(made, costs, recompute, overlap=overlap)
    except ScheduleError:
        found = None
    read = readings(made, rule)
    return {
        "seconds_per_batch": None if found is None else found.seconds_per_batch,
        "steady_bubble_ratio": None if found is None else found.bubble_ratio,
        "weights": rule.name,
        "staleness_max": [max(ages, default=0) for ages in read.ages],
        "versions": list(read.versions),
        "more_weights": rule.extra,
    }


def print_json(value: object) -> None:
    """One JSON value on standard output."""
    print(json.dumps(value, indent=1))


def colour() -> bool:
    """Whether standard output shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """Columns of the terminal, or 100 where there is none."""
    return max(20, shutil.get_terminal_size((100, 24)).columns)


def row(values: Iterable[object], between: str = " ") -> str:
    """Values in a line; of many, the first and the last."""
    words = list(map(str, values))
    return between.join(
        words if len(words) <= _LONG else [*words[:6], f"… {len(words) - 9} more …", *words[-3:]]
    )


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns of text under a head."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)
