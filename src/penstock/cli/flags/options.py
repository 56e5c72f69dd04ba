"""Flags that several commands share, and what is made of several of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.flags.flag_values import named_values
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.event import Timeline
    from penstock.schedule.op import Schedule
    from penstock.simulate.costs import Costs
    from penstock.weights.catalogue import WeightRule


def complete_schedules() -> list[str]:
    """Return the names of schedules, for shell completion."""
    from penstock.search.schedules import schedules

    return list(schedules())


def complete_weights() -> list[str]:
    """Return the names of weight rules, for shell completion."""
    from penstock.weights.catalogue import WEIGHT_RULES

    return list(WEIGHT_RULES.entries())


def complete_planners() -> list[str]:
    """Return the names of planners, for shell completion."""
    from penstock.search.catalogue import PLANNERS

    return list(PLANNERS.entries())


def complete_recompute() -> list[str]:
    """Return the recompute policies, for shell completion."""
    from penstock.schedule.recompute import Recompute

    return [policy.value for policy in Recompute]


ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="Name of a schedule; see `penstock schedules`.",
        autocompletion=complete_schedules,
    ),
]
Stages = Annotated[int | None, typer.Option("--stages", help="Number of stages.")]
MicroBatches = Annotated[
    int | None, typer.Option("--micro-batches", help="Number of micro-batches per batch.")
]
CsvFile = Annotated[
    Path | None,
    typer.Option(
        "--csv", help="Read the schedule from a CSV file of torch.distributed.pipelining."
    ),
]
ScheduleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="Option of the schedule, such as slices=4, or replicas=2,1,1 with one number per stage; "
        "repeatable.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Weight rule, such as stash or none; default: the schedule's own rule.",
        autocompletion=complete_weights,
    ),
]
WeightsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--weights-option",
        metavar="NAME=VALUE",
        help="Numeric option of the weight rule, such as decay=0.2; repeatable.",
    ),
]
Batches = Annotated[
    int | None,
    typer.Option("--batches", help="Number of batches to show; asynchronous schedules only."),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu or cuda. auto: CUDA if a GPU is visible, else the CPU."),
]
Bind = Annotated[
    str | None,
    typer.Option(
        "--bind",
        metavar="ADDRESS",
        help="Address of this host on which the sockets of the ranks listen; default: loopback "
        "if all ranks are on this host, else the address that reaches the others. As PENSTOCK_BIND.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Seconds = Annotated[
    str | None,
    typer.Option(help="Seconds: one value for all stages, or one per stage: 1,2,1.5 or 3ms."),
]
Boundary = Annotated[
    str | None,
    typer.Option(help="Seconds: one value for all stage boundaries, or one per boundary."),
]
Bytes = Annotated[
    str | None,
    typer.Option(help="Bytes: one value for all, or one per stage or boundary: 64MiB or 1GB,2GB."),
]
Recompute = Annotated[
    str,
    typer.Option(
        "--recompute",
        help="Recompute policy: never, except_last, always or selective.",
        autocompletion=complete_recompute,
    ),
]


def refuse_schedule_as_file(path: Path, command: str) -> None:
    """Refuse the name of a schedule where a command takes a file.

    Args:
        path: the file.
        command: name of the command, for the message.

    Raises:
        SettingError: there is no such file, and a schedule has this name.
    """
    if not path.exists() and str(path) in complete_schedules():
        raise SettingError(
            f"{path} is the name of a schedule: "
            f"penstock {command} --schedule {path} --stages 4 --micro-batches 8"
        )


def flag_of(name: str) -> str:
    """Return the flag of a parameter: `--micro-batches` for `micro_batches`."""
    return f"--{name.replace('_', '-')}"


def refuse_flags(reason: str, **values: object) -> None:
    """Refuse flags that are set, given by the names of their parameters.

    A flag that takes a value is None if it is not set, one that takes none is False, and one that
    is repeatable may be empty.

    Args:
        reason: of the message, after the name of the flag.
        values: of the flags.

    Raises:
        SettingError: a flag is set.
    """
    for name, value in values.items():
        if value is not None and value is not False and value != []:
            raise SettingError(f"{flag_of(name)} {reason}")


def resolve_schedule(
    name: str | None,
    stages: int | None,
    micro_batches: int | None,
    csv: Path | None,
    option: list[str] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Make the schedule that the flags name, or read it from the CSV file.

    Args:
        name: name of a schedule.
        stages: number of stages; None where a schedule made for `costs` takes it from them.
        micro_batches: per batch; 1 by default.
        csv: file to read instead.
        option: texts `name=value`.
        costs: for schedules that are optimised for given costs.

    Raises:
        SettingError: both or neither of a name and a file are given, or the number of stages is
            missing.
        ScheduleError: the schedule does not support these numbers or options.
    """
    if csv is not None:
        if option or not all(flag is None for flag in (name, stages, micro_batches)):
            raise SettingError(
                "--csv holds the whole schedule: "
                "leave out --schedule, --stages, --micro-batches and --option"
            )
        from penstock.schedule.torch_csv.files import read_csv

        return read_csv(csv)
    from_costs = name is not None and needs_costs(name)
    if name is None or (stages is None and not from_costs):
        raise SettingError(
            "name a schedule: --schedule 1f1b --stages 4 --micro-batches 8, or --csv FILE"
        )
    if from_costs and costs is None:
        raise SettingError(
            f"{name} is optimised for given costs: use `penstock simulate` or `penstock draw`, "
            "which take them as --forward 1,2,1"
        )
    from penstock.search.schedules import schedule

    schedule_options = {
        key: _whole_numbers(value) for key, value in named_values("option", option).items()
    }
    if from_costs:
        schedule_options["costs"] = costs
    return schedule(name, stages, 1 if micro_batches is None else micro_batches, **schedule_options)


def _whole_numbers(value: Any) -> Any:
    """Return a text such as `2,1,1` as a list of whole numbers; any other value as it is."""
    words = value.split(",") if isinstance(value, str) else ()
    if len(words) > 1 and all(word.strip().isdecimal() for word in words):
        return [int(word) for word in words]
    return value


def needs_costs(name: str) -> bool:
    """Whether a schedule is optimised for given costs; False for unknown names."""
    from penstock.search.schedules import schedules

    facts = schedules().get(name)
    return facts is not None and facts.needs_costs


def schedule_name_for_weights(
    name: str | None, csv: Path | None, weights: str | None
) -> str | None:
    """Return the schedule's name; where only a weight rule is named, that of its usual schedule.

    Raises:
        UnknownName: there is no such rule.
    """
    if name is not None or csv is not None or weights is None:
        return name
    from penstock.weights.compatibility import schedule_for

    return schedule_for(weights)


def with_batches(schedule: Schedule, batches: int | None) -> Schedule:
    """Extend or shorten an asynchronous schedule to a number of batches; None leaves it as it is.

    Raises:
        SettingError: the schedule is synchronous, or `batches` is below 1.
    """
    if batches is None:
        return schedule
    if schedule.stream is None:
        raise SettingError(
            f"--batches {batches}: {schedule.name} is synchronous, so all its batches are alike. "
            "Leave --batches out"
        )
    if batches < 1:
        raise SettingError(f"--batches {batches}: must be at least 1")
    from penstock.schedule.streaming.period import with_batch_count

    return with_batch_count(schedule, batches)


def schedule_summary(schedule: Schedule, after_name: str) -> str:
    """Write a schedule's size in one line: `1f1b: 4 stages on 4 ranks, 8 micro-batches`.

    Args:
        schedule: to describe.
        after_name: text between its name and its numbers.
    """
    plural = "" if schedule.micro_batches == 1 else "es"
    text = (
        f"{schedule.name}{after_name}{schedule.stages} stages on {schedule.ranks} ranks, "
        f"{schedule.micro_batches} micro-batch{plural}"
    )
    if schedule.stream is not None:
        text += f" per batch, {schedule.batches} batches shown"
    return text


def with_current_flags(
    flags: Mapping[str, str | None],
    old_flags: Mapping[str, str | None],
    renamed: Mapping[str, str],
) -> dict[str, str | None]:
    """Return flags with the values of deprecated ones, and warn on standard error of each.

    Args:
        flags: texts by current name, None if not given.
        old_flags: likewise for deprecated flags.
        renamed: the current name of every deprecated flag.

    Raises:
        SettingError: a flag is given under both names.
    """
    current = dict(flags)
    for old, text in old_flags.items():
        if text is None:
            continue
        new = renamed[old]
        old_flag, new_flag = flag_of(old), flag_of(new)
        typer.echo(f"{old_flag} is deprecated: use {new_flag}", err=True)
        if current[new] is not None:
            raise SettingError(
                f"{old_flag} is the old name of {new_flag}, and both are given: drop {old_flag}"
            )
        current[new] = text
    return current


def timeline_facts(timeline: Timeline) -> dict[str, object]:
    """Return the figures of a simulated timeline, for JSON."""
    peak_memory = timeline.peak_memory
    memory_holders = timeline.memory_holders
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
        "peak_memory": None if peak_memory is None else list(peak_memory),
        "memory_holders": None if memory_holders is None else list(memory_holders),
    }


def stream_facts(
    schedule: Schedule, rule: WeightRule, costs: Costs, recompute: str, overlap: bool
) -> dict[str, object]:
    """Return the steady-state time per batch and the weight versions of a schedule, for JSON.

    For a synchronous schedule, `seconds_per_batch` and `steady_bubble_ratio` are those of its one
    batch; for a stream that is not periodic they are None.
    """
    from penstock.errors import ScheduleError
    from penstock.simulate.steady_state import steady
    from penstock.weights.weight_uses import readings

    try:
        steady_state = steady(schedule, costs, recompute, overlap=overlap)
    except ScheduleError:
        steady_state = None
    weight_uses = readings(schedule, rule)
    return {
        "seconds_per_batch": None if steady_state is None else steady_state.seconds_per_batch,
        "steady_bubble_ratio": None if steady_state is None else steady_state.bubble_ratio,
        "weights": rule.name,
        "staleness_max": [max(ages, default=0) for ages in weight_uses.ages],
        "versions": list(weight_uses.versions),
        "more_weights": rule.extra,
    }


def print_json(value: object) -> None:
    """Print one JSON value on standard output."""
    print(json.dumps(value, indent=1))


def colour() -> bool:
    """Whether to print colours: on a terminal, unless NO_COLOR is set or TERM is "dumb"."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def columns() -> int:
    """Return the width of the terminal in columns, at least 20; 100 without a terminal."""
    return max(20, shutil.get_terminal_size((100, 24)).columns)
